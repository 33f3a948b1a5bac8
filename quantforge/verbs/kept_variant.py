"""One of several results that an earlier command has finished: kept if it is what would be made now."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantforge.checkpoint.disk import place_of_run
from quantforge.checkpoint.publish_file import side_of
from quantforge.checkpoint.recipe_toml import differences
from quantforge.checkpoint.stage import STAGE, Stage
from quantforge.errors import RefusedError
from quantforge.formats import format_of
from quantforge.planning.planner import Planned
from quantforge.results import manifest
from quantforge.results.card_figures import CARD
from quantforge.results.provenance import STATEMENT
from quantforge.results.signing import signature_of
from quantforge.settings import Settings
from quantforge.verbs.finished_result import forget


def kept(out: Path, planned: Planned, files: Mapping[str, Any], settings: Settings) -> bool:
    """Return whether a result is there, whole, and by this recipe from this source.

    Args:
        out: where it would lie.
        planned: what would be made.
        files: of the source, by `files_of_source`.
        settings: how it would be made.

    Raises:
        RefusedError: what lies there is something else.
    """
    if _staged(out):  # its own command ends what was killed
        return False
    if not os.path.lexists(out):
        _check_alone_gone(out, planned, settings)
        return False
    document = manifest.read(out)
    stated = {} if document is None else document
    source: Any = stated.get("source", {})
    if not settings.overwrite:
        _check_none_missing(stated, out)
    recipe = planned.recipe.to_toml()
    same = {
        "recipe": stated.get("recipe") == recipe,
        "source": source.get("files") == files,
        "versions": stated.get("versions") == manifest.versions(),
        "files": document is not None and _whole(document, out),
        "provenance": not settings.provenance
        or any(n.endswith(STATEMENT) for n in stated.get("outputs", ())),
        "signature": settings.sign is None or signature_of(out).exists(),
    }
    if all(same.values()) or settings.overwrite:
        return all(same.values())
    other = "; ".join(
        "; ".join(differences(str(stated.get("recipe", "")), recipe)) if name == "recipe" else name
        for name, equal in same.items() if not equal
    )  # fmt: skip
    raise RefusedError(
        f"{out}: is there, and differs from what would be made in: {other}",
        "replace it with --overwrite, move it away, or choose another place",
        file=str(out),
    )


def _check_alone_gone(out: Path, planned: Planned, settings: Settings) -> None:
    """Refuse to make a file anew of which the manifest is still there: somebody has removed or moved it.

    Raises:
        RefusedError: it is there, and nothing is to be overwritten.
    """
    one_file = format_of(planned.plan.format).ABOUT.one_file
    if one_file and os.path.lexists(side_of(out)) and not settings.overwrite:
        raise RefusedError(
            f"{out}: is not there, but its manifest {side_of(out).name} is",
            f"put it back, or have it made again after: mv {shlex.quote(str(out))}* ELSEWHERE",
            file=str(out),
        )


def _check_none_missing(document: Mapping[str, Any], out: Path) -> None:
    """Refuse to make a directory anew of which files are missing: somebody has removed or moved them.

    Raises:
        RefusedError: naming the first.
    """
    names = [name for name in document.get("outputs", ()) if name != CARD] if out.is_dir() else []
    missing = [name for name in names if not os.path.lexists(out / name)]
    if missing:
        raise RefusedError(
            f"{out}: {missing[0]} is not there, but its manifest lists it",
            f"put it back, or have all of it made again after: mv {shlex.quote(str(out))} ELSEWHERE",
            file=str(out / missing[0]),
        )


def check_whole_file(planned: Planned) -> None:
    """Refuse a result of numbered files: what is made of several results names each by one file or directory.

    Raises:
        RefusedError: with the number of files.
    """
    if format_of(planned.plan.format).ABOUT.one_file and len(planned.files) > 1:
        raise RefusedError(
            f"its file would be split into {len(planned.files)} (max_shard_bytes)",
            "leave max_shard_bytes out",
        )


def clear_run(out: Path) -> None:
    """Remove what the run of a result that is kept has left beside it, unless another process is about it."""
    if place_of_run(out).is_dir() and not _staged(out):
        with suppress(OSError):  # of a directory that may only be read
            forget(Stage(out, overwrite=False))


def _staged(out: Path) -> bool:
    """Return whether a run has yet to publish, or to remove what it has replaced."""
    return os.path.lexists(place_of_run(out) / STAGE)


def _whole(document: Mapping[str, Any], out: Path) -> bool:
    """Return whether the files of a manifest are there with their sizes, but for the card, into which figures go."""
    root = out if out.is_dir() else out.parent
    try:
        return all(
            (root / name).lstat().st_size == stated["bytes"]
            for name, stated in document["outputs"].items() if name != CARD
        )  # fmt: skip
    except OSError:
        return False
