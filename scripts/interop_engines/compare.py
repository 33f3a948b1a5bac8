"""Shared by the engine scripts: go through the artifacts, note what loads and how far it is from our decoding."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

Measure = Callable[[Path, Any], dict[str, float]]


def figures(logits: Any, expected: Any) -> dict[str, float]:
    """Largest difference of logits ``[positions, vocabulary]``, and mean KL divergence from ours in nats."""
    ours, theirs = expected["logits"].astype(np.float64), np.asarray(logits, dtype=np.float64)
    first, second = _log_softmax(ours), _log_softmax(theirs)
    divergence = (np.exp(first) * (first - second)).sum(-1).mean()
    return {"difference": float(np.abs(ours - theirs).max()), "mean": float(divergence)}


def _log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def run(measure: Measure, packages: tuple[str, ...], wanted: Callable[[str], bool]) -> None:
    """Measure every artifact of the directory on the command line, or those named after it; print one JSON document."""
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    found: dict[str, dict[str, object]] = {}
    for expected in sorted(directory.glob("*.npz")):
        name = expected.stem
        if not wanted(name) or (names and name not in names):
            continue
        try:
            found[name] = {**measure(directory / name, np.load(expected))}
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
