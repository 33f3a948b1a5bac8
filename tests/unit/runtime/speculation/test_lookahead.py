"""Lookahead decoding: the text is the plain loop's, its n-grams are what the model says behind each column."""

from __future__ import annotations

import random

import pytest
import torch

import quantforge
from quantforge.errors import UsageError
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generate import StopLimits, generate
from quantforge.runtime.load import load
from quantforge.runtime.sampling import RowSampler, Sampling
from quantforge.runtime.speculation.draft_options import DraftOptions
from quantforge.runtime.speculation.guess_trees import GuessTree
from quantforge.runtime.speculation.guesses import Computed
from quantforge.runtime.speculation.lookahead import LookaheadGuesser
from quantforge.runtime.speculation.speculate import Speculation, speculate
from tests.unit.runtime.speculation.test_speculate import DEMO, DRAWN, PENALISED, tokens_of


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
    speculation = Speculation(LookaheadGuesser(), most=3, fixed=True)
    assert tokens_of(speculate(decoder, ids, speculation, limits, sampling)) == plain
    if sampling.greedy:  # the text repeats, and the model has written its n-grams before
        assert speculation.counts.tokens_per_pass > 1.3
        assert speculation.counts.passes < 45


class Followed(LookaheadGuesser):
    """Computes every column again by the whole model, as a text of its own."""

    def __init__(self, model):
        super().__init__(columns=4, length=3)
        self.model, self.history, self.checked = model, [], 0

    def guess(self, history, most, sampler):
        self.history = list(history)
        return super().guess(history, most, sampler)

    def watch(self, computed):
        before = [list(column) for column in self._columns]
        places, pool = list(self._places), {key: list(runs) for key, runs in self._pool.items()}
        ages = list(self._ages)
        super().watch(computed)
        if not computed.tree.probes:
            return
        gone = len(computed.following) - 1
        for place, column in enumerate(before):
            text = self.history + [one[0] for one in before[:place]] + column
            with torch.inference_mode():
                best = int(self.model(torch.tensor([text])).logits[0, -1].argmax())
            assert best == int(computed.logits[places[place][-1] + 1].argmax())
            if place >= gone:
                assert self._columns[place - gone] == [*column[1:], best]
            if ages[place] >= 2:
                assert (column[1], best) in self._pool[column[0]]
                self.checked += 1
            elif (column[1], best) in self._pool.get(column[0], ()):
                assert (column[1], best) in pool.get(column[0], ())


@pytest.mark.tokens
def test_columns_grow_by_what_the_model_says_behind_them(model, ids):
    decoder, limits = Decoder(model), StopLimits(16)
    (plain,) = generate(decoder, [ids], limits)
    guesser = Followed(model)
    speculation = Speculation(guesser, most=2, fixed=True)
    assert tokens_of(speculate(decoder, ids, speculation, limits)) == plain
    assert guesser.checked >= 8


def test_kept_runs_are_guessed_behind_their_first_token():
    guesser = LookaheadGuesser(columns=2, length=3)
    for run in ((5, 6, 7), (5, 6, 8), (5, 9, 9), (4, 1, 1)):
        guesser._keep(run)
    tree = guesser.guess([1, 2, 5], 2, RowSampler(Sampling()))
    assert tree.tokens[: tree.guesses] == [9, 9, 6, 8, 7]
    assert tree.probes == 4
    assert guesser.guess([1, 2, 3], 2, RowSampler(Sampling())).guesses == 0
    guesser.watch(Computed(GuessTree(), torch.zeros(1, 3), torch.zeros(1, 2), (), (1,)))
    assert guesser._columns == []  # a plain pass leaves the window behind


@pytest.mark.tokens
def test_verb_takes_it_and_refuses_what_has_no_effect() -> None:
    options = {"raw": True, "max_tokens": 30}
    plain = quantforge.generate(DEMO, "import os, json, json", **options)
    found = quantforge.generate(DEMO, "import os, json, json", draft="lookahead", **options)
    assert found.tokens == plain.tokens
    for more in ({"tokens": 3}, {"tree": "2x2"}):
        with pytest.raises(UsageError, match="of its own"):
            DraftOptions("lookahead", **more)
