"""The text side of a model of any format: its tokenizer, its chat template, the tokens that end its answers.

A directory holds them in files. A GGUF file holds them as keys, which are written as these files into a directory that
lives as long as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.configuration import embedding_rows, positions_in
from quantforge.errors import InputError
from quantforge.files.opener import FILES
from quantforge.files.reader import Checkpoint
from quantforge.formats.open_model import tokenizer_directory
from quantforge_calibration.chat import ChatTemplate, find_chat_template
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import TextTokenizer, load_tokenizer
from quantforge_files.roles import SETTINGS

GENERATION = "generation_config.json"
ENDS = ("eos", "eot", "eom")  # roles of tokens in GGUF keys that end a text, a turn, a message


@dataclass(frozen=True, slots=True)
class TextSide:
    """Parts of a model that deal with text.

    Attributes:
        tokenizer: of its text.
        template: how it is shown a conversation; None for a model that only completes text.
        stop: ids that end an answer.
        positions: how many tokens it can see.
    """

    tokenizer: TextTokenizer
    template: ChatTemplate | None
    stop: frozenset[int]
    positions: int


def text_side(path: Path, config: Mapping[str, Any]) -> TextSide:
    """Read the text side of a model directory or a GGUF file.

    Raises:
        InputError: no tokenizer that can be read, or a damaged file.
    """
    with tokenizer_directory(path) as (folder, file), as_input_errors():
        tokenizer = load_tokenizer(folder, embedding_rows(config))
        template = find_chat_template(folder)
        stop = _listed(text_config(config).get("eos_token_id"))
        if file is not None:
            keys = (file.value(f"tokenizer.ggml.{role}_token_id", int, -1) for role in ENDS)
            stop += [number for number in keys if number >= 0]
        elif (place := folder / GENERATION).is_file():
            document = FILES.parse_object(FILES.read(place, SETTINGS, folder), place, SETTINGS)
            stop = _listed(document.get("eos_token_id")) or stop
    own = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return TextSide(tokenizer, template, frozenset(stop + own), positions_in(config))


def tokenizer_of(model: Checkpoint) -> TextTokenizer:
    """Load the tokenizer of a model.

    Raises:
        InputError: there is none that can be read.
    """
    with tokenizer_directory(model.path) as (folder, _), as_input_errors():
        return load_tokenizer(folder, embedding_rows(model.config))


@contextmanager
def as_input_errors(hint: str = "") -> Iterator[None]:
    """Turn a `SourceError` into an `InputError`, with another hint where one is given."""
    try:
        yield
    except SourceError as error:
        raise InputError(error.message, hint or error.hint) from error


def _listed(value: Any) -> list[int]:
    return [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]
