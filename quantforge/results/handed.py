"""Weight files that a command has taken: a manifest lists them as if they were there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.errors import IntegrityError


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
