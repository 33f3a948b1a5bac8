"""Module name patterns: slow expressions are refused, alone or together; fast ones never are."""

from __future__ import annotations

import time

import pytest

from quantforge.errors import InputError
from quantforge.formats import patterns
from quantforge.formats.patterns import matches_pattern


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_BUDGET", patterns._SlowMatchBudget())


def test_full_and_prefix_pattern_matches() -> None:
    assert matches_pattern(r"model\.layers\.[0-3]\..*", "model.layers.2.q_proj", full_match=True)
    assert not matches_pattern(r"layers\.[0-3]", "layers.2.q_proj", full_match=True)
    assert matches_pattern(r"layers\.[0-3]", "layers.2.q_proj", full_match=False)
    assert not matches_pattern(r"[0-3]", "layers.2.q_proj", full_match=False)
    assert matches_pattern(
        "a" * patterns.MAX_PATTERN_LENGTH, "a" * patterns.MAX_PATTERN_LENGTH, full_match=True
    )
    assert matches_pattern(
        f"a{{{patterns.MAX_REPEAT_COUNT}}}", "a" * patterns.MAX_REPEAT_COUNT, full_match=True
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(a+)+$", "a repetition inside a repetition"),
        ("a{1001}", "a repetition of a greater count"),
        ("a" * 1001, "1001 characters"),
        ("(", "no regular expression"),
        ("(a|aa)*[bc]", "takes too long"),
    ],
)
def test_unsafe_or_slow_patterns_are_refused(text: str, words: str) -> None:
    start = time.process_time()
    with pytest.raises(InputError, match=words):
        matches_pattern(text, "a" * 400, full_match=True)
    assert time.process_time() - start < 0.7


def test_many_slow_matches_exhaust_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each match is within its own limit, but a file may hold thousands of them."""
    monkeypatch.setattr(patterns, "SLOW_MATCH_BUDGET", 0.5)

    def match_many_times() -> None:
        for number in range(10_000):
            matches_pattern("(a|aa)*[bc]", "a" * 21 + str(number), full_match=True)

    start = time.process_time()
    with pytest.raises(InputError, match="takes too long"):
        match_many_times()
    assert time.process_time() - start < 2
    monkeypatch.setattr(patterns, "SLOW_MATCH", 0.05)  # a pause of the interpreter is no slow match
    assert all(matches_pattern(r"a+\d+", f"a{number}", full_match=True) for number in range(1000))


def test_the_slow_match_budget_recovers_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])
    patience = patterns._SlowMatchBudget()
    assert not any(patience.is_exceeded_by(0.19) for _ in range(10))
    assert patience.is_exceeded_by(0.19)
    assert not patience.is_exceeded_by(0.0005)  # quick
    assert patience.is_exceeded_by(patterns.SLOW_MATCH)  # counts
    now[0] += 5.0
    assert not patience.is_exceeded_by(0.19)
    assert not patience.is_exceeded_by(0.19)
    assert patience.is_exceeded_by(0.19)  # half a second came back, not more
    now[0] += 1000.0
    assert not any(patience.is_exceeded_by(0.19) for _ in range(10))


def test_the_slow_match_budget_starts_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    patience = patterns._SlowMatchBudget()
    assert not any(patience.is_exceeded_by(0.199) for _ in range(10))
    assert patience.is_exceeded_by(0.199)
    assert not patterns._SlowMatchBudget().is_exceeded_by(patterns.SLOW_MATCH_BUDGET)  # just within


def test_error_messages_truncate_long_patterns() -> None:
    for length, shown in ((99, "a" * 99 + "("), (100, "a" * 100 + "...")):
        with pytest.raises(InputError) as refused:
            matches_pattern("a" * length + "(", "a", full_match=True)
        assert f"'{shown}' is no regular" in str(refused.value)
