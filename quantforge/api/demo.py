"""Copy the small trained demo model out of the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from quantforge.api.demo_text import evaluation_text
from quantforge.api.scored_text import REFERENCE_TEXT
from quantforge.arguments import check_arguments
from quantforge.errors import InputError, RefusedError
from quantforge.files.disk import DISK, make_directory, save_file, write_errors
from quantforge.files.opener import FILES
from quantforge_files.roles import TOKENIZER

NAME = "demo"


@check_arguments()
def demo(out: str | Path = NAME) -> Path:
    """Copy the demo model (a llama of 4 million weights, trained on Python's standard library) to a new directory.

    The directory also gets an evaluation text that the model was not trained on: modules of the running Python.

    Args:
        out: directory to create.

    Returns:
        The directory.

    Raises:
        RefusedError: the path exists.
        InputError: the parent directory is missing or not writable.
        ResourceError: the disk is full or fails.
    """
    directory = Path(out)
    if directory.is_symlink() or directory.exists():
        raise RefusedError(f"{directory}: exists", "choose another name, or use what is there")
    if not directory.parent.is_dir():
        raise InputError(
            f"{directory}: no directory {directory.parent}", f"mkdir -p {directory.parent}"
        )
    temporary = directory.with_name(f".{directory.name}.part")
    text = evaluation_text().encode()
    with write_errors(
        directory, len(text) + sum(path.stat().st_size for path in _packaged_model().iterdir())
    ):
        try:
            make_directory(temporary)
            for path in sorted(_packaged_model().iterdir()):
                save_file(
                    temporary / path.name, FILES.read(path, TOKENIZER, None), overwrite=True
                )  # a few MB each
            if text:
                save_file(temporary / REFERENCE_TEXT, text, overwrite=True)
            DISK.rename(temporary, directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return directory


def _packaged_model() -> Path:
    """Return the directory of the demo model: inside the package, or next to it in a git checkout."""
    package = Path(__file__).parent.parent
    packaged_path = package / "models" / NAME
    return packaged_path if packaged_path.is_dir() else package.parent / "models" / NAME
