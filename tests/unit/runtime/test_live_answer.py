"""Streamed answers: stop strings across tokens, several choices, log-probabilities."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import quantforge
from quantforge.errors import UsageError
from quantforge.runtime.generation_options import CompletionOptions, Sampling, completion_options
from quantforge.runtime.text_model import StreamingCompletion, TextModel
from quantforge.runtime.text_processing import TextProcessor
from tests.conftest import Tiny
from tests.evaluations import load_tokenizer
from tests.unit.runtime.test_token_stream import Fixed

DEMO = Path(__file__).parents[3] / "models/demo"
END = 999


def answer_of(
    texts: list[str], tiny: Tiny, limits: CompletionOptions
) -> tuple[list[str], StreamingCompletion, Fixed]:
    """Return pieces, and the answer, of a model that says given texts."""
    tokenizer = load_tokenizer(tiny("llama"))
    messages = [[*tokenizer.encode_with_special_tokens(text), END] for text in texts]
    longest = max(map(len, messages))
    steps = [[ids[min(index, len(ids) - 1)] for ids in messages] for index in range(longest)]
    engine = Fixed(steps)
    side = TextProcessor(tokenizer, None, frozenset({END}), 1000)
    answer = StreamingCompletion(TextModel("m", "own", engine, side), [5], limits, templated=False)
    return list(answer), answer, engine


@pytest.mark.parametrize(
    ("stop", "before", "result"),
    [
        ("", "one 世界 two", None),
        ("wo", "one 世界 t", "wo"),
        ("世界", "one ", "世界"),
        ("界 ", "one 世", "界 "),
        ("e 世", "on", "e 世"),
        ("two!", "one 世界 two", None),  # waits until nothing follows
        ("o", "", "o"),
    ],
)
def test_a_stop_string_ends_the_text_before_it(
    tiny: Tiny, stop: str, before: str, result: str | None
) -> None:
    """Tokens of the tiny model are bytes or a few of them, so that every string spans several."""
    limits = CompletionOptions(100, stop=(stop,) if stop else ())
    pieces, answer, engine = answer_of(["one 世界 two"], tiny, limits)
    (choice,) = answer.generated().choices
    assert "".join(pieces) == choice.text == before
    assert (choice.stop, choice.stopped) == (result, "stop" if result else "end")
    text = load_tokenizer(tiny("llama")).decode(choice.tokens)
    assert text.startswith(before + (result or ""))  # tokens are those of the string too
    assert engine.steps == len(choice.tokens) + (result is None)  # nothing is computed behind it


def test_stop_string_may_be_included_in_the_text(tiny: Tiny) -> None:
    limits = CompletionOptions(100, stop=("世",), include_stop=True)
    pieces, answer, _ = answer_of(["one 世界 two"], tiny, limits)
    assert "".join(pieces) == "one 世"
    assert answer.generated().choices[0].stop == "世"


def test_incomplete_character_can_match_a_stop_string(tiny: Tiny) -> None:
    """It becomes U+FFFD when nothing follows."""
    first = len(load_tokenizer(tiny("llama")).encode_with_special_tokens("a 世")) - 1
    limits = CompletionOptions(first, stop=("\ufffd",))
    pieces, answer, _ = answer_of(["a 世"], tiny, limits)
    assert answer.generated().stopped == "stop"
    assert "".join(pieces).strip() == "a"


def test_several_choices_end_independently(tiny: Tiny) -> None:
    limits = CompletionOptions(100, Sampling(0.01), stop=("!",), n=3)
    pieces, answer, engine = answer_of(["one ! two", "three", "a rather long one"], tiny, limits)
    result = answer.generated()
    assert "".join(pieces) == result.text == "one "
    assert [choice.text for choice in result.choices] == ["one ", "three", "a rather long one"]
    assert [choice.stopped for choice in result.choices] == ["stop", "end", "end"]
    lengths = [len(choice.tokens) for choice in result.choices]
    assert engine.steps == lengths[2] + 1
    assert result.steps == sum(lengths) + 2 - 3  # tokens that end a text are computed too


def test_abandoned_stream_counts_as_interrupted(tiny: Tiny) -> None:
    tokenizer = load_tokenizer(tiny("llama"))
    side = TextProcessor(tokenizer, None, frozenset(), 1000)
    engine = Fixed([[token] for token in tokenizer.encode_with_special_tokens("one two three")])
    answer = StreamingCompletion(
        TextModel("m", "own", engine, side), [5], CompletionOptions(9), templated=False
    )
    next(iter(answer))
    assert answer.generated().stopped == "interrupted"


# ---- a model


def test_log_probabilities_are_those_of_transformers() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = quantforge.load(DEMO)
    result = quantforge.generate(
        loaded, "import os", raw=True, max_tokens=6, temperature=1.5, top_k=3, seed=3, logprobs=3
    )
    (choice,) = result.choices
    assert choice.logprobs is not None
    assert [token.chosen.id for token in choice.logprobs] == list(choice.tokens)
    assert "".join(token.chosen.text for token in choice.logprobs) == choice.text
    tokenizer = load_tokenizer(DEMO)
    prompt = tokenizer.encode("import os")
    prompt = prompt if tokenizer.bos_id is None else [tokenizer.bos_id, *prompt]
    peer = AutoModelForCausalLM.from_pretrained(DEMO, dtype=loaded.model.dtype)
    with torch.inference_mode():
        logits = peer(torch.tensor([[*prompt, *choice.tokens]])).logits[0].float()
    values = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    tolerance = 1e-4 if loaded.model.dtype == torch.float32 else 0.1
    for row, one in zip(values, choice.logprobs, strict=True):
        assert one.chosen.logprob == pytest.approx(row[one.chosen.id].item(), abs=tolerance)
        assert len(one.top) == 3
        best = row.topk(3).values.tolist()
        assert [token.logprob for token in one.top] == pytest.approx(best, abs=tolerance)
    document = choice.document()["logprobs"][0]
    assert document.keys() == {"id", "token", "logprob", "top_logprobs"}


@pytest.mark.tokens
def test_several_choices_equal_single_runs_with_their_seeds() -> None:
    loaded = quantforge.load(DEMO)
    options: Any = {"raw": True, "max_tokens": 12, "temperature": 1.0}
    result = quantforge.generate(loaded, "import", n=3, seed=8, **options)
    alone = [
        quantforge.generate(loaded, "import", seed=seed, **options).tokens for seed in (8, 9, 10)
    ]
    assert [choice.tokens for choice in result.choices] == alone
    assert len(set(alone)) > 1


@pytest.mark.tokens
def test_beams_are_choices_with_scores() -> None:
    loaded = quantforge.load(DEMO)
    options: Any = {"raw": True, "max_tokens": 12}
    greedy = quantforge.generate(loaded, "import", logprobs=0, **options)
    result = quantforge.generate(
        loaded, "import", beams=4, n=2, length_penalty=0.0, early_stopping="never", **options
    )
    assert len(result.choices) == 2
    scores = [choice.score for choice in result.choices]
    assert scores[0] is not None
    assert scores[1] is not None
    assert scores[0] >= scores[1]
    (one,) = greedy.choices
    assert one.logprobs is not None
    assert scores[0] >= math.fsum(token.chosen.logprob for token in one.logprobs) - 0.05
    assert result.text == load_tokenizer(DEMO).decode(result.tokens)
    assert quantforge.generate(loaded, "import", beams=1, **options).tokens == greedy.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n = 0"),
        ({"n": 129, "temperature": 1.0}, "n = 129"),
        ({"n": 2}, "the most likely answer, 2 times"),
        ({"n": 3, "beams": 2}, "n = 3 of 2 beams"),
        ({"beams": 2, "temperature": 1.0}, "temperature = 1.0: not with beams"),
        ({"beams": 2, "logit_bias": {1: 2}, "stop": "x"}, "logit_bias = "),
        ({"beams": 2, "stop": "x"}, "stop = x: not with beams"),
        ({"length_penalty": 1.0}, "length_penalty = 1.0: without beams"),
        ({"early_stopping": True}, "early_stopping = True: without beams"),
        ({"stop": ""}, "stop holds ''"),
        ({"include_stop": 1}, "include_stop = 1"),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        completion_options(5, options)
    assert message in caught.value.message
    with pytest.raises(UsageError, match="max_tokens"):
        completion_options(0, {})
