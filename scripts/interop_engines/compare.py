"""Shared by the engine scripts: go through the artifacts, note what loads and how far it is from our decoding."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

Measure = Callable[[Path, Any], float]


def run(measure: Measure, packages: tuple[str, ...], wanted: Callable[[str], bool]) -> None:
    """Measure every artifact of the directory on the command line; print one JSON document."""
    directory = Path(sys.argv[1])
    found: dict[str, dict[str, object]] = {}
    for expected in sorted(directory.glob("*.npz")):
        name = expected.stem
        if not wanted(name):
            continue
        try:
            found[name] = {"difference": measure(directory / name, np.load(expected))}
        except Exception as error:  # whatever an engine raises is the result
            lines = [line for line in str(error).splitlines() if line.strip() and "://" not in line]
            found[name] = {
                "error": f"{type(error).__name__}: {(lines or [''])[-1].partition(' [type=')[0].strip()}"
            }
        sys.stderr.write(f"{name}: {found[name]}\n")
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    sys.stdout.write(json.dumps({"artifacts": found, "versions": versions}) + "\n")
