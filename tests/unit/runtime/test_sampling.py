"""Sampling equals its definitions, alone and in a batch, and is reproducible by seed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantforge.errors import InputError, UsageError
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.sampling import (
    ChosenToken,
    RowSampler,
    apply_bias_and_penalties,
    apply_repetition_penalty,
    choose_tokens,
    sample_tokens,
    sampling_weights,
)

PLAIN = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
LOGITS = PLAIN.log()


def distribution(logits: Tensor, options: Sampling) -> Tensor:
    weights = sampling_weights(logits, [options] * len(logits)).double()
    return weights / weights.sum(-1, keepdim=True)


def probabilities(sampler: RowSampler, logits: Tensor) -> Tensor:
    """Return the distribution that a sampler chooses from; greedy: 1 for one token."""
    adjusted = apply_bias_and_penalties(logits[None], [sampler.options], [sampler.counts])
    if not sampler.options.greedy:
        return distribution(adjusted, sampler.options)[0]
    return torch.nn.functional.one_hot(adjusted[0].argmax(), len(logits)).double()


def kept(count: int) -> Tensor:
    weights = PLAIN.double().clone()
    weights[:, count:] = 0
    return weights / weights.sum()


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected.double(), rtol=1e-5, atol=1e-7)


# ---- definitions


def test_greedy_takes_the_most_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]])
    assert choose_tokens([RowSampler(Sampling())] * 2, logits) == [ChosenToken(1), ChosenToken(0)]


def test_temperature() -> None:
    weights = torch.tensor([[0.16, 0.09, 0.04, 0.01]])
    close(distribution(LOGITS, Sampling(temperature=0.5)), weights / weights.sum())


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6, 1e300])
def test_extreme_temperatures_reach_greedy_and_uniform(temperature: float) -> None:
    expected = [[1.0, 0, 0, 0]] if temperature < 1 else [[0.25] * 4]
    close(distribution(LOGITS, Sampling(temperature=temperature)), torch.tensor(expected))


@pytest.mark.parametrize(("k", "count"), [(0, 4), (1, 1), (3, 3), (4, 4), (9, 4)])
def test_top_k(k: int, count: int) -> None:
    close(distribution(LOGITS, Sampling(temperature=1, top_k=k)), kept(count))


@pytest.mark.parametrize(
    ("p", "count"), [(1.0, 4), (0.95, 4), (0.85, 3), (0.65, 2), (0.39, 1), (1e-9, 1)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(p: float, count: int) -> None:
    close(distribution(LOGITS, Sampling(temperature=1, top_p=p)), kept(count))


def test_top_p_keeps_the_first_of_equally_likely_ones() -> None:
    result = distribution(torch.zeros(1, 8), Sampling(temperature=1, top_p=0.3))
    close(result, torch.tensor([[1 / 3] * 3 + [0.0] * 5]))


def test_top_p_applies_after_top_k() -> None:
    """0.4 and 0.3 of 0.7 are 0.571 and 0.429: without top-k, 0.5 would be reached by two tokens."""
    close(distribution(LOGITS, Sampling(temperature=1, top_k=2, top_p=0.5)), kept(1))
    close(distribution(LOGITS, Sampling(temperature=1, top_p=0.5)), kept(2))


def test_top_p_may_exceed_the_first_sorted_tokens() -> None:
    logits = torch.linspace(0, -1, 3000)[None]
    result = distribution(logits, Sampling(temperature=1, top_p=0.9))
    plain = logits.double().softmax(-1)
    count = int((plain.cumsum(-1) < 0.9).sum()) + 1
    assert count > 2000
    assert int((result > 0).sum()) == count
    close(result[:, :count], plain[:, :count] / plain[:, :count].sum())


@pytest.mark.parametrize(("m", "count"), [(0.0, 4), (0.24, 4), (0.26, 3), (0.6, 2), (1.0, 1)])
def test_min_p(m: float, count: int) -> None:
    close(distribution(LOGITS, Sampling(temperature=1, min_p=m)), kept(count))


def test_repetition_penalty() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    assert apply_repetition_penalty(logits, 2.0).tolist() == [[1.0, -4.0, 0.5, -2.0]]
    options = Sampling(repetition_penalty=3.0)
    row = RowSampler(options, [0, 1, 1])  # the prompt counts, once
    assert [row.choose(logits[0]).token for _ in range(3)] == [2, 0, 0]  # what was generated too


def test_frequency_and_presence_penalties_count_what_was_generated() -> None:
    logits = torch.tensor([2.0, 1.6, 0.0])
    often = RowSampler(Sampling(frequency_penalty=0.3), [0, 0, 0])  # the prompt does not count
    assert [often.choose(logits).token for _ in range(6)] == [0, 0, 1, 0, 1, 0]
    once = RowSampler(Sampling(presence_penalty=0.5), [0])
    assert [once.choose(logits).token for _ in range(4)] == [0, 1, 0, 0]
    more = RowSampler(Sampling(frequency_penalty=-2.0))
    more.record(2)
    more.record(2)
    assert more.choose(logits).token == 2


def test_bias_precedes_penalties_and_logprobs_are_unmodified() -> None:
    """(log 0.1 + 5) / 2 is more than log 0.3 + 2; 2 log 0.1 + 5 would be less."""
    options = Sampling(logit_bias={3: 5.0, 1: 2.0}, repetition_penalty=2.0, logprobs=2)
    result = RowSampler(options, [3]).choose(LOGITS[0])
    assert result.token == 3
    assert result.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token for token, _ in result.top] == [0, 1]
    assert [value for _, value in result.top] == pytest.approx([math.log(0.4), math.log(0.3)])


def test_a_bias_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="token 4") as caught:
        RowSampler(Sampling(logit_bias={4: 1})).choose(LOGITS[0])
    assert "0 to 3" in caught.value.hint


def test_many_tokens_are_counted() -> None:
    row = RowSampler(Sampling(frequency_penalty=1.0), range(100))
    for token in [*range(50, 300), *range(250, 400)]:
        row.record(token)
    logits = torch.arange(500, 0, -1.0)
    expected = logits.clone()
    for token in [*range(50, 300), *range(250, 400)]:
        expected[token] -= 1
    drawn_from = RowSampler(Sampling(temperature=1.0, frequency_penalty=1.0), range(100))
    assert row.counts is not None
    drawn_from.counts = row.counts
    close(probabilities(drawn_from, logits), expected.double().softmax(-1))


# ---- draws


def critical(freedom: int) -> float:
    """99.99 % of a chi-square distribution, by Wilson and Hilferty's approximation."""
    share = 2 / (9 * freedom)
    return freedom * (1 - share + 3.719 * math.sqrt(share)) ** 3


