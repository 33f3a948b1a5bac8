"""Beam search equals transformers' in both engines and for every cache kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.errors import InputError, UsageError
from quantforge.runtime.beam_search import Beam, beam_search
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import DecoderEngine, TransformersEngine
from quantforge.runtime.generation_options import BeamOptions
from quantforge.runtime.load import load
from tests.conftest import Tiny

DEMO = Path(__file__).parents[3] / "models/demo"
PROMPT = (7, 101, 32, 54, 9)


@cache
def demo() -> Any:
    return load(DEMO, "cpu", torch.float32).model


@cache
def peer() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


def transformers_beams(
    ids: Sequence[int], new_tokens: int, options: BeamOptions, stop: list[int] | None
) -> list[tuple[tuple[int, ...], float]]:
    peer().generation_config.eos_token_id = stop
    out = peer().generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=options.beams,
        num_return_sequences=options.beams,
        length_penalty=options.length_penalty,
        early_stopping=options.early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=99_999,
    )
    rows = [
        tuple(token for token in row if token != 99_999)
        for row in out.sequences[:, len(ids) :].tolist()
    ]
    return list(zip(rows, out.sequences_scores.tolist(), strict=True))


@pytest.mark.tokens
@pytest.mark.parametrize(
    ("early", "beams", "penalty", "new_tokens"),
    [
        (True, 2, 1.0, 40), (False, 2, 1.0, 40), ("never", 3, 2.0, 24), (False, 3, 2.0, 24),
        (False, 4, -1.0, 24), (True, 4, 0.0, 24), ("never", 4, 0.0, 24),
    ],
)  # fmt: skip
def test_beam_search_equals_transformers(
    early: Any, beams: int, penalty: float, new_tokens: int
) -> None:
    options = BeamOptions(beams, penalty, early)
    free = transformers_beams(PROMPT, new_tokens, options, None)
    ours = beam_search(DecoderEngine(Decoder(demo())), PROMPT, new_tokens, options)
    assert [beam.tokens for beam in ours] == [tokens for tokens, _ in free]
    assert [beam.score for beam in ours] == pytest.approx([score for _, score in free], rel=1e-4)
    # With tokens that end some beams early.
    stop = sorted({free[0][0][6], free[-1][0][11]})
    expected = transformers_beams(PROMPT, new_tokens, options, stop)
    result = beam_search(
        DecoderEngine(Decoder(demo())), PROMPT, new_tokens, options, frozenset(stop)
    )
    assert [beam.tokens for beam in result] == [tokens for tokens, _ in expected]
    assert [beam.score for beam in result] == pytest.approx(
        [score for _, score in expected], rel=1e-4
    )
    if early != "never":  # which goes on while longer ones may still win
        assert any(beam.ended for beam in result)


@pytest.mark.tokens
def test_one_beam_equals_greedy_decoding() -> None:
    from quantforge.runtime.decoding import generate_tokens
    from quantforge.runtime.generation_options import Sampling

    engine = DecoderEngine(Decoder(demo()))
    (result,) = beam_search(engine, PROMPT, 40, BeamOptions())
    assert list(result.tokens) == list(generate_tokens(engine, PROMPT, 40, Sampling()))


@pytest.mark.parametrize("kind", ["", "int4"])
def test_caches_are_reordered_with_the_beams(kind: str) -> None:
    """Scores of beams that changed rows many times are those of their tokens computed anew, in the same cache."""
    options = BeamOptions(4, 0.0, "never")
    long = tuple(range(40, 100))  # a border of pages is crossed
    result = beam_search(DecoderEngine(Decoder(demo()), kind), long, 20, options)
    for beam in result:
        engine = DecoderEngine(Decoder(demo()), kind)
        logits, total = engine.start(torch.tensor([long]), 20), 0.0
        for token in beam.tokens:
            total += logits.float().log_softmax(-1)[0, token].item()
            logits = engine.step(torch.tensor([token]))
        assert beam.score == pytest.approx(total, abs=1e-3)


@pytest.mark.tokens
def test_both_engines_find_the_same_beams() -> None:
    options = BeamOptions(3, 1.0, True)
    own = beam_search(DecoderEngine(Decoder(demo())), PROMPT, 24, options, frozenset({11}))
    two = beam_search(TransformersEngine(demo()), PROMPT, 24, options, frozenset({11}))
    assert [beam.tokens for beam in own] == [beam.tokens for beam in two]


@pytest.mark.parametrize("family", ["gpt2", "lfm2", "falcon-h1"])
def test_transformers_caches_are_reordered_with_the_beams(tiny: Tiny, family: str) -> None:
    """Those with states of convolutions and of Mamba as well."""
    model = load(tiny(family), "cpu", torch.float32).model
    result = beam_search(TransformersEngine(model), (5, 6, 7), 8, BeamOptions(3, 0.0, "never"))
    engine = TransformersEngine(model)
    logits, total = engine.start(torch.tensor([[5, 6, 7]]), 8), 0.0
    for token in result[0].tokens:
        total += logits.float().log_softmax(-1)[0, token].item()
        logits = engine.step(torch.tensor([token]))
    assert result[0].score == pytest.approx(total, abs=1e-4)


class Table:
    """An engine whose logits depend on the last token alone."""

    device = torch.device("cpu")

    def __init__(self, logits: list[list[float]]) -> None:
        self._logits = torch.tensor(logits)

    def start(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        return self._logits[ids[:, -1]]

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return self._logits[ids]

    def reorder(self, parents: Sequence[int], same: int) -> None:
        pass


def test_two_beams_find_a_likelier_text_than_greedy() -> None:
    """0.5 then 0.4 is less likely than 0.4 then 0.9."""
    chances = [[1e-9, 0.5, 0.4, 0.1], [0.4, 0.2, 0.2, 0.2], [0.9, 0.04, 0.03, 0.03], [0.25] * 4]
    table = Table(torch.tensor(chances).log().tolist())
    (greedy,) = beam_search(table, [0], 2, BeamOptions(1))
    assert greedy.tokens == (1, 0)
    steps: list[int] = []
    best, second = beam_search(table, [0], 2, BeamOptions(2, 0.0), on_step=steps.append)
    assert steps == [2, 2]
    assert best == Beam((2, 0), pytest.approx(torch.tensor(0.36).log().item(), abs=1e-5))
    assert second.tokens == (1, 0)


def test_too_many_beams_and_nan_logits_are_refused() -> None:
    with pytest.raises(InputError, match="3 beams need 6 tokens"):
        beam_search(Table([[0.0] * 4] * 4), [0], 2, BeamOptions(3))
    with pytest.raises(InputError, match="is nan"):
        beam_search(Table([[float("nan")] * 4] * 4), [0], 2, BeamOptions(1))


@pytest.mark.parametrize(
    "wrong",
    [{"beams": 0}, {"beams": 65}, {"beams": True}, {"length_penalty": float("nan")}, {"length_penalty": 11},
     {"early_stopping": 1}, {"early_stopping": "sometimes"}, {"early_stopping": None}],
)  # fmt: skip
def test_invalid_beam_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        BeamOptions(**wrong)
