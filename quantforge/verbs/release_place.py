"""Place of a release: the directory that its manifest makes known, what may lie there, and files renewed there."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from quantforge.checkpoint.disk import check_new, place_of_run, save
from quantforge.checkpoint.foreign_json import read_object
from quantforge.checkpoint.stage import check_folder
from quantforge.errors import InputError, RefusedError
from quantforge.formats import format_of
from quantforge.planning.release_spec import REPORTS
from quantforge.results import manifest
from quantforge.results.card_figures import read_card
from quantforge.verbs.folder_cards import check_folder_card
from quantforge.verbs.plan_release import PlannedVariant
from quantforge_files.roles import MANIFEST

SCHEMA = "quantforge.release/1"
SPEC = "release.toml"  # the copy in the release
MANIFEST_NAME, SUMS, UPLOAD = "release.json", "SHA256SUMS", "upload.sh"


def begin(place: Path, asked_by: bytes) -> None:
    """Note in a new directory that a release is made there, and by which file; errors as `save`."""
    if not is_release(place):
        document = json.dumps({"schema": SCHEMA, "variants": []}) + "\n"
        renew(place / MANIFEST_NAME, document.encode())
    renew(place / SPEC, asked_by)


def is_release(place: Path) -> bool:
    """Return whether a release was begun in a directory: its manifest is ours."""
    try:
        return read_object(place / MANIFEST_NAME, MANIFEST, place).get("schema") == SCHEMA
    except InputError:
        return False


def renew(path: Path, data: bytes) -> None:
    """Write a file, in place of an earlier one; one that has these bytes stays as it is. Errors as `save`."""
    digest = hashlib.sha256(data).hexdigest()
    same = path.is_file() and not path.is_symlink() and path.stat().st_size == len(data)
    if not same or manifest.sha256(path, path.parent) != digest:
        save(path, data, overwrite=True)


def check_place(place: Path) -> None:
    """Refuse a directory that holds something else than a release; errors as `check_folder` and `check_new`."""
    check_folder(place)
    own = place_of_run(place / SPEC)  # of a process that begins this release
    begun = re.compile(rf"\.{re.escape(MANIFEST_NAME)}\.[0-9a-f]+\.part")  # of one that was killed
    there = place.iterdir() if place.exists() else ()
    others = [path for path in there if path != own and not begun.fullmatch(path.name)]
    if others and not is_release(place):
        raise RefusedError(
            f"{place}: exists, and is no release", "name a new directory with -o", file=str(place)
        )
    for name in (SPEC, MANIFEST_NAME, UPLOAD, SUMS, *(f"evaluation.{kind}" for kind in REPORTS)):
        if os.path.lexists(place / name):
            check_new(place / name, overwrite=True)


def check_variants(planned: Sequence[PlannedVariant], *, scored: bool) -> None:
    """Refuse places of variants that nothing can be written to, and cards that figures cannot be written into.

    Args:
        planned: of the release.
        scored: whether figures will be written.

    Raises:
        InputError: a folder is a link or a file, or a card lacks a part.
    """
    for folder in dict.fromkeys(one.out.parent for one in planned):
        if os.path.lexists(folder):
            check_folder(folder)
    for one in planned:
        if format_of(one.planned.plan.format).ABOUT.one_file:
            check_folder_card(one.out.parent)
        elif scored and one.there:
            read_card(one.out)
