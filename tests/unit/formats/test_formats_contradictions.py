"""Configurations that contradict the tensors are refused by name; missing or correct values are read."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from quantforge.errors import InputError
from quantforge.formats import detect_format, load_format
from quantforge.formats.read_checks import tensor_headers
from quantforge.notation import parse
from quantforge.packers import get_packer
from quantforge.packers.tensor import QuantizedTensor
from quantforge.plans import StoredTensor
from quantforge.scheme import Activation
from tests.quantized import bit_equal

MODULE = "model.layers.0.self_attn.q_proj"
MODEL = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 1,
         "intermediate_size": 512, "vocab_size": 64, "num_key_value_heads": 2}  # fmt: skip
CONFIGS = {
    "mlx": {"bits": 4, "group_size": 64},
    "mlx-mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "bnb": {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
    "bnb-int8": {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "lm_head": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}  # fmt: skip
GRIDS = {"mlx": "int4:g64:min", "mlx-mxfp4": "mxfp4", "bnb": "nf4", "bnb-int8": "int8:row:sym:f32",
         "gptq": "int4:g64:sym", "awq": "int4:g64:sym", "fp8": "fp8:128x128"}  # fmt: skip

INPUTS = {"bnb-int8": Activation("int8", "token", True, 6.0), "fp8": Activation("fp8_e4m3", "g128")}


def _file(case: str) -> tuple[Any, dict[str, Any], dict[str, StoredTensor]]:
    """Return the format of a case, a correct configuration and the headers of a packed module and a head."""
    layout_format = load_format(case.partition("-")[0])
    scheme = parse(GRIDS[case])
    scheme = scheme.with_scale(layout_format.default_scale_type("BF16"))
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    parameters = get_packer(scheme).fit(weight, scheme)
    codes = get_packer(scheme).encode(weight, parameters, scheme)
    packed = layout_format.pack(
        MODULE, QuantizedTensor(codes, parameters, scheme, INPUTS.get(case))
    )
    headers = tensor_headers(packed) | {
        "lm_head.weight": StoredTensor("lm_head.weight", "BF16", (64, 256))
    }
    key = "quantization" if case.startswith("mlx") else "quantization_config"
    return layout_format, {**MODEL, key: deepcopy(CONFIGS[case])}, headers


WRONG = [
    ("mlx", {MODULE: False}, "is packed"),
    ("mlx", {MODULE: "no"}, "is packed"),
    ("mlx", {MODULE: {"bits": 8, "group_size": 64}}, MODULE),
    ("mlx", {"lm_head": True}, "has no scales"),
    ("mlx", {"lm_head": {"bits": 4, "group_size": 64}}, "has no scales"),
    ("mlx", {"mode": "mxfp4"}, MODULE),
    ("mlx-mxfp4", {"bits": 8}, "bits = 8"),
    ("mlx-mxfp4", {"group_size": 64}, "group_size = 64"),
    ("mlx-mxfp4", {"mode": "affine", "group_size": 32}, MODULE),
    ("bnb", {"load_in_8bit": True}, "load_in_8bit = True"),
    ("bnb", {"_load_in_8bit": True}, "_load_in_8bit = True"),
    ("bnb", {"load_in_4bit": False}, "load_in_4bit = False"),
    ("bnb", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type = 'fp4'"),
    ("bnb", {"bnb_4bit_use_double_quant": True}, "bnb_4bit_use_double_quant = True"),
    ("bnb", {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
    ("bnb", {"llm_int8_skip_modules": ["lm_head", "q_proj"]}, "names 'q_proj'"),
    ("bnb-int8", {"load_in_4bit": True}, "load_in_4bit = True"),
    ("bnb-int8", {"load_in_8bit": False}, "load_in_8bit = False"),
    ("gptq", {"lm_head": True}, "lm_head = True"),
    ("gptq", {"pack_dtype": "int16"}, "pack_dtype"),
    ("gptq", {"dynamic": {r"-:.*q_proj$": {}}}, "is packed"),
    ("awq", {"modules_to_not_convert": ["self_attn.q_proj"]}, "is packed"),
    ("awq", {"lm_head": True}, "lm_head = True"),
    ("fp8", {"modules_to_not_convert": ["lm_head", "q_proj"]}, "is packed"),
    ("fp8", {"fmt": "e5m2"}, "fmt = 'e5m2'"),
    ("fp8", {"activation_scheme": "none"}, "activation_scheme"),
    ("fp8", {"activation_scheme": "static"}, "activation_scale"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "values", "message"), WRONG)
def test_configurations_contradicting_the_tensors_are_refused(
    case: str, values: dict[str, object], message: str
) -> None:
    layout_format, config, headers = _file(case)
    assert [layout.module for layout in layout_format.find_layouts(config, headers)] == [MODULE]
    (key,) = config.keys() - MODEL.keys()
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        layout_format.find_layouts({**config, key: {**config[key], **values}}, headers)


@pytest.mark.parametrize("storage", ["uint8", "int8", "float16", "bfloat16", "float32", "float64"])
def test_bitsandbytes_storage_dtypes_are_read(storage: str) -> None:
    layout_format, scheme, weight = load_format("bnb"), parse("nf4:g64:sym:f32"), f"{MODULE}.weight"
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    parameters = get_packer(scheme).fit(matrix, scheme)
    tensor = QuantizedTensor(
        get_packer(scheme).encode(matrix, parameters, scheme), parameters, scheme
    )
    packed = layout_format.pack(MODULE, tensor)
    packed[weight] = packed[weight].view(-1).view(getattr(torch, storage)).unsqueeze(1)
    declaration = CONFIGS["bnb"] | {"bnb_4bit_quant_storage": storage}
    state = f"{MODULE}.weight.quant_state.bitsandbytes__nf4"
    headers = tensor_headers(packed)
    headers[state] = replace(headers[state], data=bytes(packed[state].tolist()))
    (layout,) = layout_format.find_layouts({**MODEL, "quantization_config": declaration}, headers)
    assert bit_equal(layout_format.unpack(layout, packed), tensor)


Q = f"{MODULE}."
REASONS: list[tuple[str, dict[str, Any], dict[str, str], str, str]] = [
    ("gptq", {}, {Q + "scales": ""}, "q_proj.scales: missing", "fetch it again"),
    ("gptq", {}, {Q + "scales": "F64"}, "scales in F64 are not read", "F16, BF16 and F32"),
    ("fp8", {"activation_scheme": ["static"]}, {}, "activation_scheme ['static']", "static and dynamic"),
    ("fp8", {}, {Q + "weight_scale_inv": Q + "weight_scale"}, "stored as", '"quant_method": "modelopt"'),
    ("bnb", {}, {Q + "weight.quant_state.bitsandbytes__nf4": ""}, "the type and the shape", "fetch it again"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "values", "edits", "cause", "hint"), REASONS)
def test_format_errors_name_cause_and_hint(
    case: str, values: dict[str, Any], edits: dict[str, str], cause: str, hint: str
) -> None:
    layout_format, config, headers = _file(case)
    for name, new in edits.items():
        header = headers.pop(name)
        if new.startswith(MODULE):
            headers[new] = replace(header, name=new)
        elif new:
            headers[name] = replace(header, dtype=new)
    declaration = {**config, "quantization_config": config["quantization_config"] | values}
    with pytest.raises(InputError) as refused:
        layout_format.find_layouts(declaration, headers)
    assert cause in refused.value.message
    assert hint in refused.value.hint


def test_per_tensor_fp8_is_read_after_following_the_hint() -> None:
    layout_format, config, headers = _file("fp8")
    name = f"{MODULE}.weight_scale_inv"
    headers[name] = replace(headers[name], shape=())
    declaration = {k: v for k, v in CONFIGS["fp8"].items() if k != "weight_block_size"}
    with pytest.raises(InputError, match="no weight_block_size") as refused:
        layout_format.find_layouts({**config, "quantization_config": declaration}, headers)
    assert '"weight_block_size": null' in refused.value.hint
    declaration["weight_block_size"] = None
    assert layout_format.find_layouts({**config, "quantization_config": declaration}, headers)


@pytest.mark.parametrize(
    "declaration", [{"checkpoint_format": "marlin"}, {"is_marlin_format": True}]
)
def test_marlin_gptq_layout_is_refused_by_name(declaration: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="checkpoint_format = 'marlin'") as refused:
        detect_format({"quantization_config": CONFIGS["gptq"] | declaration})
    assert "gptq_v2" in refused.value.hint


@pytest.mark.parametrize("case", CONFIGS)
def test_missing_or_null_options_are_accepted(case: str) -> None:
    layout_format, config, headers = _file(case)
    (key,) = config.keys() - MODEL.keys()
    options = ("lm_head", "pack_dtype", "fmt", "bnb_4bit_quant_storage", "llm_int8_skip_modules")
    unsaid = (
        {**config[key], **dict.fromkeys(options)} if not case.startswith("mlx") else config[key]
    )
    assert len(layout_format.find_layouts({**config, key: unsaid}, headers)) == 1


def test_mlx_declarations_must_be_identical() -> None:
    layout_format, config, headers = _file("mlx")
    both = config | {"quantization_config": config["quantization"]}
    assert len(layout_format.find_layouts(both, headers)) == 1
    with pytest.raises(InputError, match="quantization differs from quantization_config"):
        layout_format.find_layouts(
            config | {"quantization_config": {"bits": 8, "group_size": 64}}, headers
        )


def test_a_packed_head_that_the_configuration_denies_is_refused() -> None:
    layout_format, config, headers = _file("gptq")
    head = {
        name.replace(MODULE, "lm_head"): tensor
        for name, tensor in headers.items()
        if MODULE in name
    }
    packed = headers | {
        name: StoredTensor(name, tensor.dtype, tensor.shape) for name, tensor in head.items()
    }
    with pytest.raises(InputError, match="lm_head = False, but lm_head is packed"):
        layout_format.find_layouts(config, packed)
    config["quantization_config"]["lm_head"] = True
    assert len(layout_format.find_layouts(config, packed)) == 2
