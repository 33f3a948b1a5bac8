"""Layout of one linear ``P`` ``[out, in]`` in bitsandbytes: NF4 or FP4 blocks, or 8-bit rows.

In 4 bits, blocks of ``B`` weights (32, 64 ... 4096), ``n = out*in/B`` of them:

====================================  ====  ================  ==========================================
``P.weight``                          U8    ``[out*in/2, 1]``  row-major; the even element in the high nibble
``P.weight.absmax``                   F32   ``[n]``            U8 with double quantization
``P.weight.quant_map``                F32   ``[16]``           the codebook
``P.weight.nested_absmax``            F32   ``[ceil(n/256)]``  double quantization only, as the next
``P.weight.nested_quant_map``         F32   ``[256]``
``P.weight.quant_state.bitsandbytes__nf4``  U8  ``[bytes]``    JSON: type, blocksize, shape, offset
====================================  ====  ================  ==========================================

``P.weight`` may hold the same bytes in elements of another type (`STORAGE`): ``bnb_4bit_quant_storage``, which training
in shards sets to the type of the model. Written is U8.

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
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantforge.checkpoint.foreign_json import parse_object
from quantforge.errors import InputError
from quantforge.formats import ModuleLayout
from quantforge.formats.checks import finite, sound
from quantforge.formats.headers import described, require
from quantforge.grids import NESTED, PerTensor, Row, ScaleType
from quantforge.plans import StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

STATE = ".weight.quant_state.bitsandbytes__"
# Types of ``bnb_4bit_quant_storage`` as headers name them: name in configurations, bytes of an element.
STORAGE: Mapping[str, tuple[str, int]] = {
    "U8": ("uint8", 1), "I8": ("int8", 1), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "F32": ("float32", 4),
    "F64": ("float64", 8),
}  # fmt: skip
_STATE_BYTES = 1 << 16
_OFFSET_WIDTH = 24  # characters of the longest float


def native(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with float32 scales where they are open, and one per matrix as one per row."""
    del shape
    granularity = Row() if isinstance(scheme.granularity, PerTensor) else scheme.granularity
    return Scheme(scheme.grid, granularity, scheme.zero, scheme.scale or ScaleType.F32)


def stored(module: str, layer: LayerScheme, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
    """Announce the tensors of one module."""
    scheme, weight = native(layer.weight, shape), f"{module}.weight"
    if scheme.grid == "int8":
        kept = min(layer.input.kept, shape[1]) if layer.input else 0
        columns = (
            StoredTensor(f"{module}.outlier_columns", "I32", (kept,)),
            StoredTensor(f"{module}.outlier_weight", "F16", (shape[0], kept)),
        )
        return (
            StoredTensor(weight, "I8", shape),
            StoredTensor(f"{module}.SCB", "F32", (shape[0],)),
            StoredTensor(f"{module}.weight_format", "U8", ()),
            *(columns if kept else ()),
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
        StoredTensor(module + STATE + scheme.grid, "U8", (len(_state(scheme, shape, 0.0)),)),
    )


def as_bytes(weight: StoredTensor) -> StoredTensor:
    """Return the header of packed weights as if they were stored as U8; of another type than `STORAGE`, as it is."""
    if weight.dtype not in STORAGE or len(weight.shape) != 2:
        return weight
    return StoredTensor(
        weight.name, "U8", (weight.shape[0] * STORAGE[weight.dtype][1], weight.shape[1])
    )


def _state(scheme: Scheme, shape: tuple[int, int], offset: float) -> bytes:
    """Return the JSON that says how to decode, in the words of bitsandbytes."""
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
    return _pack_rows(module, tensor) if tensor.scheme.integer else _pack_blocks(module, tensor)


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
        module + STATE + scheme.grid: torch.frombuffer(state, dtype=torch.uint8),
    }
    if scheme.scale is ScaleType.DOUBLE:
        packed[f"{weight}.nested_absmax"] = parameters["nested"].flatten()
        packed[f"{weight}.nested_quant_map"] = dynamic_map()
    return packed


