"""Speculative decoding gives the tokens of the plain loop for any drafter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantforge.cache_kinds import WORDS
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.load import load
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.decode import (
    DraftLengthController,
    SpeculativeCompletion,
    SpeculativeDecoder,
)
from quantforge.runtime.speculation.draft_model import ModelDrafter
from quantforge.runtime.speculation.drafter import Drafter
from quantforge.runtime.speculation.ngrams import NgramDrafter
from quantforge.runtime.speculation.verify_drafts import SpeculationCounts, expected_tokens
from tests.choices import plain_text
from tests.fake_decoder import chain_tree
from tests.plain_loop import StopLimits, generate

DEMO = Path("models/demo")
DRAWN = Sampling(temperature=0.8, top_p=0.95, seed=1)
PENALISED = Sampling(temperature=1.0, top_k=40, repetition_penalty=1.2, seed=3)


@pytest.fixture(scope="module")
def decoder():
    return Decoder(load(DEMO).model)


@pytest.fixture(scope="module")
def ids():
    """Return a prompt that repeats itself, so that a model trained on text copies."""
    part = [random.Random(0).randrange(5, 2000) for _ in range(12)]
    return part * 4


def speculated(decoder, ids, drafter, most, limits, sampling=None):
    """Return the tokens of a text with always as many drafted ones, and the counts."""
    speculative = SpeculativeDecoder(decoder, lambda _: drafter, most, fixed=True)
    text = SpeculativeCompletion(speculative, ids, limits.new_tokens, sampling, limits.cache)
    return [item.token for item in text], text.counts


class Scripted(Drafter):
    """Drafts the true continuation, with every ``n``-th token made wrong."""

    def __init__(self, truth, wrong_every):
        self.truth, self.wrong, self.asked = truth, wrong_every, 0

    def draft(self, history, most, sampler):
        following = self.truth[len(history) : len(history) + most]
        results = []
        for token in following:
            self.asked += 1
            results.append(token if self.asked % self.wrong else (token + 1) % 100)
        return chain_tree(results)


@pytest.mark.tokens
@pytest.mark.parametrize(
    ("kind", "sampling"),
    [(kind, Sampling()) for kind in (*WORDS, "k=int8,v=int4")] + [("", DRAWN), ("", PENALISED)],
)
def test_text_is_that_of_the_plain_loop(decoder, ids, kind, sampling):
    limits = StopLimits(24, cache=kind)
    plain = plain_text(decoder, ids, limits, sampling)
    assert len(plain) == 24
    for wrong in (1, 3, 1000):
        result, counts = speculated(decoder, ids, Scripted(ids + plain, wrong), 5, limits, sampling)
        assert result == plain
        assert counts.tokens == len(plain) - 1
        if wrong == 1:
            assert counts.accepted == 0
            assert counts.acceptance == 0
        if wrong == 1000:
            assert counts.acceptance == 1
            assert counts.tokens_per_pass == counts.expected
            assert counts.passes < len(plain) / 4


@pytest.mark.tokens
@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_model_as_its_own_draft_is_always_accepted(decoder, ids, sampling):
    limits = StopLimits(20)
    (plain,) = generate(decoder, [ids], limits, sampling)
    drafter = ModelDrafter(decoder, len(ids) + 20, (1,) * 4)
    result, counts = speculated(decoder, ids, drafter, 4, limits, sampling)
    assert result == plain
    assert counts.acceptance == 1


@pytest.mark.tokens
def test_draft_model_continues_after_wrong_tokens(decoder, ids):
    """A draft model whose tokens were wrong continues from what the model chose."""
    drafter, sampler = ModelDrafter(decoder, len(ids) + 60, (1,) * 3), RowSampler(Sampling())
    history = list(ids)
    for right in (0, 3, 1, 2):
        (plain,) = generate(decoder, [history], StopLimits(3))
        assert drafter.draft(history, 3, sampler).tokens == plain
        history += [*plain[:right], 77]


def test_ngram_drafter_copies_what_followed():
    drafter, sampler = NgramDrafter((1,) * 3), RowSampler(Sampling())
    assert drafter.draft([1, 2, 3, 4, 9, 1, 2], 3, sampler).tokens == [3, 4, 9]
    assert drafter.draft([1, 2, 3, 4, 9, 1, 2, 5, 5], 3, sampler).tokens == []
    assert drafter.draft([1, 2, 3, 4, 9, 1, 2, 5, 5, 1, 2], 2, sampler).tokens == [5, 5]
    again = NgramDrafter((1,) * 5, lengths=(2, 1))
    assert again.draft([7, 8, 7], 5, sampler).tokens == [8, 7, 8, 7, 8]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6), st.data())
def test_ngram_drafts_equal_a_plain_search(history, most, data):
    """Growing by any steps, the table finds what a search through the whole text finds."""
    drafter, position = NgramDrafter((1,) * most, lengths=(3, 2, 1)), 0
    while position < len(history):
        position = data.draw(st.integers(position + 1, len(history)))
        seen, expected = history[:position], []
        for length in (3, 2, 1):
            ends = [
                e
                for e in range(length, position)
                if seen[e - length : e] == seen[position - length :]
            ]
            if length <= position and ends:
                copied = list(seen)
                for step in range(most):
                    copied.append(copied[ends[-1] + step])
                expected = copied[position:]
                break
        assert drafter.draft(seen, most, RowSampler(Sampling())).tokens == expected


def test_expected_tokens():
    assert expected_tokens(1, 4) == 5
    assert expected_tokens(0, 4) == 1
    assert expected_tokens(0.5, 1) == 1.5
    counts = SpeculationCounts(
        passes=3,
        draft_passes=2,
        drafted=8,
        depths=8,
        accepted=5,
        tokens=8,
        draft_pass_tokens=7,
        rejected_passes=1,
    )
    assert counts.acceptance == 5 / 6
    assert counts.tokens_per_pass == 3.5


def played(pace, chance, cost, tokens=600, seed=0):
    """Return the seconds per token, and what every pass drafted, on a machine whose passes take ``cost(k)``."""
    draw, accepted, seconds, lengths = random.Random(seed), 0, 0.0, []
    while accepted < tokens:
        k = pace.next_length()
        lengths.append(k)
        right = 0
        while right < k and draw.random() < chance:
            right += 1
        pace.record_time(k, cost(k))
        pace.record_acceptance(right, missed=right < k)
        seconds += cost(k)
        accepted += right + 1
    return seconds / accepted, lengths


def test_draft_length_falls_to_zero_for_useless_drafts():
    seconds, lengths = played(DraftLengthController(8), 0.05, lambda k: 1 + 0.3 * k)
    assert seconds < 1.03
    assert lengths[-50:].count(0) >= 48


def test_draft_length_grows_for_accepted_drafts():
    seconds, lengths = played(DraftLengthController(8), 0.97, lambda k: 1 + 0.05 * k)
    assert seconds < 1.15 * (1 + 0.05 * 8) / expected_tokens(0.97, 8)
    assert max(lengths) == 8


def test_draft_length_recovers_when_the_text_changes():
    pace = DraftLengthController(6)
    played(pace, 0.0, lambda k: 1 + 0.2 * k, tokens=300)
    seconds, _ = played(pace, 1.0, lambda k: 1 + 0.2 * k, tokens=600)
    assert seconds < 0.5
