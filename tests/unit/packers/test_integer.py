"""Integer grids: stored values, decoding, and a scale search that never loses to absmax."""

from __future__ import annotations

import pytest
import torch

from quantforge.errors import InputError
from quantforge.grids import ScaleType
from quantforge.notation import parse
from quantforge.packers import integer
from quantforge.packers import row_encoding as rows
from quantforge.scheme import Scheme
from tests.thorough import parametrize_each_value

SCHEMES = [
    "int4:g32:sym:f16",
    "int3:g11:asym:bf16",
    "int2:g33:sym:f32",
    "int8:row:asym:f16",
    "int5:tensor:sym:bf16",
]


def _weight(columns: int = 66, rows: int = 7) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.05


def _scheme(text: str, columns: int = 66) -> Scheme:
    return parse(text.replace("g32", "g33")) if columns % 32 else parse(text)


def _decoded(
    weight: torch.Tensor,
    scheme: Scheme,
    importance: torch.Tensor | None = None,
    search: bool = False,
) -> torch.Tensor:
    parameters = integer.fit(weight, scheme, importance, search=search)
    return integer.decode(integer.encode(weight, parameters, scheme), parameters, scheme)


def _sqnr(scheme: Scheme) -> float:
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1))
    error = weight - _decoded(weight, scheme)
    return float(10 * torch.log10(weight.square().mean() / error.square().mean()))


@parametrize_each_value(
    ("text", SCHEMES),
    ("search", [False, True]),
)
def test_shapes_types_and_ranges_are_what_a_file_stores(text: str, search: bool) -> None:
    weight, scheme = _weight(), _scheme(text)
    parameters = integer.fit(weight, scheme, search=search)
    codes = integer.encode(weight, parameters, scheme)
    low, high = integer.code_range(scheme)
    assert parameters["scales"].dtype == integer.SCALE_DTYPES[scheme.scale or ScaleType.F16]
    assert parameters["scales"].shape == scheme.parameter_shape((7, 66))
    assert codes.dtype == (torch.int8 if scheme.symmetric else torch.uint8)
    assert low <= int(codes.min())
    assert int(codes.max()) <= high
    assert ("zeros" in parameters) is not scheme.symmetric
    if not scheme.symmetric:
        assert parameters["zeros"].dtype == torch.uint8
        assert parameters["zeros"].shape == parameters["scales"].shape


def test_the_plain_fit_is_absmax_and_min_max_with_codes_of_the_rounded_scale() -> None:
    weight = torch.tensor([[0.7, -0.35, 0.1, 0.0], [-1.0, 0.5, 2.0, 0.25]])
    symmetric = parse("int4:g4:sym:f16")
    parameters = integer.fit(weight, symmetric)
    scale = torch.tensor([[0.7 / 7], [2.0 / 7]]).half()
    assert torch.equal(parameters["scales"], scale)
    codes = integer.encode(weight, parameters, symmetric)
    assert torch.equal(codes, (weight / scale.float()).round().clamp(-8, 7).to(torch.int8))
    asymmetric = parse("int4:g4:asym:f16")
    parameters = integer.fit(weight, asymmetric)
    assert torch.equal(parameters["scales"], torch.tensor([[1.05 / 15], [3.0 / 15]]).half())
    assert parameters["zeros"].tolist() == [[5], [5]]


def test_zero_point_of_a_group_is_within_one_to_fifteen() -> None:
    """One at least, as the first layout of GPTQ needs; the scale is that of the codes which are left then."""
    groups = {
        (0.0, 7.0, 14.0): (14 / 14, 1), (3.0, 9.0, 14.0): (14 / 14, 1),  # nothing below zero
        (-0.7, 7.0, 14.0): (14.7 / 15, 1),  # the zero point is one without help
        (-15.0, -9.0, -3.0): (15 / 15, 15), (-0.15, -0.09, -0.03): (0.15 / 15, 15),  # nothing above
        (0.0, 0.0, 0.0): (2.0**-14, 1),
    }  # fmt: skip
    parameters = integer.fit(torch.tensor(list(groups)), parse("int4:g3:asym:f32"))
    scales = torch.tensor([scale for scale, _ in groups.values()])
    assert torch.allclose(parameters["scales"].flatten(), scales, rtol=1e-6, atol=0)
    assert parameters["zeros"].flatten().tolist() == [zero for _, zero in groups.values()]


