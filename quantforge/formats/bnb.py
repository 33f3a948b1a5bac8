"""bitsandbytes files as transformers serializes them: NF4 or FP4 blocks, or 8-bit rows (LLM.int8()).

How one module is stored is in `quantforge.formats.bnb_layouts`. Of LLM.int8() the configuration says the threshold
only, once for the model; the columns that calibration kept in 16 bits lie beside the 8-bit ones, where bitsandbytes
does not look. The shape of a 4-bit matrix is not in the headers; the declarations of the architecture have it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantforge.errors import InputError, RefusedError
from quantforge.formats import About, Fit, ModuleLayout, Verdict, bnb_layouts
from quantforge.formats.bnb_layouts import (
    STATE,
    STORAGE,
    as_bytes,
    native,
    recorded_shape,
    stored,
    unpack,
)
from quantforge.formats.configuration import (
    config_json,
    declared_shape,
    model_dtype,
    quantization_config,
    quantized_modules,
)
from quantforge.formats.contradictions import agree, not_excepted
from quantforge.formats.convert import convert
from quantforge.formats.engines import UNTRIED, Engine, by_engine
from quantforge.formats.fits import outside_blocks, possible
from quantforge.formats.headers import matrix, refuse_open_head, require
from quantforge.formats.kept_experts import skipped_with_mixtures
from quantforge.grids import PerGroup, Row, ScaleType
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import Activation, LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

__all__ = ["KEY", "LEAST_ZERO", "OWN_BITS", "check", "check_model", "claims", "default_scheme",
           "layouts", "native", "pack", "scale_type", "side_files", "stored", "unpack"]  # fmt: skip

KEY = "bnb"
_JOINED = "its loader joins the matrices of experts into one tensor, which packed ones of bitsandbytes cannot be"
_UNREAD = Engine(never="does not read bitsandbytes")


def _no_expert_bytes(layer: LayerScheme) -> str:
    return "its plugin (0.0.3) has no experts in 8 bits" if layer.weight.integer else ""


ENGINES = by_engine(
    transformers=Engine(note="through bitsandbytes", experts=_JOINED, unrolls=True),
    vllm=Engine(
        note="through vllm-bnb-plugin (since vLLM 0.28)",
        packed_experts=_no_expert_bytes,
        kept_experts="its plugin (0.0.3) takes all experts for packed ones",
    ),
    sglang=Engine(note=UNTRIED),
    tensorrt_llm=_UNREAD,
    lmdeploy=_UNREAD,
    mlx=_UNREAD,
)
ABOUT = About(
    packages={"transformers": "bitsandbytes", "vllm": "vllm-bnb-plugin", "sglang": "bitsandbytes"},
    specimens=(
        "nf4:g64:sym:f32", "nf4:g64:sym:double", "fp4:g64:sym:f32", "int8:row:sym:f32+int8:token:dynamic:6",
    ),
    engines=ENGINES,
    exceptions="llm_int8_skip_modules",
)  # fmt: skip
LEAST_ZERO = 0
OWN_BITS = 4
METHOD = "bitsandbytes"
THRESHOLD = 6.0  # of transformers
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def scale_type(model_dtype: str) -> ScaleType:
    """Return float32, whatever the model is."""
    del model_dtype
    return ScaleType.F32


def default_scheme(bits: int) -> str:
    """Return NF4 for 4 bits and rows of 8-bit integers for 8."""
    if bits in {4, 8}:
        return "nf4:g64:sym" if bits == 4 else "int8:row:sym"
    raise RefusedError(f"--bits {bits}: bitsandbytes has 4 and 8 bits", "--bits 4")


def check(layer: LayerScheme, shape: tuple[int, int]) -> Fit:
    """Judge a weight: NF4 and FP4 in whole blocks within a row; int8 by row, inputs by token or as they are."""
    scheme = native(layer.weight, shape)
    if scheme.grid in {"nf4", "fp4"}:
        return _check_blocks(scheme, layer.input, shape)
    if scheme.grid != "int8" or not scheme.symmetric:
        nearest = "int8:row:sym" if scheme.weight_bits > 4 else "nf4:g64:sym"
        return Fit(Verdict.IMPOSSIBLE, "bitsandbytes holds nf4, fp4 and int8 by row", nearest)
    if not isinstance(scheme.granularity, Row):
        return Fit(Verdict.IMPOSSIBLE, "8-bit files have one scale per row", "int8:row:sym")
    known = {None, *(Activation("int8", "token", True, t) for t in (None, THRESHOLD))}
    if layer.input is not None and replace(layer.input, kept=0) not in known:
        return Fit(Verdict.IMPOSSIBLE, f"inputs are not quantized as {layer.input}", "LLM_INT8")
    return _float32(scheme)


def _check_blocks(scheme: Scheme, activation: Activation | None, shape: tuple[int, int]) -> Fit:
    size = scheme.group_size(shape[1])
    if activation is not None:
        return Fit(Verdict.IMPOSSIBLE, "inputs stay as they are in 4 bits", str(scheme))
    if size not in BLOCKSIZES:
        return Fit(Verdict.IMPOSSIBLE, f"blocks of {size} weights", f"{scheme.grid}:g64:sym")
    if shape[1] % size or shape[0] * shape[1] % 2:
        return Fit(Verdict.IMPOSSIBLE, f"{shape[1]} columns are not a multiple of {size}")
    return Fit(Verdict.EXACT) if scheme.scale is ScaleType.DOUBLE else _float32(scheme)


def _float32(scheme: Scheme) -> Fit:
    if scheme.scale in {None, ScaleType.F32}:
        return Fit(Verdict.EXACT)
    text = f"{scheme.grid}:{scheme.granularity}:{scheme.zero}:f32"
    return Fit(Verdict.IMPOSSIBLE, f"scales are stored as f32, not {scheme.scale}", text)


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Fit:
    """Judge a model: one grid and type of scales, one threshold of inputs, and no head or embedding."""
    if refusal := outside_blocks(layers):
        return refusal
    weights = (native(layer.weight, shape) for layer, shape in layers.values())
    kinds = {f"{weight.grid} with scales of {weight.scale}" for weight in weights}
    inputs = {f"{threshold:g}" for threshold in _thresholds(layer for layer, _ in layers.values())}
    for what, found in (("number type", kinds), ("threshold of inputs (0: none)", inputs)):
        if len(found) > 1:
            return Fit(Verdict.IMPOSSIBLE, f"one {what} in a model, not {', '.join(sorted(found))}")
    return Fit(Verdict.EXACT)


def _thresholds(layers: Iterable[LayerScheme]) -> set[float]:
    """Return the thresholds as configurations say them: 0 where no column of an input is left out."""
    return {layer.input.threshold or 0.0 for layer in layers if layer.input is not None}


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Lay out a module as `stored` announced."""
    scheme = native(tensor.scheme, tensor.shape)
    possible(module, check(LayerScheme(scheme, tensor.input), tensor.shape))
    return bnb_layouts.pack(module, convert(tensor, scheme))


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``config.json``, naming all linears that stay; 8-bit inputs are always rounded, by default below 6."""
    eight = bool(found := quantized_modules(plan, ".SCB"))
    modules = found or quantized_modules(plan, ".weight.absmax")
    schemes = [tensor.scheme for tensor in modules.values() if tensor.scheme is not None]
    if not schemes:
        raise RefusedError("nothing is quantized", "choose --format plain")
    scheme = native(schemes[0].weight, (0, 0))
    quantization = {
        "_load_in_4bit": not eight,
        "_load_in_8bit": eight,
        "bnb_4bit_compute_dtype": model_dtype(plan, config),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "fp4" if eight else scheme.grid,
        "bnb_4bit_use_double_quant": scheme.scale is ScaleType.DOUBLE,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        ABOUT.exceptions: skipped_with_mixtures(plan, config, modules),
        "llm_int8_threshold": next(iter(_thresholds(schemes)), THRESHOLD),
        "load_in_4bit": not eight,
        "load_in_8bit": eight,
        "quant_method": METHOD,
    }
    return {"config.json": config_json(config, model_dtype(plan, config), quantization)}


def claims(config: Mapping[str, Any]) -> bool:
    """Return whether ``quant_method`` is bitsandbytes (or, in old files, only its options are there)."""
    found = quantization_config(config)
    method = found.get("quant_method")
    return method == METHOD or (method is None and bool(found.keys() & {"load_in_4bit"}))


def layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    """Return the linears with a quantization state, or with row maxima.

    Raises:
        InputError: tensors are missing, or disagree with each other or with the architecture.
    """
    quantization = quantization_config(config)
    refuse_open_head(quantization, ABOUT.exceptions, tensors)
    described = {name.partition(STATE)[0] for name in tensors if STATE in name}
    for name in tensors:
        module = name.removesuffix(".weight.absmax")
        if module != name and module not in described:
            raise InputError(
                f"{module}{STATE}*: missing, the type and the shape of packed weights",
                "the checkpoint is damaged: fetch it again",
                tensor=name,
            )
    found = [_rows(config, name.removesuffix(".SCB"), tensors)
             for name in tensors if name.endswith(".SCB")]  # fmt: skip
    states = (name.rpartition(STATE) for name in tensors if STATE in name)
    found += [_blocks(config, module, grid, tensors) for module, _, grid in states]
    if found:
        _agree(quantization, found, tensors)
    return found


def _agree(
    config: Mapping[str, Any],
    found: Sequence[ModuleLayout],
    tensors: Mapping[str, StoredTensor],
) -> None:
    """Raise `InputError` for options that deny what the tensors hold."""
    for bits in (8, 4):
        actual = any(layout.scheme.weight.bits == bits for layout in found)
        for key in (f"load_in_{bits}bit", f"_load_in_{bits}bit"):
            agree(config, key, actual, f"{'some' if actual else 'no'} modules are of {bits} bits")
    for layout in found:
        scheme = layout.scheme.weight
        if scheme.bits == 4:
            what = f"{layout.module} is {scheme}"
            agree(config, "bnb_4bit_quant_type", scheme.grid, what)
            agree(config, "bnb_4bit_use_double_quant", scheme.scale is ScaleType.DOUBLE, what)
            storage, _ = STORAGE[tensors[f"{layout.module}.weight"].dtype]
            agree(
                config, "bnb_4bit_quant_storage", storage, f"{layout.module} is stored as {storage}"
            )
    not_excepted(config, ABOUT.exceptions, [layout.module for layout in found])


def _rows(
    config: Mapping[str, Any], module: str, tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    threshold = quantization_config(config).get("llm_int8_threshold", THRESHOLD)
    both = (tensors.get(f"{module}.{key}") for key in ("outlier_columns", "outlier_weight"))
    kept = max((found.shape[-1] for found in both if found and found.shape), default=0)
    activation = Activation("int8", "token", True, float(threshold) or None, kept)
    layer = LayerScheme(Scheme("int8", Row(), scale=ScaleType.F32), activation)
    shape = matrix(tensors, f"{module}.weight")
    expected = stored(module, layer, shape)
    require(tensors, expected)
    return ModuleLayout(module, layer, shape, tuple(item.name for item in expected))


def _blocks(
    config: Mapping[str, Any], module: str, grid: str, tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    weight, name = f"{module}.weight", module + STATE + grid
    matrix(tensors, weight)
    packed = as_bytes(tensors[weight])
    octets = packed.shape[0]
    declared = declared_shape(config, module)
    shape = recorded_shape(tensors[name]) if tensors[name].data else declared
    if shape is None:
        raise InputError(
            f"{name}: no shape of two sizes, and config.json does not determine it",
            "the checkpoint is damaged, or the weight is not a matrix", tensor=name,
        )  # fmt: skip
    if shape[0] * shape[1] != 2 * octets or declared not in {None, shape}:
        raise InputError(
            f"{weight}: {2 * octets} packed weights, recorded as {shape}, config.json asks for {declared or shape}",
            "config.json and the tensors disagree",
            tensor=weight,
        )
    absmax = tensors.get(f"{weight}.absmax")
    if absmax is None:
        raise InputError(
            f"{weight}.absmax: missing, the scales of {2 * octets} packed weights",
            "the checkpoint is damaged: fetch it again",
            tensor=weight,
        )
    size = 2 * octets // max(1, math.prod(absmax.shape))
    if grid not in {"nf4", "fp4"} or size not in BLOCKSIZES or shape[1] % size:
        raise InputError(
            f"{weight}: {grid} in blocks of {size}, {shape[1]} columns",
            f"nf4 and fp4 in blocks of {', '.join(map(str, BLOCKSIZES))} that divide the columns are read",
            tensor=weight,
        )  # fmt: skip
    scale = ScaleType.DOUBLE if absmax.dtype == "U8" else ScaleType.F32
    layer = LayerScheme(Scheme(grid, PerGroup(size), scale=scale))
    expected = stored(module, layer, shape)
    require({**tensors, weight: packed}, [item for item in expected if item.name != name])
    return ModuleLayout(module, layer, shape, tuple(item.name for item in expected))
