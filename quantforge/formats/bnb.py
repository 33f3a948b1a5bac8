"""bitsandbytes files as transformers serializes them: NF4 or FP4 blocks, or 8-bit rows (LLM.int8()).

A linear ``P`` ``[out, in]``: in 4 bits, blocks of ``B`` weights (32, 64 ... 4096), ``n = out*in/B`` of them:

====================================  ====  ================  ==========================================
``P.weight``                          U8    ``[out*in/2, 1]``  row-major; the even element in the high nibble
``P.weight.absmax``                   F32   ``[n]``            U8 with double quantization
``P.weight.quant_map``                F32   ``[16]``           the codebook
``P.weight.nested_absmax``            F32   ``[ceil(n/256)]``  double quantization only, as the next
``P.weight.nested_quant_map``         F32   ``[256]``
``P.weight.quant_state.bitsandbytes__nf4``  U8  ``[bytes]``    JSON: type, blocksize, shape, offset
====================================  ====  ================  ==========================================

``P.weight`` may hold the same bytes in elements of another type (`STORAGE_DTYPES`): ``bnb_4bit_quant_storage``, which
sharded training sets to the model's dtype. We write U8.

The JSON is padded with spaces, so that its length is known before the offset is. Its ``dtype`` is always bfloat16:
engines decode to that type. In 8 bits (LLM.int8()):

======================  ====  ==============  =======================================
``P.weight``            I8    ``[out, in]``
``P.SCB``               F32   ``[out]``       absolute maximum: 127 times the scale
``P.weight_format``     U8    ``[]``          0: by row
``P.outlier_columns``   I32   ``[k]``         ours: columns of which the 16 bits are kept, rising, then -1
``P.outlier_weight``    F16   ``[out, k]``    ours: these columns; zeros behind a -1
======================  ====  ==============  =======================================

The last two are no part of bitsandbytes' layout: its readers pass over them, and take these columns from ``P.weight``,
where they are too.

Of LLM.int8() the configuration says the threshold only, once for the model. The shape of a 4-bit matrix is not in the
headers; the declarations of the architecture have it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantforge.errors import InputError, RefusedError
from quantforge.files.opener import parse_object
from quantforge.formats import Compatibility, FormatInfo, ModuleLayout, Verdict
from quantforge.formats.configuration import (
    config_json,
    linear_shape,
    model_dtype,
    quantization_config,
    quantized_modules,
    skip_list_with_experts,
)
from quantforge.formats.convert import convert
from quantforge.formats.engine_rules import NOT_RUN, Engine, engine_table
from quantforge.formats.read_checks import (
    check_config_value,
    check_not_in_skip_list,
    matrix_shape,
    require_finite,
    require_head_in_skip_list,
    require_headers,
    require_valid_scales,
    tensor_headers,
)
from quantforge.formats.refusal_reasons import check_inside_blocks, require_possible
from quantforge.grids import DOUBLE_QUANT_GROUP, PerGroup, PerTensor, Row, ScaleType
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import Activation, LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

KEY = "bnb"
_JOINS_EXPERTS = "its loader joins the matrices of experts into one tensor, which packed ones of bitsandbytes cannot be"
_UNSUPPORTED = Engine(unsupported_reason="does not read bitsandbytes")


def _no_int8_experts(layer: LayerScheme) -> str:
    return "its plugin (0.0.3) has no experts in 8 bits" if layer.weight.integer else ""


ENGINES = engine_table(
    transformers=Engine(
        note="through bitsandbytes",
        unstacked_experts_reason=_JOINS_EXPERTS,
        loads_unstacked_experts=True,
    ),
    vllm=Engine(
        note="through vllm-bnb-plugin (since vLLM 0.28)",
        expert_rule=_no_int8_experts,
        unquantized_experts_reason="its plugin (0.0.3) takes all experts for packed ones",
    ),
    sglang=Engine(note=NOT_RUN),
    tensorrt_llm=_UNSUPPORTED,
    lmdeploy=_UNSUPPORTED,
    mlx=_UNSUPPORTED,
)
INFO = FormatInfo(
    engine_packages={
        "transformers": "bitsandbytes",
        "vllm": "vllm-bnb-plugin",
        "sglang": "bitsandbytes",
    },
    example_schemes=(
        "nf4:g64:sym:f32",
        "nf4:g64:sym:double",
        "fp4:g64:sym:f32",
        "int8:row:sym:f32+int8:token:dynamic:6",
    ),
    engines=ENGINES,
    skip_list_key="llm_int8_skip_modules",
)
MIN_ZERO_POINT = 0
DEFAULT_BITS = 4
QUANT_METHOD = "bitsandbytes"
DEFAULT_THRESHOLD = 6.0  # of transformers
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
STATE_SUFFIX = ".weight.quant_state.bitsandbytes__"
# Types of ``bnb_4bit_quant_storage`` as headers name them: name in configurations, bytes of an element.
STORAGE_DTYPES: Mapping[str, tuple[str, int]] = {
    "U8": ("uint8", 1), "I8": ("int8", 1), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "F32": ("float32", 4),
    "F64": ("float64", 8),
}  # fmt: skip
_MAX_STATE_BYTES = 1 << 16
_OFFSET_WIDTH = 24  # characters of the longest float


def default_scale_type(model_dtype: str) -> ScaleType:
    """Return float32, whatever the model's dtype."""
    del model_dtype
    return ScaleType.F32


