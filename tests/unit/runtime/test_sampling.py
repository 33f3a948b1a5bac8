"""Sampling equals its definitions, is seeded, and refuses what is no distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.errors import InputError, UsageError
from quantforge.runtime.sampling import Sampler, Sampling, distribution, penalised

LOGITS = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))


def test_greedy_takes_the_most_likely():
    assert Sampler(Sampling()).choose(
        torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]])
    ).tolist() == [1, 0]


def test_temperature():
    found = distribution(LOGITS, Sampling(temperature=0.5))
    weights = torch.tensor([[0.16, 0.09, 0.04, 0.01]])
    torch.testing.assert_close(found, weights / weights.sum())


@pytest.mark.parametrize(("k", "kept"), [(0, 4), (1, 1), (3, 3), (9, 4)])
def test_top_k(k, kept):
    found = distribution(LOGITS, Sampling(temperature=1, top_k=k))
    weights = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    weights[:, kept:] = 0
    torch.testing.assert_close(found, weights / weights.sum())


@pytest.mark.parametrize(
    ("p", "kept"), [(1.0, 4), (0.95, 4), (0.85, 3), (0.65, 2), (0.39, 1), (1e-9, 1)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(p, kept):
    found = distribution(LOGITS, Sampling(temperature=1, top_p=p))
    weights = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    weights[:, kept:] = 0
    torch.testing.assert_close(found, weights / weights.sum())


def test_repetition_penalty():
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert penalised(logits, seen, 2.0).tolist() == [[1.0, -4.0, 1.0, -1.0]]
    chosen = Sampler(Sampling(repetition_penalty=3.0)).choose(logits, seen)
    assert chosen.tolist() == [2]


def test_draws_follow_the_distribution():
    count = 20_000
    sampler = Sampler(Sampling(temperature=1, top_p=0.85, seed=1))
    drawn = sampler.choose(LOGITS.expand(count, -1)).bincount(minlength=4) / count
    expected = torch.tensor([4 / 9, 3 / 9, 2 / 9, 0])
    deviation = (expected * (1 - expected) / count).sqrt()
    assert drawn[3] == 0
    assert ((drawn - expected).abs()[:3] < 4 * deviation[:3]).all()


def test_seeds():
    def draw(seed):
        sampler = Sampler(Sampling(temperature=1, seed=seed))
        return [sampler.choose(torch.zeros(1, 1000)).item() for _ in range(5)]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    assert len(set(draw(0))) > 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=12),
    st.floats(0.05, 5), st.integers(0, 14), st.floats(0.01, 1), st.integers(0, 99),
)  # fmt: skip
def test_any_distribution(values, temperature, k, p, seed):
    options = Sampling(temperature, k, p, 1.0, seed)
    logits = torch.tensor([values])
    weights = distribution(logits, options)
    assert math.isclose(weights.sum().item(), 1, rel_tol=1e-4)
    plain = (logits / temperature).softmax(-1)
    assert (weights[plain == plain.max()] > 0).any()  # of equally likely ones the first may be all
    chosen = Sampler(options).choose(logits)
    assert weights[0, chosen] > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(bad):
    with pytest.raises(InputError, match="token 1 of sequence 1"):
        Sampler(Sampling()).choose(torch.tensor([[0.0, 0.0], [0.0, bad]]))


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1},
     {"repetition_penalty": 0.0}],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Sampling(**wrong)
