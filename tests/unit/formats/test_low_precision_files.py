"""bitsandbytes, compressed-tensors, fp8 and MLX files round-trip, or are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quantforge.errors import InputError, RefusedError
from quantforge.files.safetensors import read_header
from quantforge.formats import ModuleLayout, Verdict, detect_format, load_format
from quantforge.formats.read_checks import tensor_headers
from quantforge.grids import ScaleType
from quantforge.model.statistics import Statistics
from quantforge.notation import parse, parse_layer
from quantforge.packers import get_packer
from quantforge.packers.tensor import QuantizedTensor
from quantforge.plans import Action, TensorPlan
from quantforge.quantizers import rtn
from quantforge.recipe import Rounding
from quantforge.scheme import LayerScheme
from tests.quantized import bit_equal, format_plan, unquantized_plan

# q_proj of this model has 256 rows and columns.
CONFIG = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 1,
          "intermediate_size": 512, "vocab_size": 64, "num_key_value_heads": 2, "dtype": "bfloat16"}  # fmt: skip
MODULE = "model.layers.0.self_attn.q_proj"
SHAPE = (256, 256)
WRITTEN = [
    ("bnb", "nf4"), ("bnb", "fp4:g128"), ("bnb", "nf4:g64:sym:double"), ("bnb", "LLM_INT8"),
    ("bnb", "int8:row:sym+int8:token:dynamic:6"), ("bnb", "int8:row:sym+int8:token:dynamic"), ("fp8", "FP8_BLOCK"),
    ("mlx", "int4:g64:min"), ("mlx", "int3:g32:min"), ("mlx", "mxfp4"), ("mlx", "mxfp8"),
    *(("compressed-tensors", text) for text in (
        "W8A8", "W8A8_STATIC", "fp8:row", "fp8:tensor", "fp8:128x128", "fp8:g64", "FP8_DYNAMIC", "FP8_STATIC",
        "FP8_BLOCK", "nvfp4", "NVFP4_W4A4", "mxfp4", "mxfp8", "int5:g64:asym")),
]  # fmt: skip


def quantized_tensor(
    layer: LayerScheme, scale: ScaleType, shape: tuple[int, int] = SHAPE
) -> QuantizedTensor:
    """Return a quantized random matrix, with an input scale for static activations."""
    scheme = layer.weight.with_scale(scale)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.03
    parameters = dict(get_packer(scheme).fit(weight, scheme))
    codes = get_packer(scheme).encode(weight, parameters, scheme)
    if layer.input is not None and not layer.input.dynamic:
        parameters["input_scale"] = torch.tensor([[0.03125]])
    if layer.input is not None and layer.input.max_outlier_columns:
        columns = torch.full((32,), -1, dtype=torch.int32)
        columns[:3] = torch.tensor([4, 9, 255])
        parameters |= {"outlier_columns": columns, "outlier_weight": weight[:, :32].half()}
    return QuantizedTensor(codes, parameters, scheme, layer.input)


def packed_module(key: str, text: str, shape: tuple[int, int] = SHAPE):
    """Return the format, its configuration, the packed tensors of a module, and their source."""
    layout_format, layer = load_format(key), parse_layer(text)
    tensor = quantized_tensor(layer, layout_format.default_scale_type("BF16"), shape)
    layer = LayerScheme(tensor.scheme, layer.input)
    stored = layout_format.packed_tensors(MODULE, layer, shape)
    plan = TensorPlan(f"{MODULE}.weight", "BF16", shape, Action.QUANTIZE, "", layer, stored, 0)
    packed = layout_format.pack(MODULE, tensor)
    files = layout_format.side_files(
        format_plan(layout_format, [plan, unquantized_plan("lm_head.weight", (64, 256))]), CONFIG
    )
    assert {item.name: item for item in stored} == tensor_headers(packed)
    return layout_format, json.loads(files["config.json"]), packed, tensor


def unpack_all(format_key, config, packed):
    """Unpack every module of a file; raise an error if there is none."""
    layouts = format_key.find_layouts(config, tensor_headers(packed))
    if not layouts:
        raise InputError(f"{MODULE}: no module is left")
    return [format_key.unpack(layout, packed) for layout in layouts]


@pytest.mark.parametrize(("key", "text"), WRITTEN)
def test_packed_low_precision_modules_round_trip(key, text):
    layout_format, config, packed, tensor = packed_module(key, text)
    assert layout_format.is_declared(config)
    (layout,) = layout_format.find_layouts(config, tensor_headers(packed))
    assert set(layout.tensor_names) == packed.keys()
    unpacked = layout_format.unpack(layout, packed)
    if key == "bnb" and tensor.scheme.integer:  # the range is stored, 127 times the scale
        tensor = replace(tensor, parameters=unpacked.parameters)
        assert (unpacked.decode() - tensor.decode()).abs().max() == 0
    assert bit_equal(unpacked, tensor) or torch.equal(unpacked.decode(), tensor.decode())
    assert unpacked.input == tensor.input
    assert torch.equal(unpacked.decode(), tensor.decode())


KINDS = [
    ("compressed-tensors", *(f"int{bits}:row:{zero}" for bits in (2, 3, 4, 5, 6, 7) for zero in ("sym", "asym")),
     "int3:g10:sym", "int4:g10:asym", "int4:g2:sym", "W8A8", "fp8:row", "fp8:128x128", "nvfp4", "mxfp4", "mxfp8"),
    ("gptq", *(f"int{bits}:{size}:{zero}:f16" for bits in (2, 3, 4, 8) for size in ("row", "g10")
               for zero in ("sym", "asym"))),
    ("gptq_v2", "int3:row:sym:f16", "int4:g10:asym:f16"),
    ("awq", "int4:g10:asym:f16", "int4:g32:sym:f16"),
    ("bnb", "nf4:g32", "fp4", "int8:row:sym+int8:token:dynamic"), ("fp8", "FP8_BLOCK"),
    ("mlx", "int3:g32:min", "int4:g64:min", "mxfp4"),
]  # fmt: skip


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: kinds[0])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_odd_shapes_round_trip_or_are_refused(kinds, data, tmp_path_factory):
    """The recorded shape decides if words or blocks do not determine the columns."""
    key, *texts = kinds
    text = data.draw(st.sampled_from(texts))
    size = st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 160, 1090]))
    shape = (data.draw(size), data.draw(size))
    layer, layout_format = parse_layer(text), load_format(key)
    layer = LayerScheme(
        layer.weight.with_scale(layout_format.default_scale_type("BF16")), layer.input
    )
    if layout_format.check_layer(layer, shape).verdict is Verdict.IMPOSSIBLE:
        return
    layout_format, config, packed, tensor = packed_module(key, text, shape)
    config |= {"model_type": "of no known family"}
    file = tmp_path_factory.mktemp("odd") / "model.safetensors"
    save_file({name: value.contiguous() for name, value in packed.items()}, file)
    headers = {name: entry.to_stored_tensor() for name, entry in read_header(file).items()}
    (layout,) = layout_format.find_layouts(config, headers)
    assert layout.shape == shape
    assert torch.equal(layout_format.unpack(layout, packed).decode(), tensor.decode())


def test_a_recorded_shape_contradicting_tensors_is_refused(tmp_path):
    layout_format, config, packed, _ = packed_module("compressed-tensors", "int4:row", (6, 30))
    file = tmp_path / "model.safetensors"
    for wrong in ([6, 33], [6, 24], [7, 30], [6, -1], [6, 2**62]):
        save_file(packed | {f"{MODULE}.weight_shape": torch.tensor(wrong)}, file)
        headers = {name: entry.to_stored_tensor() for name, entry in read_header(file).items()}
        with pytest.raises(InputError, match=f"weight_shape: {wrong[0]}x{wrong[1]}, but"):
            layout_format.find_layouts(config, headers)


@pytest.mark.parametrize(("key", "text"), WRITTEN)
def test_a_missing_tensor_is_named(key, text):
    layout_format, config, packed, _ = packed_module(key, text)
    (layout,) = layout_format.find_layouts(config, tensor_headers(packed))
    for name in packed:
        rest = {other: value for other, value in packed.items() if other != name}
        with pytest.raises(InputError) as caught:
            unpack_all(layout_format, config, rest)
        assert MODULE in caught.value.message
    assert layout.shape == SHAPE


@pytest.mark.parametrize(
    ("key", "text", "name", "message"),
    [
        ("compressed-tensors", "fp8:row", "weight_scale", "without"),
        ("compressed-tensors", "W8A8", "weight_scale", "without"),
        ("fp8", "FP8_BLOCK", "weight_scale_inv", "without"),
        ("compressed-tensors", "W8A8_STATIC", "input_scale", "missing"),
        ("bnb", "nf4", "weight.absmax", "packed weights"),
    ],
)
def test_codes_without_scales_are_refused(key, text, name, message):
    layout_format, config, packed, _ = packed_module(key, text)
    del packed[f"{MODULE}.{name}"]
    with pytest.raises(InputError, match=message):
        layout_format.find_layouts(config, tensor_headers(packed))


@pytest.mark.parametrize(
    ("key", "text"), [("compressed-tensors", "fp8:128x128"), ("fp8", "FP8_BLOCK")]
)
def test_scales_of_unexpected_shape_are_refused(key, text):
    layout_format, config, packed, _ = packed_module(key, text)
    name = next(name for name in packed if "scale" in name)
    packed[name] = packed[name][:1]
    with pytest.raises(InputError, match=name):
        layout_format.find_layouts(config, tensor_headers(packed))


@pytest.mark.parametrize(
    ("key", "text"), [*WRITTEN[:3], ("fp8", "FP8_BLOCK"), ("compressed-tensors", "fp8:row")]
)
def test_infinite_scales_are_refused(key, text):
    layout_format, config, packed, _ = packed_module(key, text)
    (layout,) = layout_format.find_layouts(config, tensor_headers(packed))
    name = next((name for name in packed if "nested_absmax" in name), None)
    name = name or next(name for name in packed if "absmax" in name or "scale" in name)
    packed[name] = packed[name].clone()
    packed[name].view(-1)[0] = float("inf")
    with pytest.raises(InputError, match="scale inf"):
        layout_format.unpack(layout, packed)


@pytest.mark.parametrize(
    ("key", "text", "name", "value", "message"),
    [
        ("mlx", "mxfp4", "scales", 255, "scale nan of row 0, group 0"),
        ("mlx", "mxfp8", "scales", 255, "scale nan of row 0, group 0"),
        ("mlx", "int4:g64:min", "biases", float("-inf"), "bias -inf of row 0, group 0"),
        ("compressed-tensors", "nvfp4", "weight_global_scale", 0.0, "no scale"),
        ("compressed-tensors", "nvfp4", "weight_global_scale", float("nan"), "no scale"),
    ],
)
def test_biases_and_global_scales_are_checked(key, text, name, value, message):
    layout_format, config, packed, _ = packed_module(key, text)
    name = f"{MODULE}.{name}"
    packed[name] = packed[name].clone()
    packed[name].view(-1)[0] = value
    with pytest.raises(InputError, match=message) as caught:
        unpack_all(layout_format, config, packed)
    assert caught.value.tensor == name


def test_a_config_group_contradicting_tensors_is_refused():
    layout_format, config, packed, _ = packed_module("compressed-tensors", "fp8:row")
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"] |= {"strategy": "block", "block_structure": [128, 128]}
    with pytest.raises(InputError, match="weight_scale"):
        layout_format.find_layouts(config, tensor_headers(packed))
    group["weights"] = {"num_bits": 8, "type": "int", "strategy": "channel"}
    with pytest.raises(InputError):
        layout_format.find_layouts(config, tensor_headers(packed))


@pytest.mark.parametrize(
    ("key", "text", "skip"),
    [
        ("bnb", "nf4", "llm_int8_skip_modules"),
        ("bnb", "LLM_INT8", "llm_int8_skip_modules"),
        ("fp8", "FP8_BLOCK", "modules_to_not_convert"),
    ],
)
def test_a_skip_list_without_the_head_is_refused(key, text, skip):
    layout_format, config, packed, _ = packed_module(key, text)
    assert config["quantization_config"][skip] == ["lm_head"]
    head = tensor_headers({"lm_head.weight": torch.zeros(64, 256, dtype=torch.bfloat16)})
    assert layout_format.find_layouts(config, tensor_headers(packed) | head)
    for skip_list in (None, []):  # engines then find the head by themselves
        config["quantization_config"][skip] = skip_list
        assert layout_format.find_layouts(config, tensor_headers(packed) | head)
    config["quantization_config"][skip] = ["o_proj"]
    with pytest.raises(InputError, match="lm_head"):
        layout_format.find_layouts(config, tensor_headers(packed) | head)


@pytest.mark.parametrize("method", ["hqq", "", 7, None])
def test_unknown_quant_methods_are_refused_with_known_ones(method):
    with pytest.raises(InputError) as caught:
        detect_format({"quantization_config": {"quant_method": method}})
    assert repr(method) in caught.value.message
    assert all(
        key in caught.value.hint for key in ("bitsandbytes", "compressed-tensors", "fp8", "gptq")
    )


@pytest.mark.parametrize(
    ("text", "scale"),
    [("int8:row:sym:f16", 1e9), ("int4:g64:sym:f16", 1e9), ("fp8:row:sym:f16", 1e9)],
)
def test_scales_that_overflow_their_type_are_refused(text, scale):
    scheme = parse(text)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * scale
    with pytest.raises(InputError, match="beyond the range"):
        rtn.round_matrices({"m": weight}, Statistics(), {"m": scheme}, Rounding(scales="absmax"))


@pytest.mark.parametrize("text", ["int8:row:sym:f16", "int4:g64:sym:f16", "fp8:row:sym:f16"])
def test_vanishing_scales_are_clamped_with_an_event(text):
    scheme = parse(text)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 1e-12
    rounded = rtn.round_matrices(
        {"m": weight}, Statistics(), {"m": scheme}, Rounding(scales="absmax")
    )
    decoded = rounded["m"].tensor.decode()
    assert bool(decoded.isfinite().all())
    lost = bool((~decoded.any(1)).any())
    assert [event.kind for event in rounded["m"].events] == (["scale-clamped"] if lost else [])
    assert lost


def test_bitsandbytes_quant_state_is_checked():
    layout_format, config, packed, _ = packed_module("bnb", "nf4:g64:sym:double")
    (layout,) = layout_format.find_layouts(config, tensor_headers(packed))
    name = next(name for name in packed if "quant_state" in name)
    state = json.loads(bytes(packed[name].tolist()))
    assert list(state) == ["quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype",
                           "nested_offset"]  # fmt: skip
    wrong = ({"shape": [512, 128]}, {"nested_offset": 1e39}, {"nested_offset": True})
    for text in (*(json.dumps(state | change) for change in wrong), "{", "[]"):
        packed[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        with pytest.raises(InputError, match="quant_state"):
            layout_format.unpack(layout, packed)


@pytest.mark.parametrize("columns", [[4, 256, -1], [9, 4, -1], [4, -1, 9], [4, 4, -1]])
def test_outlier_columns_must_be_ascending(columns):
    layout_format, config, packed, _ = packed_module("bnb", "LLM_INT8")
    (layout,) = layout_format.find_layouts(config, tensor_headers(packed))
    packed[f"{MODULE}.outlier_columns"][:3] = torch.tensor(columns)
    with pytest.raises(InputError, match="outlier_columns"):
        layout_format.unpack(layout, packed)


@pytest.mark.parametrize(
    ("recorded", "family", "message"),
    [
        ("[256,  256]", "of no known family", ""), ("[128,  512]", "llama", "asks for .256, 256."),
        ("[256]      ", "of no known family", "no shape of two sizes"), ("[0, 256]   ", "llama", "no shape of two"),
    ],
)  # fmt: skip
def test_a_4_bit_file_records_its_shape(tmp_path, recorded, family, message):
    layout_format, config, packed, _ = packed_module("bnb", "nf4")
    (state,) = [name for name in packed if "quant_state" in name]
    text = bytes(packed[state].tolist()).replace(b"[256, 256]", recorded.encode())
    packed[state] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    save_file(packed, file := tmp_path / "model.safetensors")
    headers = {name: entry.to_stored_tensor() for name, entry in read_header(file).items()}
    config |= {"model_type": family}
    if message:
        with pytest.raises(InputError, match=message):
            layout_format.find_layouts(config, headers)
        return
    (layout,) = layout_format.find_layouts(config, headers)
    assert layout.shape == SHAPE


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("bnb", "int4:g128:sym", "nf4"), ("bnb", "nf4:g96", "blocks of 96"), ("bnb", "int8:g128:sym", "per row"),
        ("fp8", "fp8:row", "tiles"), ("fp8", "fp8:64x64", "multiple"), ("mlx", "nf4", "no number of MLX"),
        ("mlx", "int7:g64:min", "no number"), ("mlx", "int4:g16:sym", "groups of"),
        ("compressed-tensors", "nf4", "no number"), ("compressed-tensors", "fp8_e5m2", "no number"),
        ("compressed-tensors", "int4:g128:sym+int8:token:dynamic", "inputs"),
        ("compressed-tensors", "int8:g128:sym+int8:token:dynamic", "one scale per row"),
        ("gptq", "nf4", "not integers"), ("awq", "fp8", "not integers"), ("gptq", "W8A8", "activations"),
    ],
)  # fmt: skip
def test_unsupported_schemes_are_refused_with_the_nearest(key, text, reason):
    layer = parse_layer(text)
    fit = load_format(key).check_layer(layer, SHAPE)
    assert fit.verdict is Verdict.IMPOSSIBLE
    assert reason in fit.reason
    if fit.nearest and " " not in fit.nearest:
        assert parse_layer(fit.nearest)


@pytest.mark.parametrize(
    ("first", "other", "reason"),
    [
        ("nf4", "nf4", ""), ("nf4", "nf4:g64:sym:f32", ""),
        ("nf4", "fp4", "not fp4 with scales of f32, nf4 with scales of f32"),
        ("nf4", "nf4:g64:sym:double", "not nf4 with scales of double, nf4 with scales of f32"),
        ("LLM_INT8", "int8:row:sym+int8:token:dynamic", "not 0, 6"), ("LLM_INT8", "int8:row:sym", ""),
    ],
)  # fmt: skip
def test_bitsandbytes_models_have_one_type_and_threshold(first, other, reason):
    layers = {f"model.layers.0.{text}": (parse_layer(text), SHAPE) for text in (first, other)}
    fit = load_format("bnb").check_model(layers)
    assert fit.verdict is (Verdict.IMPOSSIBLE if reason else Verdict.EXACT)
    assert reason in fit.reason
    with pytest.raises(RefusedError, match="4 and 8 bits"):
        load_format("bnb").default_scheme(3)


def test_mixed_precision_names_the_format_of_each_group():
    layout_format = load_format("compressed-tensors")
    plans = []
    for index, text in enumerate(("int4:g128:sym:bf16", "W8A8", "fp8:row")):
        layer = parse_layer(text)
        layer = LayerScheme(layer.weight.with_scale(ScaleType.BF16), layer.input)
        name = f"model.layers.{index}.mlp.up_proj"
        stored = layout_format.packed_tensors(name, layer, SHAPE)
        plans.append(
            TensorPlan(f"{name}.weight", "BF16", SHAPE, Action.QUANTIZE, "", layer, stored, index)
        )
    declaration = json.loads(
        layout_format.side_files(format_plan(layout_format, plans), CONFIG)["config.json"]
    )["quantization_config"]
    assert declaration["format"] == "mixed-precision"
    groups = declaration["config_groups"].values()
    assert [group["format"] for group in groups] == [
        "pack-quantized",
        "int-quantized",
        "float-quantized",
    ]
    assert [bool(group["input_activations"]) for group in groups] == [False, True, False]


def test_configurations_validate_with_compressed_tensors():
    quantization = pytest.importorskip("compressed_tensors.quantization")
    for key, text in WRITTEN:
        if key == "compressed-tensors":
            _, config, _, _ = packed_module(key, text)
            quantization.QuantizationConfig.model_validate(config["quantization_config"])


@pytest.mark.parametrize(
    "text", ["nvfp4", "mxfp4", "mxfp8", "fp8:row", "fp8:tensor", "fp8:128x128", "W8A8"]
)
def test_compressed_tensors_decodes_the_same_weights(text):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    layout_format, config, packed, tensor = packed_module("compressed-tensors", text)
    group = config["quantization_config"]["config_groups"]["group_0"]
    scheme = quantization.QuantizationScheme.model_validate(group)
    state = {name.removeprefix(f"{MODULE}."): value for name, value in packed.items()}
    compressor = compressors.BaseCompressor.get_value_from_registry(group["format"])
    weight = compressor.decompress(state, scheme)["weight"]
    assert torch.equal(weight.to(torch.bfloat16), tensor.decode(torch.bfloat16))
    assert isinstance(layout_format.unpack(ModuleLayout(MODULE, LayerScheme(tensor.scheme, tensor.input), SHAPE,
                                               tuple(packed)), packed), QuantizedTensor)  # fmt: skip