def default_scheme(bits: int) -> str:
    """Return NF4 for 4 bits, int8 with one scale per row for 8 bits."""
    if bits in {4, 8}:
        return "nf4:g64:sym" if bits == 4 else "int8:row:sym"
    raise RefusedError(f"--bits {bits}: bitsandbytes has 4 and 8 bits", "--bits 4")


def check_layer(layer: LayerScheme, shape: tuple[int, int]) -> Compatibility:
    """Check a weight: NF4 or FP4 in blocks within a row, or int8 per row with inputs per token or unquantized."""
    scheme = stored_scheme(layer.weight, shape)
    if scheme.grid in {"nf4", "fp4"}:
        return _check_blocks(scheme, layer.input, shape)
    if scheme.grid != "int8" or not scheme.symmetric:
        nearest = "int8:row:sym" if scheme.weight_bits > 4 else "nf4:g64:sym"
        return Compatibility(
            Verdict.IMPOSSIBLE, "bitsandbytes holds nf4, fp4 and int8 by row", nearest
        )
    if not isinstance(scheme.granularity, Row):
        return Compatibility(
            Verdict.IMPOSSIBLE, "8-bit files have one scale per row", "int8:row:sym"
        )
    supported_inputs = {
        None,
        *(Activation("int8", "token", True, t) for t in (None, DEFAULT_THRESHOLD)),
    }
    if (
        layer.input is not None
        and replace(layer.input, max_outlier_columns=0) not in supported_inputs
    ):
        return Compatibility(
            Verdict.IMPOSSIBLE, f"inputs are not quantized as {layer.input}", "LLM_INT8"
        )
    return _check_float32_scales(scheme)


def _check_blocks(
    scheme: Scheme, activation: Activation | None, shape: tuple[int, int]
) -> Compatibility:
    size = scheme.group_size(shape[1])
    if activation is not None:
        return Compatibility(Verdict.IMPOSSIBLE, "inputs stay as they are in 4 bits", str(scheme))
    if size not in BLOCKSIZES:
        return Compatibility(
            Verdict.IMPOSSIBLE, f"blocks of {size} weights", f"{scheme.grid}:g64:sym"
        )
    if shape[1] % size or shape[0] * shape[1] % 2:
        return Compatibility(Verdict.IMPOSSIBLE, f"{shape[1]} columns are not a multiple of {size}")
    return (
        Compatibility(Verdict.EXACT)
        if scheme.scale is ScaleType.DOUBLE
        else _check_float32_scales(scheme)
    )


