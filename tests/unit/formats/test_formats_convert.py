"""Conversion of a quantized tensor to another format: the same numbers or a refusal."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.errors import RefusedError
from quantforge.formats import ModuleLayout, Verdict, load_format
from quantforge.formats.convert import compare_schemes, compare_values, convert, scheme_in_format
from quantforge.grids import ScaleType
from quantforge.notation import parse
from quantforge.packers import get_packer
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import LayerScheme
from tests.quantized import DTYPES, INTEGER_FORMATS, dequantize_reference, random_tensor

SHAPE = (32, 256)


def with_scales(tensor, scales):
    return QuantizedTensor(tensor.codes, {**tensor.parameters, "scales": scales}, tensor.scheme)


@pytest.mark.parametrize(
    ("scheme", "target", "verdict"),
    [
        ("int4:g64:sym:f16", "int4:g64:sym:f16", Verdict.EXACT),
        ("int4:g64:sym:f16", "int4:g64:asym:f32", Verdict.EXACT),
        ("int4:tensor:asym:bf16", "int4:row:asym:bf16", Verdict.EXACT),
        ("int4:row:sym:f16", "int4:g128:sym:f16", Verdict.EXACT),
        ("int4:g256:sym:f16", "int4:row:sym:f16", Verdict.EXACT),
        ("int4:g64:asym:f16", "int4:g64:sym:f16", Verdict.DEPENDS_ON_VALUES),
        ("int4:g64:sym:f16", "int4:g64:sym:bf16", Verdict.DEPENDS_ON_VALUES),
        ("int4:g64:sym:bf16", "int4:g64:sym:f16", Verdict.DEPENDS_ON_VALUES),
        ("int4:g64:sym:f16", "int4:g128:sym:f16", Verdict.IMPOSSIBLE),
        ("int4:row:sym:f16", "int4:tensor:sym:f16", Verdict.IMPOSSIBLE),
        ("int4:g64:sym:f16", "int8:g64:sym:f16", Verdict.IMPOSSIBLE),
    ],
)
def test_verdicts_from_schemes_alone(scheme, target, verdict):
    fit = compare_schemes(parse(scheme), parse(target), SHAPE)
    assert fit.verdict is verdict
    assert (fit.reason == "") is (verdict is Verdict.EXACT)


def test_zero_points_below_the_minimum_depend_on_values():
    asym, sym = parse("int4:g64:asym:f16"), parse("int4:g64:sym:f16")
    assert compare_schemes(asym, asym, SHAPE, 1).verdict is Verdict.DEPENDS_ON_VALUES
    assert compare_schemes(sym, asym, SHAPE, 1).verdict is Verdict.EXACT
    tensor = random_tensor(asym, SHAPE, least_zero=1)
    assert compare_values(tensor, asym, 1).verdict is Verdict.EXACT
    assert convert(tensor, asym, 1).parameters["zeros"].min() >= 1
    tensor.parameters["zeros"][3, 2] = 0
    assert compare_values(tensor, asym, 1).verdict is Verdict.IMPOSSIBLE
    with pytest.raises(RefusedError, match=r"1 group\(s\) have a zero point below 1") as caught:
        load_format("gptq").pack("m", tensor)
    assert "gptq_v2" in caught.value.hint
    assert load_format("gptq_v2").pack("m", tensor)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(
        ["int4:g64:sym", "int4:row:sym", "int4:tensor:sym", "int4:g128:asym", "int4:row:asym"]
    ),
    st.sampled_from(["f16", "bf16", "f32"]),
    st.sampled_from(INTEGER_FORMATS),
    st.sampled_from(["F16", "BF16", "F32"]),
    st.integers(0, 99),
)
def test_conversions_are_exact_or_refused_with_a_reason(scheme, scale, key, model_dtype, seed):
    target, source = load_format(key), parse(f"{scheme}:{scale}")
    fit, target_scheme = scheme_in_format(source, SHAPE, target, model_dtype)
    assert fit.verdict in {Verdict.EXACT, Verdict.DEPENDS_ON_VALUES}
    tensor = random_tensor(source, SHAPE, seed)
    value_fit = compare_values(tensor, target_scheme, target.MIN_ZERO_POINT)
    if fit.verdict is Verdict.EXACT:
        assert value_fit.verdict is Verdict.EXACT
    if value_fit.verdict is not Verdict.EXACT:
        assert value_fit.reason
        with pytest.raises(RefusedError):
            convert(tensor, target_scheme, target.MIN_ZERO_POINT)
        return
    restated = convert(tensor, target_scheme, target.MIN_ZERO_POINT)
    assert restated.scheme == target_scheme
    assert restated.parameters["scales"].dtype == DTYPES[target_scheme.scale]
    assert restated.parameters["scales"].shape == target_scheme.parameter_shape(SHAPE)
    assert torch.equal(dequantize_reference(restated), dequantize_reference(tensor))
    packed = target.pack("m", restated)
    layout = ModuleLayout("m", LayerScheme(target_scheme), SHAPE, tuple(packed))
    assert torch.equal(
        dequantize_reference(target.unpack(layout, packed)), dequantize_reference(tensor)
    )


def test_scales_convert_if_every_value_is_representable():
    source, target_scheme = parse("int4:g64:sym:f16"), parse("int4:g64:sym:bf16")
    tensor = random_tensor(source, SHAPE)
    fit = compare_values(tensor, target_scheme)
    assert fit.verdict is Verdict.INEXACT
    assert "scales are not bf16 numbers" in fit.reason
    with pytest.raises(RefusedError) as caught:
        convert(tensor, target_scheme)
    assert "--allow-inexact" in caught.value.hint
    rounded = convert(tensor, target_scheme, allow_inexact=True)
    assert torch.equal(rounded.parameters["scales"], tensor.parameters["scales"].bfloat16())
    assert torch.equal(rounded.codes, tensor.codes)
    powers = with_scales(tensor, torch.full((32, 4), 2.0**-7, dtype=torch.float16))
    assert compare_values(powers, target_scheme).verdict is Verdict.EXACT
    assert torch.equal(
        dequantize_reference(convert(powers, target_scheme)), dequantize_reference(powers)
    )


@pytest.mark.parametrize("value", [1e5, 1e-9])
def test_a_scale_out_of_range_is_refused_even_if_inexact_is_allowed(value):
    tensor = random_tensor("int4:g64:sym:bf16", SHAPE)
    scales = tensor.parameters["scales"].clone()
    scales[0, 0] = value
    target_scheme = parse("int4:g64:sym:f16")
    assert compare_values(with_scales(tensor, scales), target_scheme).verdict is Verdict.IMPOSSIBLE
    with pytest.raises(RefusedError, match="outside of the range of f16"):
        convert(with_scales(tensor, scales), target_scheme, allow_inexact=True)


def test_a_minimum_out_of_range_is_refused_even_if_inexact_is_allowed():
    tensor = random_tensor("int4:g64:sym:f16", SHAPE)
    target_scheme, scales = (
        parse("int4:g64:min:f16"),
        torch.full_like(tensor.parameters["scales"], 2e4),
    )
    with pytest.raises(RefusedError, match=r"minimum of -1.6e.* outside of the range of f16"):
        convert(with_scales(tensor, scales), target_scheme, allow_inexact=True)


@pytest.mark.parametrize("text", ["fp8:row:sym:f32", "nf4:g64:sym:double"])
def test_float_and_codebook_scales_round_only_if_allowed(text):
    scheme = parse(text)
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    parameters = get_packer(scheme).fit(weight, scheme)
    codes = get_packer(scheme).encode(weight, parameters, scheme)
    tensor, target_scheme = (
        QuantizedTensor(codes, parameters, scheme),
        replace(scheme, scale=ScaleType.BF16),
    )
    fit = compare_values(tensor, target_scheme)
    assert fit.verdict is Verdict.INEXACT
    with pytest.raises(RefusedError, match="scales are not bf16 numbers"):
        convert(tensor, target_scheme)
    converted = convert(tensor, target_scheme, allow_inexact=True)
    assert converted.parameters["scales"].dtype is torch.bfloat16
    exact = convert(tensor, replace(scheme, scale=ScaleType.F32))
    assert torch.equal(exact.decode(), tensor.decode())


def test_constant_zero_points_convert_to_a_symmetric_grid():
    source = parse("int4:g64:asym:f16")
    target_scheme = parse("int4:g64:sym:f16")
    tensor = random_tensor(source, SHAPE)
    assert compare_values(tensor, target_scheme).verdict is Verdict.IMPOSSIBLE
    tensor.parameters["zeros"].fill_(8)
    restated = convert(tensor, target_scheme)
    assert restated.codes.dtype == torch.int8
    assert set(restated.parameters) == {"scales"}
    assert torch.equal(dequantize_reference(restated), dequantize_reference(tensor))
    back = convert(restated, source)
    assert torch.equal(back.codes, tensor.codes)
    assert torch.equal(back.parameters["zeros"], tensor.parameters["zeros"])


def test_unsupported_schemes_name_the_nearest():
    fit, _ = scheme_in_format(parse("int3:g128:sym:f16"), SHAPE, load_format("awq"), "F16")
    assert fit.verdict is Verdict.IMPOSSIBLE
    assert fit.nearest.startswith("int4:g128:sym")
    fit, _ = scheme_in_format(
        parse("int4:g1:sym:f16"), SHAPE, load_format("compressed-tensors"), "F16"
    )
    assert "desc_act" in fit.reason


@pytest.mark.parametrize("key", ["gptq", "gptq_v2", "compressed-tensors"])
def test_zero_scale_groups_convert_to_minima_and_back(key):
    scheme = parse("int4:g64:sym:f16")
    tensor = random_tensor(scheme, SHAPE)
    tensor.codes[3, 64:128], tensor.parameters["scales"][3, 1] = 0, 0
    converted = tensor
    for name in ("mlx", key):
        layout_format = load_format(name)
        target_scheme = layout_format.stored_scheme(scheme, SHAPE)
        packed = layout_format.pack(
            "m", convert(converted, target_scheme, layout_format.MIN_ZERO_POINT)
        )
        layout = ModuleLayout("m", LayerScheme(target_scheme), SHAPE, tuple(packed))
        converted = layout_format.unpack(layout, packed)
        assert torch.equal(converted.decode(), tensor.decode())


def test_converting_to_the_same_scheme_does_not_copy():
    tensor = random_tensor("int4:g64:sym:f16", SHAPE)
    assert convert(tensor, tensor.scheme) is tensor
    assert convert(tensor, replace(tensor.scheme, scale=ScaleType.F32)) is not tensor
