"""A toy format: codes of 8 bits and float32 scales, one scheme in the whole model, under names of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from quantforge.formats import Compatibility, FormatInfo, ModuleLayout, Verdict
from quantforge.formats.configuration import config_json, model_dtype
from quantforge.formats.convert import convert
from quantforge.formats.engine_rules import Engine, require_bits
from quantforge.grids import Row, ScaleType
from quantforge.notation import parse
from quantforge.packers.tensor import QuantizedTensor
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import LayerScheme, Scheme

KEY = "bytes-by-row"
SCHEME = "int8:row:sym:f32"
INFO = FormatInfo(
    engine_packages={"toy": "toys"},
    example_schemes=(SCHEME,),
    engines={
        "toy": Engine(layer_rules=(require_bits(8),)),
        "other": Engine(unsupported_reason="plays no toys"),
    },
    skip_list_key="left_out",
)
MIN_ZERO_POINT = 0
DEFAULT_BITS = 8


def default_scale_type(model_dtype: str) -> ScaleType:
    return ScaleType.F32


def default_scheme(bits: int) -> str:
    return SCHEME


def check_layer(layer: LayerScheme, shape: tuple[int, int]) -> Compatibility:
    plain = replace(layer.weight, scale=None) == Scheme("int8", Row()) and layer.input is None
    if plain or layer.weight.grid == "squares4":
        return Compatibility(Verdict.EXACT)
    return Compatibility(Verdict.IMPOSSIBLE, "bytes by row alone", SCHEME)


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Compatibility:
    return Compatibility(Verdict.EXACT)


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    return scheme.with_scale(ScaleType.F32)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    kind, size = "I8" if layer.weight.integer else "U8", layer.weight.parameter_shape(shape)
    return (
        StoredTensor(f"{module}.codes", kind, shape),
        StoredTensor(f"{module}.scale", "F32", size),
    )


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    tensor = convert(tensor, stored_scheme(tensor.scheme, tensor.shape))
    return {f"{module}.codes": tensor.codes, f"{module}.scale": tensor.parameters["scales"]}


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    scales = {"scales": tensors[f"{layout.module}.scale"]}
    return QuantizedTensor(tensors[f"{layout.module}.codes"], scales, layout.scheme.weight)


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    (scheme,) = {str(tensor.scheme) for tensor in plan.quantized()}
    stated = {"quant_method": KEY, "scheme": scheme, "left_out": []}
    return {"config.json": config_json(config, model_dtype(plan, config), stated)}


def is_declared(config: Mapping[str, Any]) -> bool:
    return bool(config.get("quantization_config", {}).get("quant_method") == KEY)


def find_layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    modules = [name.removesuffix(".codes") for name in tensors if name.endswith(".codes")]
    layer = LayerScheme(parse(config["quantization_config"]["scheme"]))
    return [
        ModuleLayout(module, layer, tensors[f"{module}.codes"].shape, (f"{module}.codes", f"{module}.scale"))
        for module in modules
    ]  # fmt: skip