def _check_float32_scales(scheme: Scheme) -> Compatibility:
    if scheme.scale in {None, ScaleType.F32}:
        return Compatibility(Verdict.EXACT)
    text = f"{scheme.grid}:{scheme.granularity}:{scheme.zero}:f32"
    return Compatibility(Verdict.IMPOSSIBLE, f"scales are stored as f32, not {scheme.scale}", text)


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Compatibility:
    """Check a model: one grid, scale type and outlier threshold; no quantized head or embedding."""
    if refusal := check_inside_blocks(layers):
        return refusal
    weights = (stored_scheme(layer.weight, shape) for layer, shape in layers.values())
    kinds = {f"{weight.grid} with scales of {weight.scale}" for weight in weights}
    inputs = {f"{threshold:g}" for threshold in _thresholds(layer for layer, _ in layers.values())}
    for property_name, values in (
        ("number type", kinds),
        ("threshold of inputs (0: none)", inputs),
    ):
        if len(values) > 1:
            return Compatibility(
                Verdict.IMPOSSIBLE,
                f"one {property_name} in a model, not {', '.join(sorted(values))}",
            )
    return Compatibility(Verdict.EXACT)


def _thresholds(layers: Iterable[LayerScheme]) -> set[float]:
    """Return the outlier thresholds of the inputs, 0 if no column is handled in 16 bits."""
    return {layer.input.threshold or 0.0 for layer in layers if layer.input is not None}


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with float32 scales unless it has others; one scale per matrix becomes one per row."""
    del shape
    granularity = Row() if isinstance(scheme.granularity, PerTensor) else scheme.granularity
    return Scheme(scheme.grid, granularity, scheme.zero, scheme.scale or ScaleType.F32)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Return the headers of the stored tensors of one module."""
    scheme, weight = stored_scheme(layer.weight, shape), f"{module}.weight"
    if scheme.grid == "int8":
        outlier_columns = min(layer.input.max_outlier_columns, shape[1]) if layer.input else 0
        columns = (
            StoredTensor(f"{module}.outlier_columns", "I32", (outlier_columns,)),
            StoredTensor(f"{module}.outlier_weight", "F16", (shape[0], outlier_columns)),
        )
        return (
            StoredTensor(weight, "I8", shape),
            StoredTensor(f"{module}.SCB", "F32", (shape[0],)),
            StoredTensor(f"{module}.weight_format", "U8", ()),
            *(columns if outlier_columns else ()),
        )
    blocks = shape[0] * scheme.groups(shape[1])
    double = scheme.scale is ScaleType.DOUBLE
    nested_tensors = (
        StoredTensor(f"{weight}.nested_absmax", "F32", (-(-blocks // DOUBLE_QUANT_GROUP),)),
        StoredTensor(f"{weight}.nested_quant_map", "F32", (256,)),
    )
    return (
        StoredTensor(weight, "U8", (shape[0] * shape[1] // 2, 1)),
        StoredTensor(f"{weight}.absmax", "U8" if double else "F32", (blocks,)),
        StoredTensor(f"{weight}.quant_map", "F32", (16,)),
        *(nested_tensors if double else ()),
        StoredTensor(
            module + STATE_SUFFIX + scheme.grid, "U8", (len(_state_json(scheme, shape, 0.0)),)
        ),
    )


def _state_json(scheme: Scheme, shape: tuple[int, int], offset: float) -> bytes:
    """Return the quantization state of a weight as JSON, as bitsandbytes stores it."""
    document: dict[str, object] = {
        "quant_type": scheme.grid,
        "blocksize": scheme.group_size(shape[1]),
        "dtype": "bfloat16",
        "shape": list(shape),
    }
    if scheme.scale is not ScaleType.DOUBLE:
        return json.dumps(document).encode()
    document |= {
        "nested_blocksize": DOUBLE_QUANT_GROUP,
        "nested_dtype": "float32",
        "nested_offset": offset,
    }
    padding = _OFFSET_WIDTH - len(json.dumps(offset))
    return json.dumps(document).encode() + b" " * padding


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Pack a module into the tensors that `packed_tensors` describes."""
    scheme = stored_scheme(tensor.scheme, tensor.shape)
    require_possible(module, check_layer(LayerScheme(scheme, tensor.input), tensor.shape))
    tensor = convert(tensor, scheme)
    return _pack_rows(module, tensor) if scheme.integer else _pack_blocks(module, tensor)


def _pack_blocks(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    import torch

    from quantforge.packers.nf4 import codebook, dynamic_map

    scheme, weight = tensor.scheme, f"{module}.weight"
    flat, parameters = tensor.codes.reshape(-1), tensor.parameters
    offset = parameters["offset"].item() if "offset" in parameters else 0.0
    state = bytearray(_state_json(scheme, tensor.shape, offset))
    packed = {
        weight: ((flat[::2] << 4) | flat[1::2]).unsqueeze(1),
        f"{weight}.absmax": parameters["scales"].flatten(),
        f"{weight}.quant_map": codebook(scheme.grid),
        module + STATE_SUFFIX + scheme.grid: torch.frombuffer(state, dtype=torch.uint8),
    }
    if scheme.scale is ScaleType.DOUBLE:
        packed[f"{weight}.nested_absmax"] = parameters["nested"].flatten()
        packed[f"{weight}.nested_quant_map"] = dynamic_map()
    return packed


def _pack_rows(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    import torch

    from quantforge.packers.tensor import OUTLIER_PARAMS

    scales = tensor.parameters["scales"].flatten()
    ranges = scales * 127
    # The absolute maximum of half-precision weights, where it is one that gives the same scale.
    bfloat16_ranges = ranges.bfloat16().float()
    tensors = {
        f"{module}.{key}": tensor.parameters[key]
        for key in OUTLIER_PARAMS
        if key in tensor.parameters
    }
    return tensors | {
        f"{module}.weight": tensor.codes,
        f"{module}.SCB": torch.where(bfloat16_ranges / 127 == scales, bfloat16_ranges, ranges),
        f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Unpack codes and parameters."""
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, layer, shape = layout.module, layout.scheme, layout.shape
    if layer.weight.grid != "int8":
        return _unpack_blocks(layout, tensors)
    require_headers(tensor_headers(tensors), packed_tensors(module, layer, shape))
    if int(tensors[f"{module}.weight_format"]):
        raise InputError(f"{module}.weight_format: only 0 (by row) is read", tensor=module)
    parameters = {"scales": (tensors[f"{module}.SCB"] / 127).unsqueeze(1)}
    parameters |= _read_outlier_columns(module, shape, tensors)
    tensor = Quantized(tensors[f"{module}.weight"], parameters, layer.weight, layer.input)
    return require_valid_scales(tensor, f"{module}.SCB")


def _read_outlier_columns(
    module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Read and check the columns that are kept in 16 bits."""
    import torch

    name = f"{module}.outlier_columns"
    if name not in tensors:
        return {}
    columns, weight = tensors[name], tensors[f"{module}.outlier_weight"]
    used_columns = columns[columns >= 0]
    padded = torch.nn.functional.pad(used_columns, (0, len(columns) - len(used_columns)), value=-1)
    rising = bool((used_columns[1:] > used_columns[:-1]).all()) and bool(
        (used_columns < shape[1]).all()
    )
    if not rising or not torch.equal(padded, columns):
        raise InputError(
            f"{name}: {columns.tolist()[:8]} are not rising columns of {shape[1]}, then -1",
            "the checkpoint is damaged",
            tensor=name,
        )
    return {"outlier_columns": columns, "outlier_weight": weight}


def _unpack_blocks(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    import torch

    from quantforge.packers.nf4 import codebook, dequantize_scales, dynamic_map
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, scheme, shape = layout.module, layout.scheme.weight, layout.shape
    weight, name = (
        f"{layout.module}.weight",
        layout.module + STATE_SUFFIX + layout.scheme.weight.grid,
    )
    expected = [item for item in packed_tensors(module, layout.scheme, shape) if item.name != name]
    headers = tensor_headers(tensors)
    if weight in headers:
        headers[weight] = _as_uint8_header(headers[weight])
    require_headers(headers, expected)
    state = _read_state(name, tensors[name])
    recorded = (state.get("quant_type"), state.get("blocksize"), state.get("shape"))
    planned = (scheme.grid, scheme.group_size(shape[1]), list(shape))
    if recorded != planned:
        keys = ("quant_type", "blocksize", "shape")
        raise InputError(
            f"{name}: "
            + " and ".join(
                f"{key} = {declared!r}, but the tensors are of {actual!r}"
                for key, declared, actual in zip(keys, recorded, planned, strict=True)
                if declared != actual
            ),
            "the checkpoint is damaged: fetch it again",
            tensor=name,
        )
    _require_codebook(f"{weight}.quant_map", tensors, codebook(scheme.grid))
    octets = tensors[weight].flatten().view(torch.uint8)
    codes = torch.stack((octets >> 4, octets & 15), 1).view(shape)
    groups = scheme.parameter_shape(shape)
    parameters = {"scales": tensors[f"{weight}.absmax"].view(groups)}
    if scheme.scale is ScaleType.DOUBLE:
        _require_codebook(f"{weight}.nested_quant_map", tensors, dynamic_map())
        offset = state.get("nested_offset")
        if state.get("nested_blocksize") != DOUBLE_QUANT_GROUP or type(offset) not in {int, float}:
            size = state.get("nested_blocksize")
            raise InputError(
                f"{name}: nested_blocksize = {size!r}, nested_offset = {offset!r}",
                f"blocks of {DOUBLE_QUANT_GROUP} and an offset that is a number are read",
                tensor=name,
            )
        nested_absmax = tensors[f"{weight}.nested_absmax"].view(1, -1)
        parameters["nested"] = require_finite(f"{weight}.nested_absmax", nested_absmax)
        parameters["offset"] = torch.tensor([[offset]], dtype=torch.float32)
        require_finite(name, parameters["offset"], "nested_offset")
        require_finite(
            f"{weight}.absmax", dequantize_scales(parameters)
        )  # the sum may be beyond float32
    return require_valid_scales(Quantized(codes, parameters, scheme), f"{weight}.absmax")


def _read_state(name: str, blob: Tensor) -> Mapping[str, Any]:
    if blob.numel() > _MAX_STATE_BYTES:
        raise InputError(f"{name}: {blob.numel()} bytes, more than {_MAX_STATE_BYTES}", tensor=name)
    return parse_object(bytes(blob.tolist()), name)


def _require_codebook(name: str, tensors: Mapping[str, Tensor], expected: Tensor) -> None:
    if not bool((tensors[name] - expected).abs().max() < 1e-6):
        raise InputError(
            f"{name}: not the levels of its type",
            "a codebook of its own is not read: quantize again from the original model",
            tensor=name,
        )


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``config.json`` with the list of unquantized linears and, for int8, the outlier threshold."""
    eight = bool(names := quantized_modules(plan, ".SCB"))
    modules = names or quantized_modules(plan, ".weight.absmax")
    schemes = [tensor.scheme for tensor in modules.values() if tensor.scheme is not None]
    if not schemes:
        raise RefusedError("nothing is quantized", "choose --format plain")
    scheme = stored_scheme(schemes[0].weight, (0, 0))
    quantization = {
        "_load_in_4bit": not eight,
        "_load_in_8bit": eight,
        "bnb_4bit_compute_dtype": model_dtype(plan, config),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "fp4" if eight else scheme.grid,
        "bnb_4bit_use_double_quant": scheme.scale is ScaleType.DOUBLE,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        INFO.skip_list_key: skip_list_with_experts(plan, config, modules),
        "llm_int8_threshold": next(iter(_thresholds(schemes)), DEFAULT_THRESHOLD),
        "load_in_4bit": not eight,
        "load_in_8bit": eight,
        "quant_method": QUANT_METHOD,
    }
    return {"config.json": config_json(config, model_dtype(plan, config), quantization)}


def is_declared(config: Mapping[str, Any]) -> bool:
    """Return whether ``quant_method`` is bitsandbytes, or missing with ``load_in_4bit`` present (old files)."""
    declaration = quantization_config(config)
    method = declaration.get("quant_method")
    return method == QUANT_METHOD or (
        method is None and bool(declaration.keys() & {"load_in_4bit"})
    )


def find_layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    """Return the linears that have a quantization state (4 bits) or row maxima (8 bits).

    Raises:
        InputError: tensors are missing, or disagree with each other or with the architecture.
    """
    quantization = quantization_config(config)
    require_head_in_skip_list(quantization, INFO.skip_list_key, tensors)
    described = {name.partition(STATE_SUFFIX)[0] for name in tensors if STATE_SUFFIX in name}
    for name in tensors:
        module = name.removesuffix(".weight.absmax")
        if module != name and module not in described:
            raise InputError(
                f"{module}{STATE_SUFFIX}*: missing, the type and the shape of packed weights",
                "the checkpoint is damaged: fetch it again",
                tensor=name,
            )
    layouts = [
        _int8_layout(config, name.removesuffix(".SCB"), tensors)
        for name in tensors
        if name.endswith(".SCB")
    ]
    state_names = (name.rpartition(STATE_SUFFIX) for name in tensors if STATE_SUFFIX in name)
    layouts += [_block_layout(config, module, grid, tensors) for module, _, grid in state_names]
    if layouts:
        _check_options(quantization, layouts, tensors)
    return layouts


def _check_options(
    config: Mapping[str, Any],
    layouts: Sequence[ModuleLayout],
    tensors: Mapping[str, StoredTensor],
) -> None:
    """Raise `InputError` if the configuration contradicts the tensors."""
    for bits in (8, 4):
        actual = any(layout.scheme.weight.bits == bits for layout in layouts)
        for key in (f"load_in_{bits}bit", f"_load_in_{bits}bit"):
            check_config_value(
                config, key, actual, f"{'some' if actual else 'no'} modules are of {bits} bits"
            )
    for layout in layouts:
        scheme = layout.scheme.weight
        if scheme.bits == 4:
            layer_text = f"{layout.module} is {scheme}"
            check_config_value(config, "bnb_4bit_quant_type", scheme.grid, layer_text)
            check_config_value(
                config, "bnb_4bit_use_double_quant", scheme.scale is ScaleType.DOUBLE, layer_text
            )
            storage, _ = STORAGE_DTYPES[tensors[f"{layout.module}.weight"].dtype]
            check_config_value(
                config, "bnb_4bit_quant_storage", storage, f"{layout.module} is stored as {storage}"
            )
    check_not_in_skip_list(config, INFO.skip_list_key, [layout.module for layout in layouts])


def _int8_layout(
    config: Mapping[str, Any], module: str, tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    threshold = quantization_config(config).get("llm_int8_threshold", DEFAULT_THRESHOLD)
    outlier_headers = (
        tensors.get(f"{module}.{key}") for key in ("outlier_columns", "outlier_weight")
    )
    outlier_columns = max(
        (header.shape[-1] for header in outlier_headers if header and header.shape), default=0
    )
    activation = Activation("int8", "token", True, float(threshold) or None, outlier_columns)
    layer = LayerScheme(Scheme("int8", Row(), scale=ScaleType.F32), activation)
    shape = matrix_shape(tensors, f"{module}.weight")
    expected = packed_tensors(module, layer, shape)
    require_headers(tensors, expected)
    return ModuleLayout(module, layer, shape, tuple(item.name for item in expected))


def _block_layout(
    config: Mapping[str, Any], module: str, grid: str, tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    weight, name = f"{module}.weight", module + STATE_SUFFIX + grid
    matrix_shape(tensors, weight)
    packed = _as_uint8_header(tensors[weight])
    octets = packed.shape[0]
    declared = linear_shape(config, module)
    shape = _recorded_shape(tensors[name]) if tensors[name].data else declared
    if shape is None:
        raise InputError(
            f"{name}: no shape of two sizes, and config.json does not determine it",
            "the checkpoint is damaged, or the weight is not a matrix",
            tensor=name,
        )
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
        )
    scale = ScaleType.DOUBLE if absmax.dtype == "U8" else ScaleType.F32
    layer = LayerScheme(Scheme(grid, PerGroup(size), scale=scale))
    expected = packed_tensors(module, layer, shape)
    require_headers({**tensors, weight: packed}, [item for item in expected if item.name != name])
    return ModuleLayout(module, layer, shape, tuple(item.name for item in expected))


def _as_uint8_header(weight: StoredTensor) -> StoredTensor:
    """Return the header of packed weights as if stored as U8; unchanged if the dtype is not in `STORAGE_DTYPES`."""
    if weight.dtype not in STORAGE_DTYPES or len(weight.shape) != 2:
        return weight
    return StoredTensor(
        weight.name, "U8", (weight.shape[0] * STORAGE_DTYPES[weight.dtype][1], weight.shape[1])
    )


def _recorded_shape(state: StoredTensor) -> tuple[int, int] | None:
    """Return the weight shape that the quantization state records; None if it is not two positive sizes."""
    shape = parse_object(state.data, state.name).get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        return None
    sizes = [size for size in shape if type(size) is int and size > 0]
    return (sizes[0], sizes[1]) if len(sizes) == 2 else None
