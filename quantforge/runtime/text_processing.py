"""Tokenizer, chat template and end tokens of a model in any format.

A model directory stores them in files. A GGUF file stores them as metadata keys, which are converted to the same files
in a temporary directory while they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.configuration import max_positions, vocabulary_size
from quantforge.errors import InputError
from quantforge.files.opener import FILES
from quantforge.files.reader import Checkpoint
from quantforge.formats.open_model import tokenizer_directory
from quantforge_calibration.chat import ChatTemplate, find_chat_template
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import TextTokenizer, load_tokenizer
from quantforge_files.roles import SETTINGS

GENERATION_CONFIG = "generation_config.json"
END_ROLES = ("eos", "eot", "eom")  # tokens in GGUF keys that end a text, a turn, a message


@dataclass(frozen=True, slots=True)
class TextProcessor:
    """Tokenizer, chat template and limits of a model.

    Attributes:
        tokenizer: the tokenizer.
        template: the chat template; None if the model has none.
        stop: ids of the tokens that end a completion.
        positions: context length in tokens.
    """

    tokenizer: TextTokenizer
    template: ChatTemplate | None
    stop: frozenset[int]
    positions: int


def load_text_processor(path: Path, config: Mapping[str, Any]) -> TextProcessor:
    """Load tokenizer, chat template and end tokens from a model directory or a GGUF file.

    Raises:
        InputError: there is no readable tokenizer, or a file is damaged.
    """
    with tokenizer_directory(path) as (folder, gguf), as_input_errors():
        tokenizer = load_tokenizer(folder, vocabulary_size(config))
        template = find_chat_template(folder)
        stop = _as_id_list(text_config(config).get("eos_token_id"))
        if gguf is not None:
            gguf_ids = (
                gguf.value(f"tokenizer.ggml.{role}_token_id", int, -1) for role in END_ROLES
            )
            stop += [number for number in gguf_ids if number >= 0]
        elif (config_path := folder / GENERATION_CONFIG).is_file():
            document = FILES.parse_object(
                FILES.read(config_path, SETTINGS, folder), config_path, SETTINGS
            )
            stop = _as_id_list(document.get("eos_token_id")) or stop
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return TextProcessor(tokenizer, template, frozenset(stop + eos), max_positions(config))


def load_model_tokenizer(model: Checkpoint) -> TextTokenizer:
    """Load the tokenizer of a model.

    Raises:
        InputError: there is no readable tokenizer.
    """
    with tokenizer_directory(model.path) as (folder, _), as_input_errors():
        return load_tokenizer(folder, vocabulary_size(model.config))


@contextmanager
def as_input_errors(hint: str = "") -> Iterator[None]:
    """Re-raise a `SourceError` as an `InputError`, optionally with another hint."""
    try:
        yield
    except SourceError as error:
        raise InputError(error.message, hint or error.hint) from error


def _as_id_list(value: Any) -> list[int]:
    return [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]
