"""Files with invalid values or headers are refused, naming the tensor at fault."""

import pytest
import torch

from quantforge.errors import InputError
from quantforge.formats import ModuleLayout, load_format
from quantforge.formats.read_checks import tensor_headers
from quantforge.grids import PerGroup, Zero
from quantforge.packers.bits import pack_rows
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import LayerScheme, Scheme
from tests.quantized import dequantize_reference, random_tensor
from tests.thorough import parametrize_each_value

SCHEMES = [
    ("compressed-tensors", "int3:g32:sym"), ("compressed-tensors", "int4:g32:asym"),
    ("gptq", "int4:g32:sym"), ("gptq_v2", "int3:g32:asym"), ("awq", "int4:g32:asym"),
]  # fmt: skip
SCALES = {"compressed-tensors": "m.weight_scale"}


def packed_module(key, scheme, shape=(32, 64)):
    layout_format = load_format(key)
    tensor = random_tensor(scheme, shape, least_zero=layout_format.MIN_ZERO_POINT)
    packed = layout_format.pack("m", tensor)
    return (
        layout_format,
        ModuleLayout("m", LayerScheme(tensor.scheme), shape, tuple(packed)),
        packed,
        tensor,
    )


def position(key, row, group):
    return (row, group) if key == "compressed-tensors" else (group, row)


@parametrize_each_value(
    ("key, scheme", SCHEMES),
    ("value", [float("nan"), float("inf"), float("-inf")]),
)
def test_non_finite_scales_are_refused(key, scheme, value):
    layout_format, layout, packed, _ = packed_module(key, scheme)
    name = SCALES.get(key, "m.scales")
    layout_format.unpack(layout, packed)
    packed[name][position(key, 7, 1)] = value
    with pytest.raises(InputError, match="row 7, group 1") as caught:
        layout_format.unpack(layout, packed)
    assert caught.value.tensor == name


@pytest.mark.parametrize(("key", "scheme"), SCHEMES)
def test_a_zero_scale_is_legal_for_zeros_only(key, scheme):
    layout_format, layout, packed, tensor = packed_module(key, scheme)
    packed[SCALES.get(key, "m.scales")][position(key, 5, 1)] = 0
    with pytest.raises(InputError, match="scale 0 for non-zero codes in row 5, group 1"):
        layout_format.unpack(layout, packed)
    codes = tensor.codes.clone()
    codes[5, 32:] = tensor.parameters["zeros"][5, 1] if "zeros" in tensor.parameters else 0
    scales = tensor.parameters["scales"].clone()
    scales[5, 1] = 0
    empty = QuantizedTensor(codes, {**tensor.parameters, "scales": scales}, tensor.scheme)
    assert (
        layout_format.unpack(layout, layout_format.pack("m", empty)).codes[5, 32:].unique().numel()
        == 1
    )


@pytest.mark.parametrize(("key", "scheme"), SCHEMES)
def test_a_missing_or_misshapen_tensor_is_refused(key, scheme):
    layout_format, layout, packed, _ = packed_module(key, scheme)
    for name in packed:
        rest = {other: value for other, value in packed.items() if other != name}
        with pytest.raises(InputError) as caught:
            layout_format.unpack(layout, rest)
        assert caught.value.tensor == name
        with pytest.raises(InputError) as caught:
            layout_format.unpack(layout, packed | {name: packed[name][:-1]})
        assert caught.value.tensor == name
        with pytest.raises(InputError) as caught:
            layout_format.unpack(layout, packed | {name: packed[name].to(torch.int16)})
        assert caught.value.tensor == name


def test_gptq_refuses_the_ambiguous_zero_point():
    layout_format, layout, packed, tensor = packed_module("gptq", "int4:g32:asym")
    stored = tensor.parameters["zeros"].T.contiguous() - 1
    stored[1, 3] = 15
    packed["m.qzeros"] = pack_rows(stored, 4)
    with pytest.raises(InputError, match="stored zero point of 15") as caught:
        layout_format.unpack(layout, packed)
    assert caught.value.tensor == "m.qzeros"


@pytest.mark.parametrize("key", ["gptq", "gptq_v2", "awq"])
def test_different_zero_points_in_symmetric_files_are_refused(key):
    layout_format, layout, packed, _ = packed_module(key, "int4:g32:sym")
    packed["m.qzeros"][0, 0] ^= 1
    with pytest.raises(InputError, match="zero points differ") as caught:
        layout_format.unpack(layout, packed)
    assert caught.value.tensor == "m.qzeros"


def test_compressed_tensors_refuses_a_contradicting_weight_shape():
    layout_format, layout, packed, _ = packed_module("compressed-tensors", "int4:row:sym", (32, 60))
    assert layout_format.unpack(layout, packed).shape == (32, 60)
    for shape in ([32, 64 + 8], [31, 60], [32, 0], [32, -60]):
        wrong = packed | {"m.weight_shape": torch.tensor(shape)}
        with pytest.raises(InputError, match="weight_shape"):
            layout_format.unpack(layout, wrong)


def gptq_config(**values):
    base = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    return {"quantization_config": base | values}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits": 5}, "bits = 5"),
        ({"bits": "4"}, "bits = '4'"),
        ({"group_size": None}, "group_size = None"),
        ({"group_size": 48}, "groups of 48"),
        ({"group_size": 16}, "qzeros"),
        ({"dynamic": {"+:(": {"bits": 8}}}, "no regular expression"),
    ],
)
def test_gptq_refuses_configurations_contradicting_the_headers(values, message):
    layout_format, _, packed, _ = packed_module("gptq", "int4:g32:sym")
    assert len(layout_format.find_layouts(gptq_config(), tensor_headers(packed))) == 1
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        layout_format.find_layouts(gptq_config(**values), tensor_headers(packed))


