"""Unquantized checkpoints: bf16, f16 or f32 weights and no ``quantization_config``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quantforge.errors import RefusedError
from quantforge.files.safetensors import TORCH_NAMES
from quantforge.formats import KEEP, Compatibility, FormatInfo, ModuleLayout, Verdict
from quantforge.formats.configuration import (
    CASTABLE_DTYPES,
    config_json,
    model_dtype,
    quantization_config,
)
from quantforge.formats.engine_rules import Engine, engine_table
from quantforge.grids import ScaleType
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

KEY = "plain"
ENGINES = engine_table(
    transformers=Engine(),
    vllm=Engine(),
    sglang=Engine(),
    tensorrt_llm=Engine(),
    lmdeploy=Engine(),
    mlx=Engine(),
)
INFO = FormatInfo(engines=ENGINES)
MIN_ZERO_POINT = 0
DEFAULT_BITS = 16
_NO_CODES = "plain files hold no codes"
_HINT = "choose --format compressed-tensors, gptq or awq"


def default_scale_type(model_dtype: str) -> ScaleType:
    """Return the model's dtype; unused, because this format has no scales."""
    return ScaleType(model_dtype.lower())


def default_scheme(bits: int) -> str:
    """Return `KEEP` for 16 bits; raise `RefusedError` for any other width."""
    if bits == DEFAULT_BITS:
        return KEEP
    raise RefusedError(f"--bits {bits}: {_NO_CODES}", _HINT)


def check_layer(layer: LayerScheme, shape: tuple[int, int]) -> Compatibility:
    """Return IMPOSSIBLE: the format cannot store quantized weights."""
    del layer, shape
    return Compatibility(Verdict.IMPOSSIBLE, _NO_CODES)


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Compatibility:
    """Return EXACT if no layer is quantized."""
    return Compatibility(Verdict.IMPOSSIBLE, _NO_CODES) if layers else Compatibility(Verdict.EXACT)


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme unchanged."""
    del shape
    return scheme


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Raise `RefusedError`, because the format cannot store quantized weights."""
    raise RefusedError(f"{module}: {layer} of {shape[0]}x{shape[1]}: {_NO_CODES}", _HINT)


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Raise `RefusedError`, because the format cannot store quantized weights."""
    raise RefusedError(f"{module}: {tensor.scheme}: {_NO_CODES}", _HINT)


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Raise `RefusedError`, because `find_layouts` never finds a quantized linear."""
    raise RefusedError(f"{layout.module}: {len(tensors)} tensors: {_NO_CODES}", _HINT)


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``config.json`` without quantization; ``dtype`` is that of the weights if they were cast."""
    cast = {
        output.dtype
        for tensor in plan.tensors
        for output in tensor.outputs
        if tensor.dtype in CASTABLE_DTYPES and output.dtype != tensor.dtype
    }
    dtype = TORCH_NAMES[min(cast)] if cast else model_dtype(plan, config)
    return {"config.json": config_json(config, dtype)}


def is_declared(config: Mapping[str, Any]) -> bool:
    """Return whether the configuration declares no quantization."""
    return not quantization_config(config)


def find_layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    """Return an empty tuple: no module is quantized."""
    del config, tensors
    return ()
