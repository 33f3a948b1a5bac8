"""Stop strings are found across pieces of text, which are held back while one may follow."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantforge.errors import UsageError
from quantforge.runtime.generation_options import parse_stop_strings
from quantforge.runtime.text_stream import StopMatcher


def expected(text: str, stop: list[str]) -> tuple[str, str | None]:
    """By trying every end: the text before the first string that is complete, the longest where several are."""
    for end in range(1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            result = max(complete, key=len)
            return text[: end - len(result)], result
    return text, None


def run_scanner(
    pieces: list[str], stop: list[str], *, include: bool = False
) -> tuple[str, str | None]:
    matcher = StopMatcher(stop, include_stop=include)
    text = "".join(matcher.add(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab€", max_size=4), max_size=12),
    st.lists(st.text("ab€", min_size=1, max_size=5), max_size=3),
)
@example(["aab", "a", "ab"], ["aabaab"])
@example(["abc", "d"], ["abcd", "bc"])
@example(["x€", "€y"], ["€€"])
def test_stop_strings_are_found_across_any_pieces(pieces: list[str], stop: list[str]) -> None:
    text = "".join(pieces)
    before, result = expected(text, stop)
    assert run_scanner(pieces, stop) == (before, result)
    assert run_scanner([text], stop) == (before, result)
    assert run_scanner(pieces, stop, include=True) == (before + (result or ""), result)


@settings(max_examples=100, deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_text_is_released_as_early_as_possible(text: str, stop: list[str]) -> None:
    """What waits is the longest end of the text that begins a stop string, and no more."""
    matcher, sent = StopMatcher(stop), ""
    for index, character in enumerate(text):
        sent += matcher.add(character)
        if matcher.matched is not None:
            break
        seen = text[: index + 1]
        waits = max(
            size
            for string in stop
            for size in range(len(string) + 1)
            if seen.endswith(string[:size])
        )
        assert sent == seen[: len(seen) - waits]


def test_nothing_comes_after_the_end() -> None:
    matcher = StopMatcher(["stop"])
    assert [matcher.add("one st"), matcher.add("op two"), matcher.add("three")] == ["one ", "", ""]
    assert matcher.flush() == ""
    assert StopMatcher([]).add("text") == "text"


def test_a_long_string_costs_little() -> None:
    stop = "a" * 1024 + "b"
    start_time = time.process_time()
    assert run_scanner(["some", " text"] * 100, [stop]) == ("some text" * 100, None)
    pieces = ["aaaaaaaa"] * 129
    assert run_scanner([*pieces, "b"], [stop]) == ("a" * 8, stop)
    assert run_scanner([*pieces, "c"], [stop]) == ("a" * 8 * 129 + "c", None)
    assert time.process_time() - start_time < 1


@pytest.mark.parametrize("wrong", ["", [""], ["a", ""], [1], 1, b"a", ["\ud800"], None])
def test_invalid_stop_strings_are_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="stop"):
        parse_stop_strings(wrong)


def test_one_string_or_several() -> None:
    assert parse_stop_strings("a") == ("a",)
    assert parse_stop_strings(["a", "bc"]) == ("a", "bc")
    assert parse_stop_strings(()) == ()
