"""Names of caches: one word for both halves, or one for each; what is neither says what would be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantforge.cache_kinds import WORDS, format_cache_kind, parse_cache_kind, parse_cache_kinds
from quantforge.errors import UsageError

KINDS = st.sampled_from([word.replace("16bit", "") for word in WORDS])


@given(keys=KINDS, values=KINDS)
def test_every_pair_has_one_name_that_says_it(keys, values):
    name = format_cache_kind(keys, values)
    assert parse_cache_kind(name) == (keys, values)
    assert (keys == values) == ("," not in name)


@given(st.lists(st.tuples(KINDS, KINDS), min_size=1))
def test_a_list_of_names_is_read_as_it_was_written(pairs):
    names = [format_cache_kind(*pair) for pair in pairs]
    assert parse_cache_kinds(",".join(names)) == tuple(dict.fromkeys(names))


def test_halves_come_in_any_order_and_equal_ones_are_one_word():
    assert parse_cache_kinds("v=int4,k=int8,k=fp8,v=fp8,16bit") == ("k=int8,v=int4", "fp8", "16bit")


@pytest.mark.parametrize(
    "name",
    [
        "", "int5", "k=int8", "v=int4", "k=int8,k=int4", "k=int8,v=", "k=,v=int4", "k=int8,v=int4,v=int4",
        "K=int8,v=int4",
        "int8,int4", "k=int8;v=int4", "k=int8, v=int4", " int8", "k=int8,v=int5", ",", "none",
    ],
)  # fmt: skip
def test_what_is_no_name_is_refused_with_what_would_be(name):
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
def test_what_is_no_list_is_refused(names):
    with pytest.raises(UsageError, match="--cache"):
        parse_cache_kinds(names)
