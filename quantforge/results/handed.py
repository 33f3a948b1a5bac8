"""Weight files that a command has taken: a manifest lists them as if they were there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantforge.errors import IntegrityError

WEIGHTS = ".safetensors"


def away(out: Path, document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the weight files that the manifest of a directory lists and that are not in it."""
    stated = document.get("outputs")
    names = stated if isinstance(stated, Mapping) and out.is_dir() else ()
    weights = (name for name in names if name.endswith(WEIGHTS))
    return tuple(name for name in weights if not os.path.isfile(out / name))  # noqa: PTH113 - Path's raises


def put_back(names: Sequence[str], out: Path, taker: str = "") -> str:
    """Return what to do where weight files are not in a directory; ``taker`` is the command that they went to."""
    several = len(names) != 1
    count, are = f"{len(names)} weight file{'s' * several}", "are" if several else "is"
    them = "them" if several else "it"
    if taker:
        were = "were" if several else "was"
        return (
            f"{count} {were} handed over to {taker} and {are} not in {out}: put {them} back first"
        )
    return f"{count} {are} not in {out}: put {them} back first (a command of --on-shard moves such files)"


def with_handed(
    outputs: Mapping[str, dict[str, Any]], handed: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return digests of files with those of the files that a command has taken, sorted by name.

    Raises:
        IntegrityError: one that it has left is not what it was.
    """
    for name, entry in handed.items():
        if outputs.get(name, entry) != entry:
            raise IntegrityError(
                f"{name}: was changed by the command of --on-shard",
                "it may move or copy a shard; start afresh with one that does",
                file=name,
            )
    return dict(sorted({**handed, **outputs}.items()))
