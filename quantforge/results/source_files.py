"""Sizes and digests of the files of a source: what a manifest states of it, and what is compared with that."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from quantforge.checkpoint.reader import CONFIG, Checkpoint
from quantforge.checkpoint.seal import Seal, seal
from quantforge.results import manifest


def small_files(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return size and digest of each file beside the weights of a model, by its name inside of the model."""
    if checkpoint.path.is_file():
        return {}
    return manifest.digests(checkpoint.path, [checkpoint.path / CONFIG, *checkpoint.side_files])


def seals_of(checkpoint: Checkpoint, workers: int = 1) -> dict[Path, Seal]:
    """Return the seal (size, digest) of each file of weights, by its path; ``workers`` files are read side by side."""
    root = checkpoint.path.parent if checkpoint.path.is_file() else checkpoint.path
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(partial(seal, inside=root), checkpoint.shards)
        return dict(zip(checkpoint.shards, found, strict=True))


def files_of_source(
    checkpoint: Checkpoint, seals: Mapping[Path, Seal] | None = None
) -> dict[str, dict[str, Any]]:
    """Return size and digest of every file of a model that is read, by its name inside of the model."""
    root = checkpoint.path.parent if checkpoint.path.is_file() else checkpoint.path
    weights = {
        str(path.relative_to(root)): {"bytes": known.size, "sha256": known.sha256}
        for path, known in (seals or seals_of(checkpoint)).items()
    }
    return dict(sorted({**weights, **small_files(checkpoint)}.items()))
