"""bitsandbytes files as transformers serializes them: NF4 or FP4 blocks, or 8-bit rows.

For a linear ``P`` with weight ``[out, in]`` in 4 bits, groups of ``B`` (read: 64, 128 ... 4096):

====================================  ====  ================  ==========================================
``P.weight``                          U8    ``[out*in/2, 1]``  row-major; the even element in the high nibble
``P.weight.absmax``                   F32   ``[out*in/B]``     U8 with double quantization
``P.weight.quant_map``                F32   ``[16]``           the codebook
``P.weight.nested_absmax``            F32   ``[n/256]``        double quantization only, as the next
``P.weight.nested_quant_map``         F32   ``[256]``
``P.weight.quant_state.bitsandbytes__nf4``  U8  ``[bytes]``    JSON: type, blocksize, shape, offset
====================================  ====  ================  ==========================================

The JSON is padded with spaces, so that its length is known before the offset is. Its ``dtype`` is always bfloat16:
engines decode to that type. In 8 bits (LLM.int8()):

====================  ====  ==============  =======================================
``P.weight``          I8    ``[out, in]``
``P.SCB``             F32   ``[out]``       absolute maximum: 127 times the scale
``P.weight_format``   U8    ``[]``          0: by row
====================  ====  ==============  =======================================

Of LLM.int8() a file only says the threshold, once for the model. The headers of 4-bit files do not tell the shape of a
matrix; it is taken from the declarations of the architecture.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quantforge.errors import InputError, RefusedError
from quantforge.formats import Fit, ModuleLayout, Verdict
from quantforge.formats.checks import described, matrix, outside_blocks, possible, require, sound
from quantforge.formats.configuration import (
    config_json,
    declared_shape,
    model_dtype,
    quantization_config,
    quantized_modules,
    skipped,
)
from quantforge.formats.convert import convert
from quantforge.formats.engines import verdicts
from quantforge.planned import EngineVerdict, Plan, StoredTensor
from quantforge.scheme import (
    NESTED,
    Activation,
    LayerScheme,
    PerGroup,
    PerTensor,
    Row,
    ScaleType,
    Scheme,
)

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.tensor import QuantizedTensor

KEY = "bnb"
LEAST_ZERO = 0
METHOD = "bitsandbytes"
THRESHOLD = 6.0  # of transformers
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_STATE = ".weight.quant_state.bitsandbytes__"
_OFFSET_WIDTH = 24  # characters of the longest float


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
    """NF4 and FP4 in whole blocks within a row; int8 by row, whose input the engine quantizes by token."""
    scheme = native(layer.weight, shape)
    if scheme.grid in {"nf4", "fp4"}:
        return _check_blocks(scheme, layer.input, shape)
    if scheme.grid != "int8" or not scheme.symmetric:
        nearest = "int8:row:sym" if scheme.bits > 4 else "nf4:g64:sym"
        return Fit(Verdict.IMPOSSIBLE, "bitsandbytes holds nf4, fp4 and int8 by row", nearest)
    if not isinstance(scheme.granularity, Row):
        return Fit(Verdict.IMPOSSIBLE, "8-bit files have one scale per row", "int8:row:sym")
    known = {None, *(Activation("int8", "token", True, t) for t in (None, THRESHOLD))}
    if layer.input not in known:
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
    """One number type for the model, and no head or embedding."""
    if refusal := outside_blocks(layers):
        return refusal
    kinds = {(layer.weight.grid, layer.weight.scale) for layer, _ in layers.values()}
    if len(kinds) < 2:
        return Fit(Verdict.EXACT)
    shown = ", ".join(sorted(grid for grid, _ in kinds))
    return Fit(Verdict.IMPOSSIBLE, f"one number type for the whole model, not {shown}")


def native(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with float32 scales where they are open, and one per matrix as one per row."""
    del shape
    granularity = Row() if isinstance(scheme.granularity, PerTensor) else scheme.granularity
    return Scheme(scheme.grid, granularity, scheme.zero, scheme.scale or ScaleType.F32)


