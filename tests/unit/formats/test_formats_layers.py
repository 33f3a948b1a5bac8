"""Every format announces the tensors it writes and reads back what it wrote."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.errors import InputError, RefusedError
from quantforge.formats import FORMATS, Verdict, detect_format, load_format
from quantforge.formats.read_checks import tensor_headers
from quantforge.notation import parse
from quantforge.scheme import LayerScheme, Scheme
from tests.quantized import (
    INTEGER_FORMATS,
    bit_equal,
    dequantize_reference,
    format_plan,
    quantized_plan,
    random_tensor,
    unquantized_plan,
)

SCHEMES = st.builds(
    "int{}:{}:{}:{}".format,
    st.sampled_from([2, 3, 4, 4, 4, 5, 6, 7, 8]),
    st.sampled_from(["g16", "g32", "g64", "g96", "row", "tensor"]),
    st.sampled_from(["sym", "asym"]),
    st.sampled_from(["f16", "bf16", "f32"]),
)


def stored_config(format_key, scheme, shape):
    """Return the configuration that the format writes for a model of one layer."""
    layer = quantized_plan(format_key, "model.layers.0.mlp.up_proj.weight", scheme, shape, 0)
    head = unquantized_plan("lm_head.weight", (8, 8))
    return json.loads(
        format_key.side_files(format_plan(format_key, [layer, head]), {})["config.json"]
    )


@pytest.mark.parametrize("key", INTEGER_FORMATS)
@settings(max_examples=60, deadline=None)
@given(scheme=SCHEMES, rows=st.integers(1, 10), columns=st.integers(1, 4), seed=st.integers(0, 99))
def test_packed_layers_match_announced_tensors_and_round_trip(key, scheme, rows, columns, seed):
    layout_format, target_scheme, shape = load_format(key), parse(scheme), (rows * 8, columns * 96)
    layer = LayerScheme(target_scheme)
    fit = layout_format.check_layer(layer, shape)
    if fit.verdict is Verdict.IMPOSSIBLE:
        assert fit.reason
        return
    tensor = random_tensor(target_scheme, shape, seed, least_zero=layout_format.MIN_ZERO_POINT)
    name = "model.layers.0.mlp.up_proj"
    packed = layout_format.pack(name, tensor)
    announced = {item.name: item for item in layout_format.packed_tensors(name, layer, shape)}
    assert tensor_headers(packed) == announced
    assert sum(item.nbytes for item in announced.values()) == sum(t.nbytes for t in packed.values())
    config = stored_config(layout_format, scheme, shape)
    detected = detect_format(config)
    assert key == detected.KEY
    (layout,) = layout_format.find_layouts(config, announced)
    assert (layout.module, layout.scheme.weight) == (
        name,
        layout_format.stored_scheme(target_scheme, shape),
    )
    assert set(layout.tensor_names) == set(announced)
    read = layout_format.unpack(layout, packed)
    assert torch.equal(dequantize_reference(read), dequantize_reference(tensor))
    assert read.shape == shape
    assert bit_equal(layout_format.unpack(layout, layout_format.pack(name, read)), read)
    if target_scheme == layout_format.stored_scheme(target_scheme, shape):
        assert bit_equal(read, tensor)


@pytest.mark.parametrize(
    ("key", "scheme", "shape", "reason", "nearest"),
    [
        ("gptq", "int5:g32:sym", (32, 64), "bits", "int8:g32:sym"),
        ("gptq", "int3:g16:sym", (32, 48), "do not fill 32-bit words", ""),
        ("gptq", "int4:g128:sym", (32, 96), "not a multiple of 128", "int4:g96:sym"),
        ("gptq", "int4:g32:sym:bf16", (32, 96), "stored as f16", "int4:g32:sym:f16"),
        ("awq", "int3:g32:asym", (32, 64), "4 bits", "int4:g32:asym"),
        ("awq", "int4:g32:asym", (12, 64), "multiple of 8", ""),
        ("awq", "int4:row:asym", (16, 48), "groups are needed", ""),
        ("awq", "int4:g32:sym:f32", (16, 64), "stored as f16", "int4:g32:sym:f16"),
        (
            "compressed-tensors",
            "int4:g128:asym",
            (32, 97),
            "not a multiple of 128",
            "int4:g97:asym",
        ),
        ("compressed-tensors", "int4:g1:sym", (32, 96), "desc_act", ""),
        ("plain", "int4:g32:sym", (32, 96), "no codes", ""),
    ],
)
def test_unsupported_layers_are_refused_with_reason_and_nearest(
    key, scheme, shape, reason, nearest
):
    layout_format = load_format(key)
    fit = layout_format.check_layer(LayerScheme(parse(scheme)), shape)
    assert fit.verdict is Verdict.IMPOSSIBLE
    assert reason in fit.reason
    assert fit.nearest == nearest
    if nearest:
        assert (
            layout_format.check_layer(LayerScheme(parse(nearest)), shape).verdict
            is not Verdict.IMPOSSIBLE
        )


@pytest.mark.parametrize("key", INTEGER_FORMATS)
def test_pack_refuses_layers_that_check_layer_refuses(key):
    with pytest.raises(RefusedError, match=r"a\.b: "):
        load_format(key).pack(
            "a.b", random_tensor(Scheme("int4", parse("int4:g1").granularity), (8, 32))
        )


def test_default_schemes_for_bits_per_format():
    assert {key: load_format(key).default_scheme(4) for key in INTEGER_FORMATS} == {
        "compressed-tensors": "int4:g128:sym",
        "gptq": "int4:g128:sym",
        "gptq_v2": "int4:g128:sym",
        "awq": "int4:g128:asym",
    }
    with pytest.raises(RefusedError, match="no codes"):
        load_format("plain").default_scheme(4)


def test_scale_types_follow_the_model_only_in_compressed_tensors():
    types = {key: load_format(key).default_scale_type("BF16").value for key in INTEGER_FORMATS}
    assert types == {"compressed-tensors": "bf16", "gptq": "f16", "gptq_v2": "f16", "awq": "f16"}


@pytest.mark.parametrize("key", ["gptq", "gptq_v2", "awq"])
def test_gptq_and_awq_need_one_group_size_and_no_head(key):
    layout_format = load_format(key)
    layer, other = LayerScheme(parse("int4:g32:sym")), LayerScheme(parse("int4:g64:asym"))
    blocks = {"model.layers.0.a": (layer, (64, 64)), "model.layers.1.a": (layer, (64, 64))}
    assert layout_format.check_model(blocks).verdict is Verdict.EXACT
    mixed = layout_format.check_model(blocks | {"model.layers.1.b": (other, (64, 64))})
    assert mixed.verdict is Verdict.IMPOSSIBLE
    assert "compressed-tensors" in mixed.nearest
    head = layout_format.check_model(blocks | {"lm_head": (layer, (64, 64))})
    assert head.verdict is Verdict.IMPOSSIBLE
    assert "lm_head" in head.reason


def test_compressed_tensors_mixes_schemes():
    layers = {
        "model.layers.0.a": (LayerScheme(parse("int4:g32:sym")), (64, 64)),
        "lm_head": (LayerScheme(parse("int8:row:asym")), (64, 64)),
    }
    assert load_format("compressed-tensors").check_model(layers).verdict is Verdict.EXACT


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({}, "plain"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"quant_method": "gptq", "format": "gptq_v2"}}, "gptq_v2"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ],
)
def test_a_configuration_is_detected_as_one_format(config, key):
    detected = detect_format(config)
    assert key == detected.KEY
    assert [name for name in FORMATS if load_format(name).is_declared(config)] == [key]


def test_an_unknown_method_is_an_input_error():
    with pytest.raises(InputError, match="quanto"):
        detect_format({"quantization_config": {"quant_method": "quanto"}})
