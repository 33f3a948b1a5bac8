"""Streamed pieces join to the text, and none ends in an incomplete character."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.errors import InputError
from quantforge.runtime.generation_options import CompletionOptions
from quantforge.runtime.text_model import StreamingCompletion, TextModel
from quantforge.runtime.text_processing import TextProcessor
from quantforge.runtime.text_stream import INCOMPLETE, TextStream
from quantforge_calibration.tokenizer import TextTokenizer
from tests.conftest import Tiny
from tests.evaluations import load_tokenizer

TEXT = "Grüße, 世界 👩‍🚀 naïve\n\tvoilà  ∑ \u00a0x"


class Fixed:
    """An engine that wants given tokens, a list for each step with one for each answer."""

    device = torch.device("cpu")

    def __init__(self, expected: list[list[int]]) -> None:
        self._wanted = iter(expected)
        self.steps = 0

    def start(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        return self.step(ids[:, -1])

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return torch.nn.functional.one_hot(torch.tensor(next(self._wanted)), 1000).float() * 100

    def reorder(self, parents: Sequence[int], same: int) -> None:
        raise AssertionError


def streamed(tokenizer: TextTokenizer, prompt: str, text: str) -> list[str]:
    before = tokenizer.encode_with_special_tokens(prompt)
    stream = TextStream(tokenizer, before)
    ids = tokenizer.encode_with_special_tokens(prompt + text)[len(before) :]
    return [*(stream.add(token) for token in ids), stream.flush()]


def test_pieces_join_to_the_text_in_whole_characters(tiny: Tiny) -> None:
    tokenizer = load_tokenizer(tiny("llama"))
    assert len(tokenizer.encode_with_special_tokens("世")) > 1  # a character of several tokens
    pieces = streamed(tokenizer, "A beginning. ", TEXT)
    assert "".join(pieces) == TEXT
    assert INCOMPLETE not in "".join(pieces)
    assert "世" in pieces


def test_incomplete_characters_come_at_the_end(tiny: Tiny) -> None:
    tokenizer = load_tokenizer(tiny("llama"))
    stream = TextStream(tokenizer, [])
    first = tokenizer.encode_with_special_tokens("世")[0]
    assert stream.add(first) == ""
    assert stream.flush() == INCOMPLETE


@pytest.mark.parametrize("prompt", ["Once upon", ""])
def test_leading_space_after_the_prompt_is_kept(tmp_path: Path, prompt: str) -> None:
    """As sentencepiece's tokenizers write spaces: before a word, and none before the first one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {piece: number for number, piece in enumerate(["▁Once", "▁upon", "▁a", "▁time"])}
    plain = Tokenizer(models.WordLevel(vocab))
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    plain.decoder = decoders.Metaspace()
    tokenizer = TextTokenizer(plain, None, None)
    pieces = streamed(tokenizer, prompt, " a time" if prompt else "a time")
    assert pieces == ([" a", " time", ""] if prompt else ["a", " time", ""])


def test_failing_text_decoder_is_reported_as_input_error() -> None:
    class Failing:
        def decode(self, _ids: list[int]) -> str:
            raise ValueError("no such token")

    tokenizer: Any = TextTokenizer(Failing(), None, None)  # type: ignore[arg-type]
    engine = Fixed([[3]])
    side = TextProcessor(tokenizer, None, frozenset({3}), 100)  # the first token ends the answer
    answer = StreamingCompletion(
        TextModel("x", "own", engine, side), [1], CompletionOptions(1), templated=False
    )
    with pytest.raises(InputError, match="no such token"):
        list(answer)