def stored(module: str, layer: LayerScheme, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
    """Announce the tensors of one module."""
    scheme, weight = native(layer.weight, shape), f"{module}.weight"
    if scheme.grid == "int8":
        return (
            StoredTensor(weight, "I8", shape),
            StoredTensor(f"{module}.SCB", "F32", (shape[0],)),
            StoredTensor(f"{module}.weight_format", "U8", ()),
        )
    blocks = shape[0] * scheme.groups(shape[1])
    double = scheme.scale is ScaleType.DOUBLE
    nested = (
        StoredTensor(f"{weight}.nested_absmax", "F32", (-(-blocks // NESTED),)),
        StoredTensor(f"{weight}.nested_quant_map", "F32", (256,)),
    )
    return (
        StoredTensor(weight, "U8", (shape[0] * shape[1] // 2, 1)),
        StoredTensor(f"{weight}.absmax", "U8" if double else "F32", (blocks,)),
        StoredTensor(f"{weight}.quant_map", "F32", (16,)),
        *(nested if double else ()),
        StoredTensor(module + _STATE + scheme.grid, "U8", (len(_state(scheme, shape, 0.0)),)),
    )


def _state(scheme: Scheme, shape: tuple[int, int], offset: float) -> bytes:
    """The JSON that says how to decode, as bitsandbytes words it."""
    document: dict[str, object] = {
        "quant_type": scheme.grid,
        "blocksize": scheme.group_size(shape[1]),
        "dtype": "bfloat16",
        "shape": list(shape),
    }
    if scheme.scale is not ScaleType.DOUBLE:
        return json.dumps(document).encode()
    document |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset}
    padding = _OFFSET_WIDTH - len(json.dumps(offset))
    return json.dumps(document).encode() + b" " * padding


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Lay out codes, scales and what describes them; see the module's tables."""
    scheme = native(tensor.scheme, tensor.shape)
    possible(module, check(LayerScheme(scheme, tensor.input), tensor.shape))
    tensor = convert(tensor, scheme)
    return _pack_rows(module, tensor) if scheme.grid == "int8" else _pack_blocks(module, tensor)


def _pack_blocks(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    import torch

    from quantforge.packers.nf4 import book, dynamic_map

    scheme, weight = tensor.scheme, f"{module}.weight"
    flat, parameters = tensor.codes.reshape(-1), tensor.parameters
    offset = parameters["offset"].item() if "offset" in parameters else 0.0
    state = bytearray(_state(scheme, tensor.shape, offset))
    packed = {
        weight: ((flat[::2] << 4) | flat[1::2]).unsqueeze(1),
        f"{weight}.absmax": parameters["scales"].flatten(),
        f"{weight}.quant_map": book(scheme.grid),
        module + _STATE + scheme.grid: torch.frombuffer(state, dtype=torch.uint8),
    }
    if scheme.scale is ScaleType.DOUBLE:
        packed[f"{weight}.nested_absmax"] = parameters["nested"].flatten()
        packed[f"{weight}.nested_quant_map"] = dynamic_map()
    return packed


def _pack_rows(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    import torch

    scales = tensor.parameters["scales"].flatten()
    ranges = scales * 127
    # The absolute maximum of half-precision weights, where it is one that gives the same scale.
    short = ranges.bfloat16().float()
    return {
        f"{module}.weight": tensor.codes,
        f"{module}.SCB": torch.where(short / 127 == scales, short, ranges),
        f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Read codes and parameters back."""
    from quantforge.tensor import QuantizedTensor as Quantized

    module, layer, shape = layout.module, layout.scheme, layout.shape
    if layer.weight.grid != "int8":
        return _unpack_blocks(layout, tensors)
    require(described(tensors), stored(module, layer, shape))
    if int(tensors[f"{module}.weight_format"]):
        raise InputError(f"{module}.weight_format: only 0 (by row) is read", tensor=module)
    parameters = {"scales": (tensors[f"{module}.SCB"] / 127).unsqueeze(1)}
    tensor = Quantized(tensors[f"{module}.weight"], parameters, layer.weight, layer.input)
    return sound(tensor, f"{module}.SCB")


def _unpack_blocks(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    import torch

    from quantforge.packers.nf4 import book, dynamic_map
    from quantforge.tensor import QuantizedTensor as Quantized

    module, scheme, shape = layout.module, layout.scheme.weight, layout.shape
    weight, name = f"{layout.module}.weight", layout.module + _STATE + layout.scheme.weight.grid
    expected = [item for item in stored(module, layout.scheme, shape) if item.name != name]
    require(described(tensors), expected)
    state = _read_state(name, tensors[name])
    stated = (state.get("quant_type"), state.get("blocksize"), state.get("shape"))
    wanted = (scheme.grid, scheme.group_size(shape[1]), list(shape))
    if stated != wanted:
        raise InputError(f"{name}: {stated}, the tensors say {wanted}", tensor=name)
    _same(f"{weight}.quant_map", tensors, book(scheme.grid))
    octets = tensors[weight].flatten()
    codes = torch.stack((octets >> 4, octets & 15), 1).view(shape)
    groups = scheme.parameter_shape(shape)
    parameters = {"scales": tensors[f"{weight}.absmax"].view(groups)}
    if scheme.scale is ScaleType.DOUBLE:
        _same(f"{weight}.nested_quant_map", tensors, dynamic_map())
        offset = state.get("nested_offset")
        if state.get("nested_blocksize") != NESTED or not isinstance(offset, int | float):
            raise InputError(f"{name}: nested blocks of {NESTED} are read", tensor=name)
        nested = tensors[f"{weight}.nested_absmax"]
        if not bool(nested.isfinite().all()):
            raise InputError(f"{weight}.nested_absmax: a scale inf or nan", tensor=weight)
        parameters["nested"] = nested.view(1, -1)
        parameters["offset"] = torch.tensor([[offset]], dtype=torch.float32)
    return sound(Quantized(codes, parameters, scheme), f"{weight}.absmax")


def _read_state(name: str, blob: Tensor) -> Mapping[str, Any]:
    try:
        found = json.loads(bytes(blob.tolist()))
    except ValueError as error:
        raise InputError(f"{name}: not JSON: {error}", tensor=name) from error
    if not isinstance(found, Mapping):
        raise InputError(f"{name}: not a JSON object", tensor=name)
    return found


def _same(name: str, tensors: Mapping[str, Tensor], expected: Tensor) -> None:
    if not bool((tensors[name] - expected).abs().max() < 1e-6):
        raise InputError(f"{name}: not the levels of its type", tensor=name)


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``config.json``, naming all linears that stay as they are."""
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
        "llm_int8_skip_modules": skipped(plan, config, modules),
        "llm_int8_threshold": THRESHOLD,
        "load_in_4bit": not eight,
        "load_in_8bit": eight,
        "quant_method": METHOD,
    }
    return {"config.json": config_json(config, model_dtype(plan, config), quantization)}


def claims(config: Mapping[str, Any]) -> bool:
    """Whether ``quant_method`` is bitsandbytes (or, in old files, only its options are there)."""
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
    skip = quantization_config(config).get("llm_int8_skip_modules")
    if isinstance(skip, list) and skip and "lm_head" not in " ".join(map(str, skip)):
        head = [name for name in tensors if name.endswith("lm_head.weight")]
        if any(tensors[name].dtype not in {"U8", "I8"} for name in head):
            raise InputError(
                f"config.json: llm_int8_skip_modules {skip[:4]} leaves lm_head out, which is not quantized",
                'transformers then quantizes it: add "lm_head" to the list',
            )
    found = [_rows(config, name.removesuffix(".SCB"), tensors)
             for name in tensors if name.endswith(".SCB")]  # fmt: skip
    for name in tensors:
        module, separator, grid = name.rpartition(_STATE)
        if separator:
            found.append(_blocks(config, module, grid, tensors))
    return found


def _rows(
    config: Mapping[str, Any], module: str, tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    threshold = quantization_config(config).get("llm_int8_threshold", THRESHOLD)
    activation = Activation("int8", "token", True, float(threshold) or None)
    layer = LayerScheme(Scheme("int8", Row(), scale=ScaleType.F32), activation)
    shape = matrix(tensors, f"{module}.weight")
    expected = stored(module, layer, shape)
    require(tensors, expected)
    return ModuleLayout(module, layer, shape, tuple(item.name for item in expected))


def _blocks(
    config: Mapping[str, Any], module: str, grid: str, tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    weight, name = f"{module}.weight", module + _STATE + grid
    octets, _ = matrix(tensors, weight)
    shape = declared_shape(config, module)
    absmax = tensors.get(f"{weight}.absmax")
    if shape is None or shape[0] * shape[1] != 2 * octets or absmax is None:
        raise InputError(
            f"{weight}: {2 * octets} packed weights, config.json asks for {shape}",
            "the shapes of 4-bit files are known for declared architectures only",
            tensor=weight,
        )
    size = 2 * octets // max(1, absmax.shape[0])
    if grid not in {"nf4", "fp4"} or size not in BLOCKSIZES or shape[1] % size:
        raise InputError(
            f"{weight}: {grid} in blocks of {size}, {shape[1]} columns",
            f"nf4 and fp4 in blocks of {', '.join(map(str, BLOCKSIZES))} that divide the columns are read",
            tensor=weight,
        )  # fmt: skip
    scale = ScaleType.DOUBLE if absmax.dtype == "U8" else ScaleType.F32
    layer = LayerScheme(Scheme(grid, PerGroup(size), scale=scale))
    expected = stored(module, layer, shape)
    require(tensors, [item for item in expected if item.name != name])
    return ModuleLayout(module, layer, shape, tuple(item.name for item in expected))


def engines(layers: Iterable[tuple[LayerScheme, tuple[int, int]]]) -> tuple[EngineVerdict, ...]:
    """Hugging Face transformers and SGLang load it; vLLM through a plugin."""
    return verdicts(KEY, layers)
