"""The tokenizer of a model directory, read with the ``tokenizers`` library alone.

``transformers``' Auto classes choose a class by name and can run code that ships with the model;
``tokenizer.json`` is data and says everything that is needed to encode. What it does not always say
is which id begins a text:

* usually its post-processor adds that id, and we see it by encoding an ordinary word with and
  without;
* where the post-processor adds nothing, ``add_bos_token`` of ``tokenizer_config.json`` decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quantforge_calibration.errors import SourceError


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """Encodes text; ``bos_id`` begins one and ``eos_id`` ends one, where there is such a token."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a document, without a special token at either end.

        A beginning-of-text token in the text itself, as chat templates write it, is dropped: the
        sampler puts one at the beginning of every row.
        """
        # Without the offsets, which nobody reads, it takes two thirds of the time.
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = found.ids
        return ids[1:] if self.bos_id is not None and ids[:1] == [self.bos_id] else ids


def load_tokenizer(model: Path) -> TextTokenizer:
    """Load ``tokenizer.json`` of a model directory.

    Raises:
        SourceError: the file is missing or malformed, or ``tokenizer_config.json`` is.
    """
    path = model / "tokenizer.json"
    if not path.is_file():
        raise SourceError(
            f"{model} has no tokenizer.json",
            "copy it from the original model; a slow tokenizer is converted by transformers: "
            f"AutoTokenizer.from_pretrained('{model}').save_pretrained('{model}')",
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises the bare class
        raise SourceError(
            f"{path} is not a tokenizer: {error}",
            "download the file again, or upgrade: pip install -U tokenizers",
        ) from error
    tokenizer.no_truncation()  # the file may store both, for single prompts
    tokenizer.no_padding()
    config = read_tokenizer_config(model)
    return TextTokenizer(
        tokenizer, _bos_id(tokenizer, config), _token_id(tokenizer, config, "eos_token")
    )


def read_tokenizer_config(model: Path) -> Mapping[str, Any]:
    """Return ``tokenizer_config.json`` of a model directory, empty when there is none.

    Raises:
        SourceError: it is not a JSON object.
    """
    path = model / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not JSON: {error}", "download the file again") from error
    if not isinstance(config, dict):
        raise SourceError(f"{path} is not a JSON object", "download the file again")
    return config


def token_text(config: Mapping[str, Any], name: str) -> str | None:
    """Return a special token such as ``bos_token``: a string, or an object with ``content``."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _bos_id(tokenizer: Tokenizer, config: Mapping[str, Any]) -> int | None:
    plain: list[int] = tokenizer.encode("word", add_special_tokens=False).ids
    processed: list[int] = tokenizer.encode("word", add_special_tokens=True).ids
    if len(processed) > len(plain):
        return processed[0] if processed[:1] != plain[:1] else None
    return (
        _token_id(tokenizer, config, "bos_token") if config.get("add_bos_token") is True else None
    )


def _token_id(tokenizer: Tokenizer, config: Mapping[str, Any], name: str) -> int | None:
    text = token_text(config, name)
    found: int | None = tokenizer.token_to_id(text) if text else None
    return found
