"""Patterns: no expression takes for ever, alone or with others, and what is quick is never refused."""

from __future__ import annotations

import time

import pytest

from quantforge.errors import InputError
from quantforge.formats import patterns
from quantforge.formats.patterns import matches


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_PATIENCE", patterns._Patience())


def test_what_they_match() -> None:
    assert matches(r"model\.layers\.[0-3]\..*", "model.layers.2.q_proj", whole=True)
    assert not matches(r"layers\.[0-3]", "layers.2.q_proj", whole=True)
    assert matches(r"layers\.[0-3]", "layers.2.q_proj", whole=False)
    assert not matches(r"[0-3]", "layers.2.q_proj", whole=False)
    assert matches("a" * patterns.LONGEST, "a" * patterns.LONGEST, whole=True)
    assert matches(f"a{{{patterns.MOST}}}", "a" * patterns.MOST, whole=True)


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
def test_what_is_refused(text: str, words: str) -> None:
    start = time.process_time()
    with pytest.raises(InputError, match=words):
        matches(text, "a" * 400, whole=True)
    assert time.process_time() - start < 0.7


def test_what_is_slow_is_refused_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each match is within its limit; a file may hold thousands of them."""
    monkeypatch.setattr(patterns, "TOGETHER", 0.5)

    def many() -> None:
        for number in range(10_000):
            matches("(a|aa)*[bc]", "a" * 21 + str(number), whole=True)

    start = time.process_time()
    with pytest.raises(InputError, match="takes too long"):
        many()
    assert time.process_time() - start < 2
    assert all(matches(r"a+\d+", f"a{number}", whole=True) for number in range(1000))


def test_patience_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])
    patience = patterns._Patience()
    assert not any(patience.last(0.19) for _ in range(10))
    assert patience.last(0.19)
    assert not patience.last(0.0005)  # quick
    assert patience.last(patterns.SLOW)  # counts
    now[0] += 5.0
    assert not patience.last(0.19)
    assert not patience.last(0.19)
    assert patience.last(0.19)  # half a second came back, not more
    now[0] += 1000.0
    assert not any(patience.last(0.19) for _ in range(10))


def test_patience_begins_whole_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    patience = patterns._Patience()
    assert not any(patience.last(0.199) for _ in range(10))
    assert patience.last(0.199)
    assert not patterns._Patience().last(patterns.TOGETHER)  # just within


def test_a_message_shows_a_short_pattern_whole_and_the_beginning_of_a_long_one() -> None:
    for length, shown in ((99, "a" * 99 + "("), (100, "a" * 100 + "...")):
        with pytest.raises(InputError) as refused:
            matches("a" * length + "(", "a", whole=True)
        assert f"'{shown}' is no regular" in str(refused.value)
