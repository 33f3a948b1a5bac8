"""Keys carried from one GGUF file to another: those that describe the model and not its numbers, as they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantforge.errors import InputError
from quantforge.events import Event
from quantforge.formats.gguf.container import Value
from quantforge.formats.gguf.parsing import read_gguf

_GENERAL = ("general.license", "general.base_model", "general.languages", "general.tags")


@dataclass(frozen=True, slots=True)
class Carried:
    """The vocabulary of another file; see `quantforge.formats.gguf.vocabulary.Vocabulary`."""

    tokens: list[str]
    found: dict[str, Value]
    notes: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()

    def keys(self) -> dict[str, Value]:
        """Return the metadata."""
        return self.found


def carried(path: Path, rows: int) -> Carried:
    """Take the vocabulary, licence and origin from a file.

    Raises:
        InputError: the vocabulary and the embedding have different lengths.
    """
    file = read_gguf(path)
    tokens: list[str] = file.value("tokenizer.ggml.tokens", list)
    if len(tokens) != rows:
        raise InputError(
            f"{path}: {len(tokens)} tokens, the embedding has {rows} rows",
            "the file is damaged",
            file=str(path),
        )
    keys = {
        key: value
        for key, value in file.metadata.items()
        if key.startswith(("tokenizer.", *_GENERAL))
    }
    return Carried(tokens, keys)
