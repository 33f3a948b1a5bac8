"""The place of a result: which name it has, and what may stand there before.

A directory is replaced only if it is an earlier result and holds nothing else; it is never the model that is read, nor
a part of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from quantforge.checkpoint.disk import check_name
from quantforge.checkpoint.earlier import Earlier, already_there, earlier
from quantforge.errors import InputError, RefusedError, UsageError

MANIFEST = "quantforge.manifest.json"
SIGNATURE = ".sig"
OF_DIRECTORY = f"model{SIGNATURE}"


def absolute(out: Path) -> Path:
    """Return ``out`` with its parent resolved; the last part is kept, so that a link there is seen.

    Raises:
        UsageError: ``out`` is no name for a directory, or as `check_name`.
        InputError: its parent is missing.
    """
    if out.name in {"", ".."}:
        raise UsageError(f"--output {out}: no name for a directory", "e.g. --output quantized")
    check_name(out, "--output")
    try:
        parent = Path(os.path.realpath(out.parent, strict=True))
    except OSError as error:
        raise InputError(
            f"{out.parent}: {error.strerror}", f"mkdir -p {out.parent}", file=str(out)
        ) from error
    return parent / out.name


def check_folder(place: Path) -> None:
    """Refuse a place where no directory of several results can be made or gone on with.

    Raises:
        UsageError: as `check_name`.
        InputError: its parent is missing, or it is a link or a file.
    """
    check_name(place, "--output")
    if not place.parent.is_dir():
        raise InputError(
            f"{place}: no directory {place.parent}", f"mkdir -p {place.parent}", file=str(place)
        )
    if place.is_symlink():
        hint = f"give the directory that it leads to: {os.path.realpath(place)}"
        raise InputError(f"{place}: is a link", hint, file=str(place))
    if place.exists() and not place.is_dir():
        raise InputError(
            f"{place}: is no directory", "name a new directory with -o", file=str(place)
        )


def check_apart(out: Path, source: Path | None) -> None:
    """Refuse a result that would touch the model which it is made from.

    Raises:
        UsageError: one of the two is, or lies in, the other.
    """
    if source is None:
        return
    real, place = Path(os.path.realpath(source)), Path(os.path.realpath(out))
    if place == real or place.is_relative_to(real) or real.is_relative_to(place):
        raise UsageError(
            f"--output {out}: overlaps the model {source}", "write to a directory beside the model"
        )


def check_replaceable(out: Path, overwrite: bool) -> None:
    """Refuse a place where something is that must not be replaced.

    Raises:
        RefusedError: no directory, not to be overwritten, or not only what an earlier result's manifest lists.
    """

    def refuse(what: str, hint: str) -> RefusedError:
        return RefusedError(f"{out}: {what}", hint, file=str(out))

    if out.is_symlink():
        raise refuse("is a link", f"give the directory that it leads to: {os.path.realpath(out)}")
    if not out.exists():
        return
    if not out.is_dir():
        raise refuse("is a file", "give the name of a directory")
    if not overwrite:
        raise already_there(out, out, out / MANIFEST)
    if not any(out.iterdir()):
        return
    if not os.path.lexists(out / MANIFEST):
        raise refuse(
            f"is not a result of quantforge (it holds no {MANIFEST}) and will not be replaced",
            "choose another --output, or remove the directory yourself",
        )
    earlier_release(out).check_alone()


def earlier_release(directory: Path) -> Earlier:
    """Return the files of the result that a directory holds; errors as `quantforge.checkpoint.earlier.earlier`."""
    return earlier(directory, MANIFEST, OF_DIRECTORY, lambda _: True)


def unwritable(directory: Path, error: OSError) -> InputError:
    """Return the error of a directory in which nothing can be made."""
    return InputError(
        f"{directory}: cannot write here: {error.strerror}",
        "choose an --output in a directory that you may write to",
        file=str(directory),
    )
