"""The notation of quantization schemes round-trips, and bits per weight are exact."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantforge.errors import InputError
from quantforge.grids import (
    GGML_BLOCKS,
    INTEGER_BITS,
    INTEGER_SCALES,
    SCALE_BITS,
    PerGroup,
    PerTensor,
    Row,
    ScaleType,
    Zero,
)
from quantforge.notation import ALIASES, parse, parse_layer
from quantforge.scheme import Scheme

SCHEMES = st.builds(
    Scheme,
    st.sampled_from([f"int{bits}" for bits in INTEGER_BITS]),
    st.one_of(st.builds(PerGroup, st.integers(1, 9_999_999)), st.just(Row()), st.just(PerTensor())),
    st.sampled_from([Zero.NONE, Zero.INT]),
    st.one_of(st.none(), st.sampled_from(INTEGER_SCALES)),
)


@given(SCHEMES)
def test_schemes_round_trip_through_text(scheme):
    assert parse(str(scheme)) == scheme
    assert parse(str(scheme).upper()) == scheme


@given(SCHEMES, st.integers(1, 64), st.integers(1, 8))
def test_bits_per_weight_counts_every_code_scale_and_zero(scheme, rows, factor):
    size = scheme.granularity.size if isinstance(scheme.granularity, PerGroup) else 48
    shape = (rows, factor * size)
    codes = shape[0] * shape[1] * scheme.bits
    each = SCALE_BITS[scheme.scale or ScaleType.F16] + (0 if scheme.symmetric else scheme.bits)
    scales = {PerGroup: rows * factor, Row: rows, PerTensor: 1}[type(scheme.granularity)]
    assert scheme.bits_per_weight(shape) == Fraction(codes + scales * each, shape[0] * shape[1])


@pytest.mark.parametrize("grid", GGML_BLOCKS)
def test_a_fixed_layout_is_named_by_its_grid_alone(grid):
    scheme = parse(grid)
    assert str(scheme) == grid == str(parse(grid.upper()))
    assert scheme.with_scale(ScaleType.BF16) == scheme
    with pytest.raises(InputError, match="fixed"):
        parse(f"{grid}:g32")


def test_bits_per_weight_of_fixed_layouts():
    bits = {"q2_k": Fraction(21, 8), "q4_k": Fraction(9, 2), "q6_k": Fraction(105, 16)}
    bits |= {"q4_0": Fraction(9, 2), "mxfp4": Fraction(17, 4), "tq1_0": Fraction(27, 16)}
    for grid, expected in bits.items():
        assert parse(grid).bits_per_weight((3, 512)) == expected
    assert parse("q4_k").parameter_shape((3, 512)) == (3, 16)
    with pytest.raises(ValueError, match="q4_k block 256"):
        parse("q4_k").parameter_shape((3, 288))


def test_bits_per_weight_of_known_schemes():
    assert parse("int4:g128:sym:f16").bits_per_weight((64, 256)) == Fraction(33, 8)  # 4.125
    assert parse("int4:g128:asym:f16").bits_per_weight((64, 256)) == Fraction(133, 32)
    assert parse("int8:row:sym:f32").bits_per_weight((64, 256)) == Fraction(65, 8)


@pytest.mark.parametrize(("alias", "scheme"), ALIASES.items())
def test_scheme_aliases_parse_to_their_schemes(alias, scheme):
    assert parse_layer(alias) == parse_layer(alias.lower()) == parse_layer(scheme)
    assert parse_layer(str(parse_layer(alias))) == parse_layer(alias)


@pytest.mark.parametrize(
    ("short", "full"),
    [("int4", "int4:g128:sym"), ("int3:g64", "int3:g64:sym"), ("int8:channel", "int8:row:sym")],
)
def test_omitted_scheme_parts_take_defaults(short, full):
    assert parse(short) == parse(full)


def test_an_open_scale_type_is_filled_in_once():
    assert str(parse("int4").with_scale(ScaleType.BF16)) == "int4:g128:sym:bf16"
    assert str(parse("int4:g128:sym:f32").with_scale(ScaleType.BF16)) == "int4:g128:sym:f32"


def test_a_non_dividing_group_has_no_parameter_shape():
    with pytest.raises(ValueError, match="multiple"):
        parse("int4:g128").parameter_shape((4, 192))
    assert parse("int4:g64").parameter_shape((4, 192)) == (4, 3)


@given(st.text(max_size=30))
def test_any_text_is_a_scheme_or_an_error_with_a_hint(text):
    try:
        scheme = parse(text)
    except InputError as error:
        assert error.hint  # noqa: PT017 - either outcome is fine
    else:
        assert parse(str(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("int44", "int4"),
        ("w4a61", "W4A16"),
        ("int4:128", "g128"),
        ("int4:g0", "g128"),
        ("int4:g128:symmetric", "sym"),
        ("int4:g128:sym:fp16", "f16"),
        ("int4:g128:sym:f16:x", "GRID"),
        ("int1", "int"),
        ("", "known"),
    ],
)
def test_scheme_typos_get_a_suggestion(text, word):
    with pytest.raises(InputError) as caught:
        parse(text)
    assert word in caught.value.hint