@pytest.mark.parametrize(
    "options",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=20, seed=1),
        Sampling(temperature=1.3, top_p=0.8, seed=2),
        Sampling(temperature=1.1, min_p=0.1, seed=3),
        Sampling(temperature=0.9, top_k=30, top_p=0.95, min_p=0.02, seed=4, logit_bias={3: 2.0, 5: -9}),
    ],
)  # fmt: skip
def test_draws_follow_the_distribution(options: Sampling) -> None:
    """Chi-square over 10^5 draws; what has no probability is never drawn."""
    count, vocabulary = 100_000, 600
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)) * 1.5
    expected = probabilities(RowSampler(options), logits) * count
    rows = [options] * 2000
    weights = sampling_weights(
        apply_bias_and_penalties(logits.expand(len(rows), -1), rows, [None] * len(rows)), rows
    )
    generator = torch.Generator().manual_seed(options.seed)
    uniform = torch.rand(count // len(rows), len(rows), generator=generator, dtype=torch.float64)
    seen = (
        torch.cat([sample_tokens(weights, part) for part in uniform])
        .bincount(minlength=vocabulary)
        .double()
    )
    assert seen[expected == 0].sum() == 0
    rare = expected < 5
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = expected > 0
    statistic = float(((seen - expected)[used] ** 2 / expected[used]).sum())
    assert statistic < critical(int(used.sum()) - 1)


def test_sampling_with_penalties_follows_the_distribution() -> None:
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5])
    options = Sampling(1.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    seen, expected = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for seed in range(1500):
        row = RowSampler(options.for_choice(seed), [1, 3])
        for token in (0, 0, 2):
            row.record(token)
        expected += probabilities(row, logits)
        seen[row.choose(logits).token] += 1
    adjusted = [1.0 / 1.3 - 0.8 - 0.2, 0.5 / 1.3, 0.0 - 0.4 - 0.2, -0.5 * 1.3]
    close(expected / 1500, torch.tensor(adjusted).softmax(-1))
    assert float(((seen - expected) ** 2 / expected).sum()) < critical(3)


def test_draws_at_the_borders_of_the_unit_interval() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]).expand(3, -1)
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(weights, uniform).tolist() == [1, 3, 3]
    whole = torch.tensor([[1.0, 2.0**-30, 0.0]])  # a sum at which the last draw rounds up to it
    assert sample_tokens(whole, uniform[2:]).tolist() == [1]


