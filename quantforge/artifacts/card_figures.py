"""Delimited parts of ``README.md`` that may change after the result is made: figures, and where it is loaded from.

Figures are a section of the text, and ``model-index`` in the front matter, where hubs look for them. The code that
loads a result names this directory, and in a release the repository. The manifest declares all (``mutable``);
`verify` does not compare the card, and a signature leaves it out. Whoever writes a part replaces what is between the
delimiters, and not a byte of anything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quantforge.artifacts import manifest
from quantforge.errors import InputError, UsageError
from quantforge.files.disk import save
from quantforge.files.opener import FILES
from quantforge_files.roles import CARD as CARD_ROLE

CARD = "README.md"
HERE = "."  # the directory, for code that is run in it: the bytes of a card are the same wherever it is made
LOADED_FROM = "The code loads it from "


@dataclass(frozen=True, slots=True)
class MutablePart:
    """A part of a card: the whole lines that begin and end it."""

    begin: str
    end: str

    @property
    def empty(self) -> str:
        """Return the part with nothing in it."""
        return f"{self.begin}\n{self.end}"

    def replaced(self, text: str, content: str) -> str:
        """Return a card with another content of this part.

        Raises:
            ValueError: a delimiter is missing, there twice, or they are in the wrong order.
        """
        lines = text.splitlines(keepends=True)
        bare = [line.rstrip("\r\n") for line in lines]
        if bare.count(self.begin) != 1 or bare.count(self.end) != 1:
            raise ValueError(self)
        first, last = bare.index(self.begin), bare.index(self.end)
        if first > last:
            raise ValueError(self)
        inside = f"{content.strip()}\n" if content.strip() else ""
        return "".join([*lines[: first + 1], inside, *lines[last:]])

    def content(self, text: str) -> str:
        """Return what a card has between the delimiters; "" where a person has taken them out."""
        _, begun, rest = text.partition(f"{self.begin}\n")
        inside, ended, _ = rest.partition(f"\n{self.end}\n")
        return inside if begun and ended else ""


_SECTION = MutablePart("<!-- quantforge eval: begin -->", "<!-- quantforge eval: end -->")
_INDEX = MutablePart("# quantforge eval: begin", "# quantforge eval: end")
LOADING = MutablePart("<!-- quantforge loading: begin -->", "<!-- quantforge loading: end -->")
EMPTY_FIGURES, EMPTY_INDEX = _SECTION.empty, _INDEX.empty
MUTABLE = [
    {"file": CARD, "begin": part.begin, "end": part.end} for part in (_SECTION, _INDEX, LOADING)
]  # as the manifest declares it


def with_figures(text: str, section: str, index: str) -> str:
    """Return a card with figures in place of those that it has.

    Args:
        text: the card.
        section: Markdown.
        index: YAML of the front matter, ``model-index`` and nothing else.

    Raises:
        ValueError: as `MutablePart.replaced`.
    """
    return _INDEX.replaced(_SECTION.replaced(text, section), index)


def read_card(folder: Path) -> str:
    """Return the card of a folder, whose parts for figures are whole.

    Raises:
        InputError: there is none, or a delimiter is missing or damaged.
    """
    place = folder / CARD
    if not place.is_file():
        raise InputError(
            f"{place}: there is no card", "results of quantize and export have one", file=str(place)
        )
    text = _text(folder)
    try:
        with_figures(text, "", "")
    except ValueError as error:
        part = error.args[0]
        where = "in the front matter" if part is _INDEX else "where the figures should stand"
        raise InputError(
            f"{place}: the part for measured figures is not between one line '{part.begin}' and one line '{part.end}'",
            f"put these two lines {where}, each on a line of its own",
            file=str(place),
        ) from error
    return text


def has_figures(folder: Path) -> bool:
    """Return whether the card of a folder holds figures; True where a person has taken their place out of it."""
    try:
        return bool(_SECTION.content(read_card(folder)))
    except InputError:
        return True


def of_folder(model: Path, folder: Path) -> bool:
    """Return whether a model is a folder, or a file in it."""
    place = model.parent if model.is_file() else model
    return place.resolve() == folder.resolve()


def check_card(folder: Path, models: Iterable[Path]) -> None:
    """Refuse, before anything is measured, a card that figures cannot be written into.

    Args:
        folder: of the card.
        models: that are measured.

    Raises:
        UsageError: none of them is in the folder.
        InputError: as `read_card`, or the manifest of a result does not declare the card mutable.
    """
    inside = [model for model in models if of_folder(model, folder)]
    if not inside:
        raise UsageError(
            f"--card {folder}: no model of it is measured",
            "quantforge eval REFERENCE DIR --card DIR",
        )
    read_card(folder)
    for model in inside:
        declared = (manifest.read(model) or {}).get("mutable")
        if not isinstance(declared, list) or any(one not in declared for one in MUTABLE[:2]):
            raise InputError(
                f"{model}: no manifest beside it declares parts of {CARD} mutable",
                "only results of this version have such cards: quantize or export again",
                file=str(model),
            )


def write_figures(folder: Path, section: str, index: str) -> None:
    """Put figures into the card of a folder, in place of those that it has; errors as `read_card` and `save`."""
    _save(folder, with_figures(read_card(folder), section, index))


def write_loading(folder: Path, content: str) -> None:
    """Put the code that loads a result into its card; one whose delimiters a person has taken out stays as it is."""
    if (folder / CARD).is_file():
        text = _text(folder)
        if LOADING.content(text) not in {"", content}:
            _save(folder, LOADING.replaced(text, content))


def forget_repository(folder: Path) -> None:
    """Let the code of a card load the directory again, as when the result was made."""
    if (folder / CARD).is_file():
        inside = LOADING.content(_text(folder))
        if named := re.match(re.escape(LOADED_FROM) + "`([^`]+)`", inside):
            write_loading(folder, inside.replace(named[1], HERE))


def _text(folder: Path) -> str:
    return FILES.read(folder / CARD, CARD_ROLE, folder).decode("utf-8", "surrogateescape")


def _save(folder: Path, text: str) -> None:
    save(folder / CARD, text.encode("utf-8", "surrogateescape"), overwrite=True)
