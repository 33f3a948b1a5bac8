"""Names of cache kinds: one word for keys and values, or one each; others are refused with a hint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantforge.cache_kinds import WORDS, format_cache_kind, parse_cache_kind, parse_cache_kinds
from quantforge.errors import UsageError

KINDS = st.sampled_from([word.replace("16bit", "") for word in WORDS])


@given(keys=KINDS, values=KINDS)
def test_cache_kind_names_round_trip(keys, values):
    name = format_cache_kind(keys, values)
    assert parse_cache_kind(name) == (keys, values)
    assert (keys == values) == ("," not in name)


@given(st.lists(st.tuples(KINDS, KINDS), min_size=1))
def test_cache_kind_lists_round_trip(pairs):
    names = [format_cache_kind(*pair) for pair in pairs]
    assert parse_cache_kinds(",".join(names)) == tuple(dict.fromkeys(names))


def test_key_and_value_order_and_duplicates_are_normalized():
    assert parse_cache_kinds("v=int4,k=int8,k=fp8,v=fp8,16bit") == ("k=int8,v=int4", "fp8", "16bit")


@pytest.mark.parametrize(
    "name",
    [
        "", "int5", "k=int8", "v=int4", "k=int8,k=int4", "k=int8,v=", "k=,v=int4", "k=int8,v=int4,v=int4",
        "K=int8,v=int4",
        "int8,int4", "k=int8;v=int4", "k=int8, v=int4", " int8", "k=int8,v=int5", ",", "none",
    ],
)  # fmt: skip
def test_invalid_cache_kinds_are_refused_with_a_hint(name):
    with pytest.raises(UsageError, match="--kind") as raised:
        parse_cache_kind(name, "--kind")
    assert "k=" in raised.value.hint


@pytest.mark.parametrize(
    "names",
    [
        "",
        ",",
        "int8,",
        ",int8",
        "k=int8",
        "int8,k=int8",
        "k=int8,int4",
        "int8,,int4",
        "v=int4,int8",
    ],
)
def test_invalid_cache_kind_lists_are_refused(names):
    with pytest.raises(UsageError, match="--cache"):
        parse_cache_kinds(names)