def test_gptq_rules_override_a_module():
    layout_format, _, packed, tensor = packed_module("gptq", "int8:row:sym")
    rules = {"-:other": {}, r"+:m$": {"bits": 8, "group_size": -1}}
    (layout,) = layout_format.find_layouts(gptq_config(dynamic=rules), tensor_headers(packed))
    assert torch.equal(
        dequantize_reference(layout_format.unpack(layout, packed)), dequantize_reference(tensor)
    )


@pytest.mark.parametrize(
    "values",
    [{"version": "gemv"}, {"version": "gemm", "bits": 3}, {"version": "GEMM", "group_size": "x"}],
)
def test_awq_refuses_other_layouts(values):
    layout_format, _, packed, _ = packed_module("awq", "int4:g32:asym")
    base = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    assert layout_format.find_layouts({"quantization_config": base}, tensor_headers(packed))
    with pytest.raises(InputError, match="AWQ with version"):
        layout_format.find_layouts({"quantization_config": base | values}, tensor_headers(packed))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"targets": ["Linear"], "weights": {"num_bits": 9}}, "9 bits"),
        ({"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}, "float"),
        ({"targets": ["Linear"], "weights": None}, "not read"),
        ({"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "block"}}, "block"),
        ({"targets": ["Linear"], "weights": {}, "format": "float-quantized"}, "float-quantized"),
        (
            {"targets": ["Linear"], "weights": {}, "input_activations": {"num_bits": 5}},
            "activations of 5 bits",
        ),
        ({"targets": ["other"], "weights": {"num_bits": 4, "group_size": 32}}, "no config group"),
        ({"targets": ["re:(a+)+$"], "weights": {"num_bits": 4}}, "repetition inside"),
        ({"targets": ["re:("], "weights": {"num_bits": 4, "group_size": 32}}, "regular expression"),
        ({"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}, "m.weight_packed"),
    ],
)
def test_compressed_tensors_refuses_other_configurations(group, message):
    layout_format, _, packed, _ = packed_module("compressed-tensors", "int4:g32:sym")
    declaration = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": group},
    }
    with pytest.raises(InputError, match=message):
        layout_format.find_layouts({"quantization_config": declaration}, tensor_headers(packed))


def test_compressed_tensors_prefers_a_name_to_a_pattern_to_a_class():
    layout_format, _, packed, _ = packed_module("compressed-tensors", "int4:g32:sym")
    right = {"num_bits": 4, "group_size": 32, "strategy": "group"}
    wrong = {"num_bits": 8, "group_size": 16, "strategy": "group"}
    for better, worse in (("m", "re:m"), ("re:.*", "Linear"), ("m", "Linear")):
        groups = {
            "a": {"targets": [worse], "weights": wrong},
            "b": {"targets": [better], "weights": right},
        }
        declaration = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups,
        }
        (layout,) = layout_format.find_layouts(
            {"quantization_config": declaration}, tensor_headers(packed)
        )
        assert str(layout.scheme) == "int4:g32:sym:f16"


def test_desc_act_groups_are_read_but_not_stored():
    layout_format, layout, packed, tensor = packed_module("gptq", "int4:g32:asym")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    index = torch.empty(64, dtype=torch.int32)
    index[order] = torch.arange(64, dtype=torch.int32) // 32
    read = layout_format.unpack(layout, packed | {"m.g_idx": index})
    expected = (
        tensor.codes.float() - tensor.parameters["zeros"][:, index.long()].float()
    ) * tensor.parameters["scales"][:, index.long()].float()
    assert torch.equal(dequantize_reference(read), expected)
    assert read.scheme == Scheme("int4", PerGroup(1), Zero.INT, tensor.scheme.scale)
    assert "desc_act" in layout_format.check_layer(LayerScheme(read.scheme), (32, 64)).reason
    for wrong in (-1, 2):
        index[3] = wrong
        with pytest.raises(InputError, match="group number"):
            layout_format.unpack(layout, packed | {"m.g_idx": index})


def test_gptq_files_without_g_idx_have_consecutive_groups():
    layout_format, _, packed, tensor = packed_module("gptq", "int4:g32:sym")
    del packed["m.g_idx"]
    (layout,) = layout_format.find_layouts(gptq_config(), tensor_headers(packed))
    assert torch.equal(
        dequantize_reference(layout_format.unpack(layout, packed)), dequantize_reference(tensor)
    )


@pytest.mark.parametrize("strategy", ["channel", None])
@pytest.mark.parametrize("size", [None, -1])
def test_compressed_tensors_spellings_of_one_scale_per_row(strategy, size):
    layout_format, _, packed, tensor = packed_module("compressed-tensors", "int4:row:sym")
    weights = {"num_bits": 4, "strategy": strategy, "group_size": size}
    declaration = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }
    (layout,) = layout_format.find_layouts(
        {"quantization_config": declaration}, tensor_headers(packed)
    )
    assert str(layout.scheme) == "int4:row:sym:f16"
    assert torch.equal(
        dequantize_reference(layout_format.unpack(layout, packed)), dequantize_reference(tensor)
    )


def test_compressed_tensors_refuses_transform_config():
    layout_format, _, packed, _ = packed_module("compressed-tensors", "int4:row:sym")
    declaration = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
        "transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": []}}},
    }
    with pytest.raises(InputError, match="transform_config"):
        layout_format.find_layouts({"quantization_config": declaration}, tensor_headers(packed))
