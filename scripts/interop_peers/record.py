"""Shared by the peer scripts: what a tool made, with which versions, and what it decodes its own files to."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

CALIBRATION = [[(7 * row + 13 * place) % 95 + 2 for place in range(64)] for row in range(16)]


def digest(weight: Any) -> str:
    """SHA-256 of a decoded weight ``[out, in]`` (a numpy array) as little-endian float32, without signs of zeros."""
    return hashlib.sha256((weight.astype("<f4") + 0.0).astype("<f4").tobytes()).hexdigest()


def linears(model: Any) -> dict[str, Any]:
    """Modules of the block of a tiny llama by name."""
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


def run(makers: Mapping[str, Callable[..., Mapping[str, Any]]], packages: tuple[str, ...]) -> None:
    """Call the makers whose artifacts are asked for and write ``NAME.json`` beside each artifact.

    The command line is SOURCES OUT [NAME...]. A maker gets the folder of the sources and the path of its artifact; it
    returns ``source``, ``made`` (how), ``dtype`` (of the decoded weights) and ``decoded`` (their digests by module).
    """
    sources, out, *names = sys.argv[1:]
    versions = {package: version(package) for package in packages}
    for name, maker in makers.items():
        if names and name not in names:
            continue
        try:
            record = maker(Path(sources), Path(out) / name)
        except Exception as error:  # what a tool cannot make is a result
            sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")
            if names:
                raise
            continue
        document = {"versions": versions, **record}
        text = json.dumps(document, indent=1, sort_keys=True) + "\n"
        (Path(out) / f"{name}.json").write_text(text)
        sys.stderr.write(f"{name}: made\n")
