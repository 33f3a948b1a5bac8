"""Layout of one linear ``P`` ``[out, in]`` in each format of compressed-tensors.

``pack-quantized`` (integers of 2 to 8 bits):

=======================  =====  ============================  ================================
``P.weight_packed``      I32    ``[out, ceil(in*b/32)]``      ``code + 2^(b-1)``, a stream per row
``P.weight_scale``       float  ``[out, groups]``             one group: one scale per row
``P.weight_shape``       I64    ``[2]``                       ``(out, in)``
``P.weight_zero_point``  I32    ``[ceil(out*b/32), groups]``  asymmetric: a stream along *out*
=======================  =====  ============================  ================================

The value is ``(code - zero) * scale``; both are stored shifted into the unsigned range. The stream is dense
(`quantforge.packers.bits`); releases of the library before 0.18 packed 3, 5, 6 and 7 bits with gaps, and such files are
refused by their width.

``int-quantized``, ``float-quantized``, ``naive-quantized`` and ``mxfp8-quantized`` (the codes as they are):

=======================  ==========  ==============================================================
``P.weight``             I8, F8_E4M3  ``[out, in]``
``P.weight_scale``       float       ``[out, groups]``, ``[1]`` per tensor, a grid of tiles; mxfp8: U8 exponents
=======================  ==========  ==============================================================

``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized`` (e2m1; the even column in the low nibble):

==========================  ========  ==================  ======================================
``P.weight_packed``         U8        ``[out, in/2]``
``P.weight_scale``          F8_E4M3   ``[out, in/16]``    mxfp4: U8 exponents ``[out, in/32]``
``P.weight_global_scale``   F32       ``[1]``             nvfp4: what the scales are *divided* by
==========================  ========  ==================  ======================================

A static range of the input is ``P.input_scale`` F32 ``[1]``, of nvfp4 ``P.input_global_scale``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantforge.grids import PerTensor, ScaleType, words_per_row
from quantforge.plans import StoredTensor
from quantforge.scheme import LayerScheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

WEIGHT, PACKED = ".weight", ".weight_packed"
PLAIN_CODES = {"int8": "I8", "fp8_e4m3": "F8_E4M3", "mxfp8": "F8_E4M3"}


def stored(
    module: str, layer: LayerScheme, shape: tuple[int, int], *, plain: bool | None = None
) -> tuple[StoredTensor, ...]:
    """Announce the tensors of one module; ``plain``: codes are not packed, by default where inputs are quantized."""
    scheme, (rows, columns) = layer.weight, shape
    inputs = input_tensors(module, layer)
    if scheme.grid in {"nvfp4", "mxfp4"}:
        kind = "F8_E4M3" if scheme.grid == "nvfp4" else "U8"
        return (
            StoredTensor(module + PACKED, "U8", (rows, columns // 2)),
            StoredTensor(f"{module}.weight_scale", kind, scheme.parameter_shape(shape)),
            *([StoredTensor(f"{module}.weight_global_scale", "F32", (1,))] if scheme.grid == "nvfp4" else []),
            *inputs,
        )  # fmt: skip
    if plain is None:
        plain = not scheme.integer or layer.input is not None
    if plain:
        per_tensor = isinstance(scheme.granularity, PerTensor)
        size = (1,) if per_tensor else scheme.parameter_shape(shape)
        scale = "U8" if scheme.grid == "mxfp8" else (scheme.scale or ScaleType.F32).value.upper()
        return (
            StoredTensor(module + WEIGHT, PLAIN_CODES[scheme.grid], shape),
            StoredTensor(f"{module}.weight_scale", scale, size),
            *inputs,
        )
    scale = (scheme.scale or ScaleType.F16).value.upper()
    groups = scheme.groups(columns)
    tensors = (
        StoredTensor(module + PACKED, "I32", (rows, words_per_row(columns, scheme.bits))),
        StoredTensor(f"{module}.weight_scale", scale, (rows, groups)),
        StoredTensor(f"{module}.weight_shape", "I64", (2,)),
    )
    if scheme.symmetric:
        return tensors
    zeros = StoredTensor(
        f"{module}.weight_zero_point", "I32", (words_per_row(rows, scheme.bits), groups)
    )
    return (*tensors, zeros)


def input_tensors(module: str, layer: LayerScheme) -> tuple[StoredTensor, ...]:
    """Return the tensor that holds a static range of the input, if there is one."""
    if layer.input is None or layer.input.dynamic:
        return ()
    name = "input_global_scale" if layer.input.grid == "nvfp4" else "input_scale"
    return (StoredTensor(f"{module}.{name}", "F32", (1,)),)


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Lay out codes and parameters; see the module's tables."""
    scheme, parameters = tensor.scheme, tensor.parameters
    if scheme.grid in {"nvfp4", "mxfp4"}:
        packed = _pack_nibbles(module, tensor)
    elif scheme.integer and tensor.input is None:
        packed = _pack_words(module, tensor)
    else:
        scale = parameters["exponents" if scheme.grid == "mxfp8" else "scales"]
        flat = isinstance(scheme.granularity, PerTensor)
        packed = {
            module + WEIGHT: tensor.codes.contiguous(),
            f"{module}.weight_scale": scale.view(1) if flat else scale.contiguous(),
        }
    for item in input_tensors(module, LayerScheme(scheme, tensor.input)):
        scale = parameters["input_scale"].view(1)
        packed[item.name] = 1 / scale if item.name.endswith("global_scale") else scale
    return packed


def _pack_words(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    import torch

    from quantforge.packers.bits import pack_rows, unsigned

    bits = tensor.scheme.bits
    packed = {
        module + PACKED: pack_rows(unsigned(tensor.codes, bits), bits),
        f"{module}.weight_scale": tensor.parameters["scales"].contiguous(),
        f"{module}.weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
    }
    if not tensor.scheme.symmetric:
        zeros = pack_rows(tensor.parameters["zeros"].T.contiguous(), bits)
        packed[f"{module}.weight_zero_point"] = zeros.T.contiguous()
    return packed


def _pack_nibbles(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    codes, parameters = tensor.codes, tensor.parameters
    packed = {module + PACKED: codes[:, ::2] | (codes[:, 1::2] << 4)}
    if tensor.scheme.grid == "mxfp4":
        return packed | {f"{module}.weight_scale": parameters["exponents"].contiguous()}
    return packed | {
        f"{module}.weight_scale": parameters["scales"].contiguous(),
        f"{module}.weight_global_scale": parameters["divisor"].view(1),
    }
