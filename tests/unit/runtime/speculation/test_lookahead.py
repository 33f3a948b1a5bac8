"""Lookahead decoding keeps the text, and its n-grams are the model's predictions."""

from __future__ import annotations

import random

import pytest
import torch

import quantforge
from quantforge.errors import UsageError
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.load import load
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.draft_options import DraftOptions
from quantforge.runtime.speculation.drafter import PassOutputs
from quantforge.runtime.speculation.lookahead import LookaheadDrafter
from quantforge.runtime.speculation.tree import DraftTree
from tests.plain_loop import StopLimits, generate
from tests.unit.runtime.speculation.test_speculate import DEMO, DRAWN, PENALISED, speculated


@pytest.fixture(scope="module")
def model():
    return load(DEMO).model


@pytest.fixture(scope="module")
def ids():
    draw = random.Random(1)
    return [draw.randrange(5, 2000) for _ in range(12)] * 4


@pytest.mark.tokens
@pytest.mark.parametrize(
    "sampling", [Sampling(), DRAWN, PENALISED], ids=["greedy", "drawn", "penalised"]
)
def test_text_is_that_of_the_plain_loop(model, ids, sampling):
    decoder, limits = Decoder(model), StopLimits(60)
    (plain,) = generate(decoder, [ids], limits, sampling)
    result, counts = speculated(decoder, ids, LookaheadDrafter(), 3, limits, sampling)
    assert result == plain
    if sampling.greedy:  # the text repeats, and the model has written its n-grams before
        assert counts.tokens_per_pass > 1.3
        assert counts.passes < 45


class Followed(LookaheadDrafter):
    """Computes every column again by the whole model, as a text of its own."""

    def __init__(self, model):
        super().__init__(columns=4, length=3)
        self.model, self.history, self.checked = model, [], 0

    def draft(self, history, most, sampler):
        self.history = list(history)
        return super().draft(history, most, sampler)

    def observe(self, computed):
        columns = list(self._columns)
        before, ages = (
            [column.tokens for column in columns],
            [column.predicted for column in columns],
        )
        pool = {key: list(runs) for key, runs in self._pool.items()}
        super().observe(computed)
        if not computed.tree.probes:
            return
        gone = len(computed.next_tokens) - 1
        for index, column in enumerate(before):
            text = self.history + [item[0] for item in before[:index]] + column
            with torch.inference_mode():
                best = int(self.model(torch.tensor([text])).logits[0, -1].argmax())
            assert best == int(computed.logits[columns[index].node + 1].argmax())
            if index >= gone:
                assert self._columns[index - gone].tokens == [*column[1:], best]
            if ages[index] >= 2:
                assert (column[1], best) in self._pool[column[0]]
                self.checked += 1
            elif (column[1], best) in self._pool.get(column[0], ()):
                assert (column[1], best) in pool.get(column[0], ())


@pytest.mark.tokens
def test_lookahead_columns_follow_the_model_predictions(model, ids):
    decoder, limits = Decoder(model), StopLimits(16)
    (plain,) = generate(decoder, [ids], limits)
    drafter = Followed(model)
    assert speculated(decoder, ids, drafter, 2, limits)[0] == plain
    assert drafter.checked >= 8


def test_pooled_ngrams_are_drafted_after_their_first_token():
    drafter = LookaheadDrafter(columns=2, length=3)
    for first, *rest in ((5, 6, 7), (5, 6, 8), (5, 9, 9), (4, 1, 1)):
        drafter._add_to_pool(first, tuple(rest))
    tree = drafter.draft([1, 2, 5], 2, RowSampler(Sampling()))
    assert tree.tokens[: tree.drafted] == [9, 9, 6, 8, 7]
    assert tree.probes == 4
    assert drafter.draft([1, 2, 3], 2, RowSampler(Sampling())).drafted == 0
    drafter.observe(PassOutputs(DraftTree(), torch.zeros(1, 3), torch.zeros(1, 2), (), (1,)))
    assert drafter._columns == []  # a plain pass leaves the window behind


@pytest.mark.tokens
def test_generate_accepts_lookahead_and_refuses_other_options() -> None:
    options = {"raw": True, "max_tokens": 30}
    plain = quantforge.generate(DEMO, "import os, json, json", **options)
    result = quantforge.generate(DEMO, "import os, json, json", draft="lookahead", **options)
    assert result.tokens == plain.tokens
    for more in ({"tokens": 3}, {"tree": "2x2"}):
        with pytest.raises(UsageError, match="of its own"):
            DraftOptions("lookahead", **more)
