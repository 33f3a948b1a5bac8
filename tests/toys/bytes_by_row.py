"""A toy format: 8-bit integers with one float32 scale per row, under names of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from quantforge.formats import About, Fit, ModuleLayout, Verdict
from quantforge.formats.configuration import config_json, model_dtype
from quantforge.formats.convert import convert
from quantforge.grids import Row, ScaleType
from quantforge.packers.tensor import QuantizedTensor
from quantforge.plans import EngineVerdict, Plan, StoredTensor
from quantforge.scheme import LayerScheme, Scheme, parse

KEY = "bytes-by-row"
SCHEME = "int8:row:sym:f32"
ABOUT = About(loading=("toy DIR",), specimens=(SCHEME,))
LEAST_ZERO = 0
OWN_BITS = 8


def scale_type(model_dtype: str) -> ScaleType:
    return ScaleType.F32


def default_scheme(bits: int) -> str:
    return SCHEME


def check(layer: LayerScheme, shape: tuple[int, int]) -> Fit:
    plain = replace(layer.weight, scale=None) == Scheme("int8", Row()) and layer.input is None
    return Fit(Verdict.EXACT) if plain else Fit(Verdict.IMPOSSIBLE, "bytes by row alone", SCHEME)


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Fit:
    return Fit(Verdict.EXACT)


def native(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    return scheme.stored_as(ScaleType.F32)


def stored(module: str, layer: LayerScheme, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
    return (
        StoredTensor(f"{module}.codes", "I8", shape),
        StoredTensor(f"{module}.scale", "F32", (shape[0], 1)),
    )


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    tensor = convert(tensor, native(tensor.scheme, tensor.shape))
    return {f"{module}.codes": tensor.codes, f"{module}.scale": tensor.parameters["scales"]}


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    scales = {"scales": tensors[f"{layout.module}.scale"]}
    return QuantizedTensor(tensors[f"{layout.module}.codes"], scales, layout.scheme.weight)


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    return {"config.json": config_json(config, model_dtype(plan, config), {"quant_method": KEY})}


def claims(config: Mapping[str, Any]) -> bool:
    return bool(config.get("quantization_config", {}).get("quant_method") == KEY)


def layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    modules = [name.removesuffix(".codes") for name in tensors if name.endswith(".codes")]
    layer = LayerScheme(parse(SCHEME))
    return [
        ModuleLayout(module, layer, tensors[f"{module}.codes"].shape, (f"{module}.codes", f"{module}.scale"))
        for module in modules
    ]  # fmt: skip


def engines(layers: Iterable[tuple[LayerScheme, tuple[int, int]]]) -> tuple[EngineVerdict, ...]:
    return ()