def test_scales_are_clamped_or_refused_at_float16_limits() -> None:
    half = torch.float16
    scales = torch.tensor([0.0, 2.0**-30, 2.0**-24, 1.0, 65504.0])
    kept = integer.round_scales(scales, half)
    assert kept.tolist() == [2.0**-14, 2.0**-24, 2.0**-24, 1.0, 65504.0]
    with pytest.raises(InputError, match=r"6.55e\+04 is beyond the range of torch.float16"):
        integer.round_scales(torch.tensor([65504.03]), half)


@pytest.mark.parametrize("text", ["int8:tensor:sym:bf16", "int4:g32:sym:f16", "int8:row:sym:f32"])
def test_large_matrices_are_encoded_as_small_ones_are(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, scheme = _weight(2048, 130), parse(text)
    monkeypatch.setattr(rows, "COMPILED_FROM", weight.numel())
    assert rows.supports(weight)
    parameters = integer.fit(weight, scheme)
    scales = integer.expand_to_columns(parameters["scales"], scheme, None).float()
    expected = (weight / scales).round().clamp(*integer.code_range(scheme))
    assert torch.equal(integer.encode(weight, parameters, scheme).float(), expected)


def test_decoding_is_exactly_code_minus_zero_times_scale_in_float32() -> None:
    scheme = parse("int4:g2:asym:bf16")
    parameters = {
        "scales": torch.tensor([[0.1, -0.3]]).bfloat16(),
        "zeros": torch.tensor([[3, 15]], dtype=torch.uint8),
    }
    codes = torch.tensor([[0, 15, 0, 14]], dtype=torch.uint8)
    scales = parameters["scales"].float()
    expected = torch.stack(
        [-3 * scales[0, 0], 12 * scales[0, 0], -15 * scales[0, 1], -scales[0, 1]]
    )
    assert torch.equal(integer.decode(codes, parameters, scheme)[0], expected)


@pytest.mark.parametrize("text", SCHEMES)
def test_any_run_of_columns_gives_the_same_as_the_whole(text: str) -> None:
    weight, scheme = _weight(), _scheme(text)
    parameters = integer.fit(weight, scheme)
    codes = integer.encode(weight, parameters, scheme)
    values = integer.decode(codes, parameters, scheme)
    for columns in (slice(20, 50), slice(33, 44), slice(32, 34), slice(65, 66)):
        part = integer.encode(weight[:, columns], parameters, scheme, columns)
        assert torch.equal(part, codes[:, columns])
        assert torch.equal(integer.decode(part, parameters, scheme, columns), values[:, columns])


@pytest.mark.parametrize("text", ["int4:g4:sym:f16", "int4:g4:asym:f16"])
def test_runs_that_end_next_to_the_border_of_a_group(text: str) -> None:
    weight, scheme = _weight(20) * torch.linspace(0.1, 5, 20), parse(text)
    parameters = integer.fit(weight, scheme)
    codes = integer.encode(weight, parameters, scheme)
    values = integer.decode(codes, parameters, scheme)
    for first, last in ((1, 4), (3, 5), (2, 5), (4, 5), (5, 8), (1, 17), (0, 5)):
        columns = slice(first, last)
        part = integer.encode(weight[:, columns], parameters, scheme, columns)
        assert torch.equal(part, codes[:, columns])
        assert torch.equal(integer.decode(part, parameters, scheme, columns), values[:, columns])


@pytest.mark.parametrize("text", SCHEMES)
def test_encoding_decoded_values_gives_the_same_codes(text: str) -> None:
    weight, scheme = _weight(), _scheme(text)
    parameters = integer.fit(weight, scheme, search=True)
    codes = integer.encode(weight, parameters, scheme)
    assert torch.equal(
        integer.encode(integer.decode(codes, parameters, scheme), parameters, scheme), codes
    )


@parametrize_each_value(
    ("text", [*SCHEMES, "int2:g11:asym:f16", "int4:row:sym:f16"]),
    ("weighted", [False, True]),
)
def test_scale_search_never_loses_to_absmax_and_usually_wins(text: str, weighted: bool) -> None:
    weight, scheme = _weight(rows=40), _scheme(text)
    importance = (
        torch.rand(66, generator=torch.Generator().manual_seed(2)).square() if weighted else None
    )
    columns = torch.ones(66) if importance is None else importance
    plain = (weight - _decoded(weight, scheme)).square() * columns
    result = (weight - _decoded(weight, scheme, importance, search=True)).square() * columns
    size = weight.numel() if "tensor" in text else scheme.group_size(66)
    plain, result = plain.reshape(-1, size).sum(1), result.reshape(-1, size).sum(1)
    assert bool((result <= plain * (1 + 1e-5)).all())
    assert float(result.sum()) < (0.995 if scheme.bits == 8 else 0.97) * float(plain.sum())


def test_negative_scale_uses_the_longer_side_of_the_grid() -> None:
    scheme = parse("int2:g4:sym:f32")
    weight = torch.tensor([[2.0, 1.0, -1.0, 0.0], [-2.0, -1.0, 1.0, 0.0]])
    parameters = integer.fit(weight, scheme, search=True)
    assert parameters["scales"].tolist() == [[-1.0], [1.0]]
    assert torch.equal(_decoded(weight, scheme, search=True), weight)


@parametrize_each_value(
    ("text", SCHEMES),
    ("search", [False, True]),
)
def test_zero_groups_come_back_as_exact_zeros_with_a_usable_scale(text: str, search: bool) -> None:
    scheme = _scheme(text)
    weight = _weight()
    weight[:, :33] = 0
    weight[3] = 0
    for case in (weight, torch.zeros_like(weight)):
        parameters = integer.fit(case, scheme, search=search)
        assert bool(parameters["scales"].isfinite().all())
        assert bool((parameters["scales"] != 0).all())
        decoded = integer.decode(integer.encode(case, parameters, scheme), parameters, scheme)
        assert bool((decoded[case == 0] == 0).all())


@parametrize_each_value(
    ("text", ["int4:g33:asym:f16", "int4:g33:sym:f16", "int2:row:asym:bf16"]),
    ("search", [False, True]),
)
def test_a_constant_group_is_at_most_one_step_off(text: str, search: bool) -> None:
    weight = torch.full((2, 66), 0.37)
    scheme = parse(text)
    scale = integer.fit(weight, scheme, search=search)["scales"].float().abs().max()
    assert float((weight - _decoded(weight, scheme, search=search)).abs().max()) <= float(scale)


@pytest.mark.parametrize("search", [False, True])
def test_one_outlier_keeps_its_value_and_one_non_zero_is_exact(search: bool) -> None:
    weight = _weight(64, 2)
    weight[0, 5] = 1e4
    decoded = _decoded(weight, parse("int8:g64:sym:f16"), search=search)
    assert float(decoded[0, 5]) == pytest.approx(1e4, rel=5e-3)
    alone = torch.zeros(1, 64)
    alone[0, 9] = 0.5
    decoded = _decoded(alone, parse("int4:g64:sym:f16"), search=search)
    assert float(decoded[0, 9]) == pytest.approx(0.5, rel=1e-3)
    assert int(decoded.count_nonzero()) == 1


@pytest.mark.parametrize("search", [False, True])
def test_scales_beyond_their_type_are_refused_and_tiny_ones_stay_above_zero(search: bool) -> None:
    weight = _weight()
    with pytest.raises(InputError, match="beyond the range"):
        integer.fit(weight * 1e8, parse("int4:g33:sym:f16"), search=search)
    huge = integer.fit(weight * 1e8, parse("int4:g33:sym:f32"), search=search)
    assert bool(huge["scales"].isfinite().all())
    for text in ("int4:g33:sym:f16", "int4:g33:asym:f16"):
        tiny = integer.fit(weight * 1e-9, parse(text), search=search)["scales"]
        assert bool((tiny != 0).all())


@pytest.mark.parametrize("power", [-6, 5])
@pytest.mark.parametrize("text", ["int4:g33:sym:bf16", "int3:row:asym:f32"])
def test_power_of_two_factor_changes_only_the_scales(text: str, power: int) -> None:
    weight, scheme = _weight(), parse(text)
    first = integer.fit(weight, scheme, search=True)
    second = integer.fit(weight * 2.0**power, scheme, search=True)
    assert torch.equal(first["scales"].float() * 2.0**power, second["scales"].float())
    assert torch.equal(
        integer.encode(weight, first, scheme), integer.encode(weight * 2.0**power, second, scheme)
    )


@pytest.mark.parametrize(
    ("text", "decibel"),
    [("int4:g128:sym:f16", 18.62), ("int8:g128:sym:f16", 43.8), ("int3:g128:asym:f16", 13.33)],
)
def test_error_on_normal_weights_is_as_measured(text: str, decibel: float) -> None:
    assert _sqnr(parse(text)) == pytest.approx(decibel, abs=0.15)