def _pack_rows(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    import torch

    from quantforge.packers.tensor import OUTLIERS

    scales = tensor.parameters["scales"].flatten()
    ranges = scales * 127
    # The absolute maximum of half-precision weights, where it is one that gives the same scale.
    short = ranges.bfloat16().float()
    kept = {
        f"{module}.{key}": tensor.parameters[key] for key in OUTLIERS if key in tensor.parameters
    }
    return kept | {
        f"{module}.weight": tensor.codes,
        f"{module}.SCB": torch.where(short / 127 == scales, short, ranges),
        f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Read codes and parameters back."""
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, layer, shape = layout.module, layout.scheme, layout.shape
    if layer.weight.grid != "int8":
        return _unpack_blocks(layout, tensors)
    require(described(tensors), stored(module, layer, shape))
    if int(tensors[f"{module}.weight_format"]):
        raise InputError(f"{module}.weight_format: only 0 (by row) is read", tensor=module)
    parameters = {"scales": (tensors[f"{module}.SCB"] / 127).unsqueeze(1)}
    parameters |= _outliers(module, shape, tensors)
    tensor = Quantized(tensors[f"{module}.weight"], parameters, layer.weight, layer.input)
    return sound(tensor, f"{module}.SCB")


def _outliers(
    module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the columns that are kept in 16 bits, checked."""
    import torch

    name = f"{module}.outlier_columns"
    if name not in tensors:
        return {}
    columns, weight = tensors[name], tensors[f"{module}.outlier_weight"]
    used = columns[columns >= 0]
    padded = torch.nn.functional.pad(used, (0, len(columns) - len(used)), value=-1)
    rising = bool((used[1:] > used[:-1]).all()) and bool((used < shape[1]).all())
    if not rising or not torch.equal(padded, columns):
        raise InputError(
            f"{name}: {columns.tolist()[:8]} are not rising columns of {shape[1]}, then -1",
            "the checkpoint is damaged",
            tensor=name,
        )
    return {"outlier_columns": columns, "outlier_weight": weight}


def _unpack_blocks(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    import torch

    from quantforge.packers.nf4 import book, dynamic_map, unnest
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, scheme, shape = layout.module, layout.scheme.weight, layout.shape
    weight, name = f"{layout.module}.weight", layout.module + STATE + layout.scheme.weight.grid
    expected = [item for item in stored(module, layout.scheme, shape) if item.name != name]
    headers = described(tensors)
    if weight in headers:
        headers[weight] = as_bytes(headers[weight])
    require(headers, expected)
    state = _read_state(name, tensors[name])
    stated = (state.get("quant_type"), state.get("blocksize"), state.get("shape"))
    wanted = (scheme.grid, scheme.group_size(shape[1]), list(shape))
    if stated != wanted:
        keys = ("quant_type", "blocksize", "shape")
        raise InputError(
            f"{name}: "
            + " and ".join(
                f"{key} = {said!r}, but the tensors are of {actual!r}"
                for key, said, actual in zip(keys, stated, wanted, strict=True)
                if said != actual
            ),
            "the checkpoint is damaged: fetch it again",
            tensor=name,
        )
    _same(f"{weight}.quant_map", tensors, book(scheme.grid))
    octets = tensors[weight].flatten().view(torch.uint8)
    codes = torch.stack((octets >> 4, octets & 15), 1).view(shape)
    groups = scheme.parameter_shape(shape)
    parameters = {"scales": tensors[f"{weight}.absmax"].view(groups)}
    if scheme.scale is ScaleType.DOUBLE:
        _same(f"{weight}.nested_quant_map", tensors, dynamic_map())
        offset = state.get("nested_offset")
        if state.get("nested_blocksize") != NESTED or type(offset) not in {int, float}:
            size = state.get("nested_blocksize")
            raise InputError(
                f"{name}: nested_blocksize = {size!r}, nested_offset = {offset!r}",
                f"blocks of {NESTED} and an offset that is a number are read",
                tensor=name,
            )
        nested = tensors[f"{weight}.nested_absmax"].view(1, -1)
        parameters["nested"] = finite(f"{weight}.nested_absmax", nested)
        parameters["offset"] = torch.tensor([[offset]], dtype=torch.float32)
        finite(name, parameters["offset"], "nested_offset")
        finite(f"{weight}.absmax", unnest(parameters))  # the sum may be beyond float32
    return sound(Quantized(codes, parameters, scheme), f"{weight}.absmax")


def recorded_shape(state: StoredTensor) -> tuple[int, int] | None:
    """Return the shape that the JSON of a weight records; None where it records none of two sizes."""
    shape = parse_object(state.data, state.name).get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        return None
    sizes = [size for size in shape if type(size) is int and size > 0]
    return (sizes[0], sizes[1]) if len(sizes) == 2 else None


def _read_state(name: str, blob: Tensor) -> Mapping[str, Any]:
    if blob.numel() > _STATE_BYTES:
        raise InputError(f"{name}: {blob.numel()} bytes, more than {_STATE_BYTES}", tensor=name)
    return parse_object(bytes(blob.tolist()), name)


def _same(name: str, tensors: Mapping[str, Tensor], expected: Tensor) -> None:
    if not bool((tensors[name] - expected).abs().max() < 1e-6):
        raise InputError(
            f"{name}: not the levels of its type",
            "a codebook of its own is not read: quantize again from the original model",
            tensor=name,
        )
