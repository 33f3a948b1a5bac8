"""Parts of ``README.md`` that may change after the result is made: measured figures and loading code.

Figures are a section of the text, and ``model-index`` in the front matter, where hubs look for them. The code that
loads a result names this directory, or in a release the repository. The manifest declares these parts (``mutable``);
`verify` does not compare the card, and a signature leaves it out. Writing a part replaces only what is between its
delimiters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quantforge.artifacts import manifest
from quantforge.errors import InputError, UsageError
from quantforge.files.disk import save_file
from quantforge.files.opener import FILES
from quantforge_files.roles import CARD as CARD_ROLE

CARD = "README.md"
# Path in the loading code, relative so that the card does not depend on where it is made
HERE = "."
LOADED_FROM = "The code loads it from "


@dataclass(frozen=True, slots=True)
class MutablePart:
    """A replaceable part of a card.

    Attributes:
        begin: the line before the part.
        end: the line after the part.
    """

    begin: str
    end: str

    @property
    def empty(self) -> str:
        """Return the two delimiters with nothing between them."""
        return f"{self.begin}\n{self.end}"

    def replaced(self, text: str, content: str) -> str:
        """Return the text of a card with new content in this part.

        Raises:
            ValueError: a delimiter is missing or occurs twice, or they are in the wrong order.
        """
        lines = text.splitlines(keepends=True)
        bare = [line.rstrip("\r\n") for line in lines]
        if bare.count(self.begin) != 1 or bare.count(self.end) != 1:
            raise ValueError(self)
        first, last = bare.index(self.begin), bare.index(self.end)
        if first > last:
            raise ValueError(self)
        new_content = f"{content.strip()}\n" if content.strip() else ""
        return "".join([*lines[: first + 1], new_content, *lines[last:]])

    def content(self, text: str) -> str:
        """Return the content of this part in a card; "" if a user has removed the delimiters."""
        _, begin_marker, after_marker = text.partition(f"{self.begin}\n")
        content, end_marker, _ = after_marker.partition(f"\n{self.end}\n")
        return content if begin_marker and end_marker else ""


_SECTION = MutablePart("<!-- quantforge eval: begin -->", "<!-- quantforge eval: end -->")
_INDEX = MutablePart("# quantforge eval: begin", "# quantforge eval: end")
LOADING = MutablePart("<!-- quantforge loading: begin -->", "<!-- quantforge loading: end -->")
EMPTY_FIGURES, EMPTY_INDEX = _SECTION.empty, _INDEX.empty
MUTABLE = [
    {"file": CARD, "begin": part.begin, "end": part.end} for part in (_SECTION, _INDEX, LOADING)
]  # as the manifest declares it


def with_figures(text: str, section: str, index: str) -> str:
    """Return the text of a card with new figures.

    Args:
        text: text of the card.
        section: figures as Markdown.
        index: YAML for the front matter, only ``model-index``.

    Raises:
        ValueError: as `MutablePart.replaced`.
    """
    return _INDEX.replaced(_SECTION.replaced(text, section), index)


def read_card(folder: Path) -> str:
    """Return the card of a folder after checking the delimiters for figures.

    Raises:
        InputError: there is no card, or a delimiter is missing or damaged.
    """
    path = folder / CARD
    if not path.is_file():
        raise InputError(
            "there is no card",
            "results of quantize and export have one",
            file=str(path),
            subject=str(path),
        )
    text = _text(folder)
    try:
        with_figures(text, "", "")
    except ValueError as error:
        markers = error.args[0]
        place = "in the front matter" if markers is _INDEX else "where the figures should stand"
        raise InputError(
            f"the part for measured figures is not between one line '{markers.begin}' and one line '{markers.end}'",
            f"put these two lines {place}, each on a line of its own",
            file=str(path),
            subject=str(path),
        ) from error
    return text


def has_figures(folder: Path) -> bool:
    """Return whether the card of a folder holds figures, or has no place for them because a user removed it."""
    try:
        return bool(_SECTION.content(read_card(folder)))
    except InputError:
        return True


def is_in_folder(model: Path, folder: Path) -> bool:
    """Return whether a model is the folder itself or a file in it."""
    model_folder = model.parent if model.is_file() else model
    return model_folder.resolve() == folder.resolve()


def check_card(folder: Path, models: Iterable[Path]) -> None:
    """Refuse, before anything is measured, a card that figures cannot be written into.

    Args:
        folder: folder of the card.
        models: the models that will be measured.

    Raises:
        UsageError: none of the models is in the folder.
        InputError: as `read_card`, or the manifest of a result does not declare the card mutable.
    """
    own_models = [model for model in models if is_in_folder(model, folder)]
    if not own_models:
        raise UsageError(
            f"--card {folder}: no model of it is measured",
            "quantforge eval REFERENCE DIR --card DIR",
        )
    read_card(folder)
    for model in own_models:
        declared = (manifest.read_manifest(model) or {}).get("mutable")
        if not isinstance(declared, list) or any(field not in declared for field in MUTABLE[:2]):
            raise InputError(
                f"{model}: no manifest beside it declares parts of {CARD} mutable",
                "only results of this version have such cards: quantize or export again",
                file=str(model),
            )


def write_figures(folder: Path, section: str, index: str) -> None:
    """Replace the figures in the card of a folder; errors as `read_card` and `save_file`."""
    _save(folder, with_figures(read_card(folder), section, index))


def write_loading(folder: Path, content: str) -> None:
    """Replace the loading code in the card of a folder, unless a user has removed the delimiters."""
    if (folder / CARD).is_file():
        text = _text(folder)
        if LOADING.content(text) not in {"", content}:
            _save(folder, LOADING.replaced(text, content))


def restore_local_loading(folder: Path) -> None:
    """Make the loading code of a card load the local directory again."""
    if (folder / CARD).is_file():
        code = LOADING.content(_text(folder))
        if match := re.match(re.escape(LOADED_FROM) + "`([^`]+)`", code):
            write_loading(folder, code.replace(match[1], HERE))


def _text(folder: Path) -> str:
    return FILES.read(folder / CARD, CARD_ROLE, folder).decode("utf-8", "surrogateescape")


def _save(folder: Path, text: str) -> None:
    save_file(folder / CARD, text.encode("utf-8", "surrogateescape"), overwrite=True)
