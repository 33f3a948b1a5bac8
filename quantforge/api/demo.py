"""Demo: the small trained model that comes with the package, copied out to try things on."""

from __future__ import annotations

import shutil
from pathlib import Path

from quantforge.api.demo_text import evaluation_text
from quantforge.api.scored_text import OWN
from quantforge.arguments import check_arguments
from quantforge.errors import InputError, RefusedError
from quantforge.files.disk import DISK, make_folder, save, writing
from quantforge.files.opener import FILES
from quantforge_files.roles import TOKENIZER

NAME = "demo"


@check_arguments()
def demo(out: str | Path = NAME) -> Path:
    """Copy the demo model (a llama of 4 million weights, trained on Python's standard library) to a new directory.

    Beside it lies a text of the kind that it was trained on, which it has not seen: modules of the running Python.

    Args:
        out: the directory.

    Returns:
        The directory.

    Raises:
        RefusedError: something is there already.
        InputError: its parent is missing, or not to be written to.
        ResourceError: the disk is full or fails.
    """
    place = Path(out)
    if place.is_symlink() or place.exists():
        raise RefusedError(f"{place}: exists", "choose another name, or use what is there")
    if not place.parent.is_dir():
        raise InputError(f"{place}: no directory {place.parent}", f"mkdir -p {place.parent}")
    part = place.with_name(f".{place.name}.part")
    text = evaluation_text().encode()
    with writing(place, len(text) + sum(path.stat().st_size for path in _packaged().iterdir())):
        try:
            make_folder(part)
            for path in sorted(_packaged().iterdir()):
                save(
                    part / path.name, FILES.read(path, TOKENIZER, None), overwrite=True
                )  # a few MB each
            if text:
                save(part / OWN, text, overwrite=True)
            DISK.rename(part, place)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return place


def _packaged() -> Path:
    """Return where the model lies: in the package, or in a checkout beside it."""
    package = Path(__file__).parent.parent
    inside = package / "models" / NAME
    return inside if inside.is_dir() else package.parent / "models" / NAME