def test_seeds_reproduce_draws() -> None:
    def draw(seed: int) -> list[int]:
        row = RowSampler(Sampling(temperature=1, seed=seed))
        return [row.choose(torch.zeros(1000)).token for _ in range(5)]

    assert draw(0) == draw(0) != draw(1)
    assert len(set(draw(0))) > 1
    assert Sampling(seed=5).for_choice(3) == Sampling(seed=8)
    assert Sampling(seed=(1 << 63) - 1).for_choice(1).seed == 0


RULES = st.builds(
    Sampling,
    temperature=st.one_of(st.just(0.0), st.floats(0.05, 5)),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.5, 2),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    seed=st.integers(0, 99),
    logit_bias=st.dictionaries(st.integers(0, 31), st.floats(-100, 100), max_size=3),
    logprobs=st.one_of(st.none(), st.integers(0, 5)),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(RULES, st.lists(st.integers(0, 31), max_size=6)), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_request_samples_the_same_alone_and_in_a_batch(
    requests: list[tuple[Sampling, list[int]]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    together = [RowSampler(*request) for request in requests]
    alone = [RowSampler(*request) for request in requests]
    for _ in range(4):
        logits = torch.randn(len(requests), 32, generator=generator) * 4
        before = logits.clone()
        result = choose_tokens(together, logits)
        assert torch.equal(logits, before)
        for row, (token, sampler) in enumerate(zip(result, alone, strict=True)):
            weights = probabilities(sampler, logits[row])
            assert weights[token.token] > 0
            assert math.isclose(weights.sum().item(), 1, rel_tol=1e-9)
            assert sampler.choose(logits[row]) == token
            if token.logprob is not None:
                assert len(token.top) == sampler.options.logprobs
                assert all(value >= token.logprob for _, value in token.top[:1])


def test_large_vocabulary_samples_the_same_alone_and_in_a_batch() -> None:
    """Of several blocks, in several parts, beyond the tokens that top-p looks at first."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 40_001, generator=generator) * 3
    cuts: tuple[dict[str, float], ...] = ({}, {"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.05})
    rules = [Sampling(1.0, seed=row, **cuts[row % 4]) for row in range(40)]  # type: ignore[arg-type]
    together = choose_tokens([RowSampler(rule) for rule in rules], logits)
    assert together == [
        RowSampler(item).choose(row) for item, row in zip(rules, logits, strict=True)
    ]


# ---- what is refused


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_are_refused(bad: float) -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, bad]])
    with pytest.raises(InputError, match="token 1 of sequence 1"):
        choose_tokens([RowSampler(Sampling())] * 2, logits)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("temperature", -1, "from 0 on"),
        ("temperature", float("nan"), "from 0 on"),
        ("temperature", 10**400, "from 0 on"),
        ("temperature", True, "from 0 on"),
        ("top_k", -1, "from 0 on"),
        ("top_k", 1.0, "whole"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.1, "at most 1"),
        ("min_p", -0.1, "0 to 1"),
        ("min_p", 1.1, "0 to 1"),
        ("repetition_penalty", 0.0, "0.01"),
        ("repetition_penalty", -1.5, "0.01"),
        ("frequency_penalty", 2.1, "-2 to 2"),
        ("presence_penalty", -2.1, "-2 to 2"),
        ("presence_penalty", None, "-2 to 2"),
        ("seed", -1, "whole"),
        ("seed", 1 << 63, "2^63 - 1"),
        ("logprobs", 21, "0 to 20"),
        ("logprobs", -1, "0 to 20"),
        ("logit_bias", {1: 101}, "-100 to 100"),
        ("logit_bias", {-1: 1}, "token ids"),
        ("logit_bias", {"1": 1}, "token ids"),
        ("logit_bias", [1], "token ids"),
    ],
)
def test_invalid_sampling_options_are_refused(name: str, value: object, rule: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        Sampling(**{name: value})  # type: ignore[arg-type]
    assert rule in caught.value.hint
