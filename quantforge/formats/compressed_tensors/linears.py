"""Pack and unpack one linear ``P`` ``[out, in]`` in each format of compressed-tensors.

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

A linear whose family stores it ``[in, out]`` (a Conv1D) is *transposed* in the files, too, where transformers is to
load it. transformers gives packed weights to modules of the class Linear alone. With ``dequantize`` in the
configuration it decodes every stored weight by itself instead, and what it decodes has to have the shape of the
parameter. So files hold the matrix as the model does: a stream of codes per input, and one scale for a block of ``G``
inputs and one output.

==================  =====  ==========================  =====================================
``P.weight_packed``  I32    ``[in, ceil(out*b/32)]``    ``code + 2^(b-1)``
``P.weight_scale``   float  ``[in/G, out]``             ``block_structure`` is ``[G, 1]``
``P.weight_shape``   I64    ``[2]``                     ``(in, out)``
==================  =====  ==========================  =====================================

The library reads no packed zero points of blocks, so that symmetric integers in groups alone are stored so.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.errors import Fault, InputError
from quantforge.formats import ModuleLayout
from quantforge.formats.read_checks import (
    apply_group_index,
    matrix_shape,
    require_group_index,
    require_headers,
    require_valid_scales,
    require_whole_groups,
    scalar_scale,
    scale_type_of,
    split_ragged_tiles,
    tensor_headers,
)
from quantforge.grids import PerGroup, PerTensor, ScaleType, Tile, words_per_row
from quantforge.plans import StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

WEIGHT_SUFFIX, PACKED_SUFFIX = ".weight", ".weight_packed"
UNPACKED_DTYPES = {"int8": "I8", "fp8_e4m3": "F8_E4M3", "mxfp8": "F8_E4M3"}
_OLD_PACKING_HINT = (
    "3-, 5-, 6- and 7-bit files of compressed-tensors before 0.18 are packed with gaps: not read"
)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int], *, plain: bool | None = None
) -> tuple[StoredTensor, ...]:
    """Return the headers of the stored tensors of one module.

    ``plain`` stores codes unpacked; by default if inputs are quantized.
    """
    scheme, (rows, columns) = layer.weight, shape
    inputs = _input_tensors(module, layer)
    if scheme.grid in {"nvfp4", "mxfp4"}:
        kind = "F8_E4M3" if scheme.grid == "nvfp4" else "U8"
        divisor = StoredTensor(f"{module}.weight_global_scale", "F32", (1,))
        return (
            StoredTensor(module + PACKED_SUFFIX, "U8", (rows, columns // 2)),
            StoredTensor(f"{module}.weight_scale", kind, scheme.parameter_shape(shape)),
            *([divisor] if scheme.grid == "nvfp4" else []),
            *inputs,
        )
    if plain is None:
        plain = not scheme.integer or layer.input is not None
    if plain:
        per_tensor = isinstance(scheme.granularity, PerTensor)
        size = (1,) if per_tensor else scheme.parameter_shape(shape)
        scale = "U8" if scheme.grid == "mxfp8" else (scheme.scale or ScaleType.F32).value.upper()
        return (
            StoredTensor(module + WEIGHT_SUFFIX, UNPACKED_DTYPES[scheme.grid], shape),
            StoredTensor(f"{module}.weight_scale", scale, size),
            *inputs,
        )
    scale = (scheme.scale or ScaleType.F16).value.upper()
    groups = scheme.groups(columns)
    tensors = (
        StoredTensor(module + PACKED_SUFFIX, "I32", (rows, words_per_row(columns, scheme.bits))),
        StoredTensor(f"{module}.weight_scale", scale, (rows, groups)),
        StoredTensor(f"{module}.weight_shape", "I64", (2,)),
    )
    if scheme.symmetric:
        return tensors
    zeros = StoredTensor(
        f"{module}.weight_zero_point", "I32", (words_per_row(rows, scheme.bits), groups)
    )
    return (*tensors, zeros)


def _input_tensors(module: str, layer: LayerScheme) -> tuple[StoredTensor, ...]:
    """Return the header of the static input scale, if the layer has one."""
    if layer.input is None or layer.input.dynamic:
        return ()
    name = "input_global_scale" if layer.input.grid == "nvfp4" else "input_scale"
    return (StoredTensor(f"{module}.{name}", "F32", (1,)),)


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Pack codes and parameters as in the module's tables."""
    scheme, parameters = tensor.scheme, tensor.parameters
    if scheme.grid in {"nvfp4", "mxfp4"}:
        packed = _pack_nibbles(module, tensor)
    elif scheme.integer and tensor.input is None:
        packed = _pack_words(module, tensor)
    else:
        scale = parameters["exponents" if scheme.grid == "mxfp8" else "scales"]
        flat = isinstance(scheme.granularity, PerTensor)
        packed = {
            module + WEIGHT_SUFFIX: tensor.codes.contiguous(),
            f"{module}.weight_scale": scale.view(1) if flat else scale.contiguous(),
        }
    for item in _input_tensors(module, LayerScheme(scheme, tensor.input)):
        scale = parameters["input_scale"].view(1)
        packed[item.name] = 1 / scale if item.name.endswith("global_scale") else scale
    return packed


def _pack_words(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    import torch

    from quantforge.packers.bits import pack_rows, to_unsigned_codes

    bits = tensor.scheme.bits
    packed = {
        module + PACKED_SUFFIX: pack_rows(to_unsigned_codes(tensor.codes, bits), bits),
        f"{module}.weight_scale": tensor.parameters["scales"].contiguous(),
        f"{module}.weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
    }
    if not tensor.scheme.symmetric:
        zeros = pack_rows(tensor.parameters["zeros"].T.contiguous(), bits)
        packed[f"{module}.weight_zero_point"] = zeros.T.contiguous()
    return packed


def _pack_nibbles(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    codes, parameters = tensor.codes, tensor.parameters
    packed = {module + PACKED_SUFFIX: codes[:, ::2] | (codes[:, 1::2] << 4)}
    if tensor.scheme.grid == "mxfp4":
        return packed | {f"{module}.weight_scale": parameters["exponents"].contiguous()}
    return packed | {
        f"{module}.weight_scale": parameters["scales"].contiguous(),
        f"{module}.weight_global_scale": parameters["divisor"].view(1),
    }


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Unpack codes and parameters."""
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    if layout.transposed:
        return _unpack_transposed(layout, tensors)
    module, scheme = layout.module, layout.scheme.weight
    if scheme.grid in {"nvfp4", "mxfp4"}:
        codes, parameters = _unpack_nibbles(layout, tensors)
    elif module + PACKED_SUFFIX in layout.tensor_names:
        return _unpack_words(layout, tensors)
    else:
        expected = packed_tensors(module, layout.scheme, layout.shape, plain=True)
        headers = tensor_headers(tensors)
        unpacked = {
            item.name: _normalized_scalar_header(item, headers.get(item.name)) for item in expected
        }
        require_headers({name: item for name, item in unpacked.items() if item}, expected)
        codes, scale = tensors[module + WEIGHT_SUFFIX], tensors[f"{module}.weight_scale"]
        key = "exponents" if scheme.grid == "mxfp8" else "scales"
        parameters = {key: scale.reshape(scheme.parameter_shape(layout.shape))}
    scheme, parameters = split_ragged_tiles(scheme, layout.shape[1], parameters)
    parameters |= _input_scale(layout, tensors)
    return require_valid_scales(
        Quantized(codes, parameters, scheme, layout.scheme.input), f"{module}.weight_scale"
    )


def _input_scale(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    scales: dict[str, Tensor] = {}
    for item in _input_tensors(layout.module, layout.scheme):
        if item.name not in tensors:
            raise InputError(
                f"{item.name}: missing, although the input's scale is static",
                tensor=item.name,
                fault=Fault.SCALE,
            )
        scale = scalar_scale(item.name, tensors[item.name])
        scales["input_scale"] = 1 / scale if item.name.endswith("global_scale") else scale
    return scales


def _unpack_nibbles(
    layout: ModuleLayout, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    import torch

    module, scheme = layout.module, layout.scheme.weight
    require_headers(tensor_headers(tensors), packed_tensors(module, layout.scheme, layout.shape))
    octets, scale = tensors[module + PACKED_SUFFIX], tensors[f"{module}.weight_scale"]
    codes = torch.stack((octets & 15, octets >> 4), 2).view(layout.shape)
    if scheme.grid == "mxfp4":
        return codes, {"exponents": scale}
    name = f"{module}.weight_global_scale"
    return codes, {"scales": scale, "divisor": scalar_scale(name, tensors[name])}


def _unpack_words(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    from quantforge.packers.bits import to_signed_codes, unpack_rows
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, scheme, shape = layout.module, layout.scheme.weight, layout.shape
    require_headers(
        tensor_headers(tensors),
        packed_tensors(module, layout.scheme, shape, plain=False),
        _OLD_PACKING_HINT,
    )
    _check_recorded_shape(
        f"{module}.weight_shape", tensors, (layout.total_rows or shape[0], shape[1])
    )
    codes = unpack_rows(tensors[module + PACKED_SUFFIX], scheme.bits, shape[1])
    parameters = {"scales": tensors[f"{module}.weight_scale"]}
    zeros = tensors.get(f"{module}.weight_zero_point")
    if scheme.symmetric:
        codes = to_signed_codes(codes, scheme.bits)
    elif zeros is not None:
        rows = unpack_rows(zeros.T.contiguous(), scheme.bits, shape[0])
        parameters["zeros"] = rows.T.contiguous()
    tensor = require_valid_scales(Quantized(codes, parameters, scheme), f"{module}.weight_scale")
    index = tensors.get(f"{module}.weight_g_idx")
    # The library fills an index that it has no use for with -1.
    if index is None or bool((index == -1).all()):
        return tensor
    return apply_group_index(tensor, index, f"{module}.weight_g_idx", act_order=layout.act_order)


def _check_recorded_shape(name: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    require_headers(tensor_headers(tensors), [StoredTensor(name, "I64", (2,))])
    if (recorded := tuple(tensors[name].tolist())) != shape:
        raise _shape_error(name, recorded, shape)


def _column_count(
    module: str, scheme: Scheme, tensors: Mapping[str, StoredTensor], packed: tuple[int, int]
) -> int:
    """Return the number of columns of a module with ``packed`` rows x words, as recorded in ``weight_shape``.

    Words alone do not tell them: the last word of a row may hold padding. Where its values were not read, whole groups
    tell them, and with one scale per row the words are taken to be full.

    Raises:
        InputError: the recorded shape does not fit the other tensors.
    """
    (rows, packed_columns), size, name = packed, scheme.group_size(0), f"{module}.weight_shape"
    groups = matrix_shape(tensors, f"{module}.weight_scale")[1]
    columns = groups * size if size else packed_columns * 32 // scheme.bits
    require_headers(tensors, [StoredTensor(name, "I64", (2,))])
    if not tensors[name].data:
        return columns
    recorded: tuple[int, int] = struct.unpack("<2q", tensors[name].data)
    is_consistent = (
        recorded[1] == columns
        if size
        else words_per_row(recorded[1], scheme.bits) == packed_columns
    )
    if recorded[0] != rows or recorded[1] < 1 or not is_consistent:
        raise _shape_error(name, recorded, (rows, columns))
    return recorded[1]


def _shape_error(name: str, recorded: tuple[int, ...], shape: tuple[int, int]) -> InputError:
    return InputError(
        f"{name}: {'x'.join(map(str, recorded))}, but by config.json, the other tensors hold {shape[0]}x{shape[1]}",
        "the checkpoint is damaged",
        tensor=name,
    )


def read_layout(
    module: str,
    layer: LayerScheme,
    tensors: Mapping[str, StoredTensor],
    *,
    act_order: bool | None = None,
) -> ModuleLayout:
    """Return the layout of a module with this scheme (without scale type), from the headers.

    Raises:
        InputError: the headers disagree with the scheme, or columns are said to be ``act_order`` and nothing says how.
    """
    scheme, packed = layer.weight, module + PACKED_SUFFIX in tensors
    scale_name = f"{module}.weight_scale"
    rows, columns = matrix_shape(tensors, module + (PACKED_SUFFIX if packed else WEIGHT_SUFFIX))
    if scheme.scale is None:
        scheme = replace(scheme, scale=scale_type_of(tensors, scale_name))
    if scheme.grid in {"nvfp4", "mxfp4"}:
        columns *= 2
    elif packed:
        columns = _column_count(module, scheme, tensors, (rows, columns))
    if not packed and (scheme.grid not in UNPACKED_DTYPES or not scheme.symmetric):
        raise InputError(
            f"{module}: {scheme} in codes that are not packed is not read",
            f"{', '.join(UNPACKED_DTYPES)} without zero points are",
            tensor=module,
        )
    layer = replace(layer, weight=scheme)
    if not isinstance(scheme.granularity, Tile):  # the last tile of a row may be narrower
        require_whole_groups(module, columns, scheme.group_size(columns))
    expected = packed_tensors(module, layer, (rows, columns), plain=not packed)
    headers = {
        item.name: _normalized_scalar_header(item, tensors.get(item.name)) for item in expected
    }
    require_headers(
        {name: item for name, item in headers.items() if item}, expected, _OLD_PACKING_HINT
    )
    index = f"{module}.weight_g_idx"
    require_group_index(act_order, index, scheme.groups(columns), tensors)
    names = (*(item.name for item in expected), *([index] if index in tensors else []))
    return ModuleLayout(module, layer, (rows, columns), names, act_order)


def _normalized_scalar_header(
    expected: StoredTensor, stored: StoredTensor | None
) -> StoredTensor | None:
    """Return the header of a single scale, of any shape and dtype, as the expected one; others unchanged."""
    if stored is None or expected.shape != (1,):
        return stored
    has_one_value = all(size == 1 for size in stored.shape)
    is_float = stored.dtype in {"F16", "BF16", "F32"}
    return expected if has_one_value and is_float else stored


# Transposed


def can_store_transposed(layer: LayerScheme) -> bool:
    """Return whether a matrix of this scheme can be stored ``[in, out]``."""
    weight = layer.weight
    grouped = isinstance(weight.granularity, PerGroup)
    return weight.integer and weight.symmetric and grouped and layer.input is None


def transposed_scheme(scheme: Scheme) -> Scheme:
    """Return the scheme of the stored matrix ``[in, out]`` for that of a matrix ``[out, in]``."""
    assert isinstance(scheme.granularity, PerGroup)
    return replace(scheme, granularity=Tile(scheme.granularity.size, 1))


def untransposed_scheme(scheme: Scheme) -> Scheme | None:
    """Invert `transposed_scheme`; return None for any other scheme."""
    granularity = scheme.granularity
    if not (
        scheme.integer
        and scheme.symmetric
        and isinstance(granularity, Tile)
        and granularity.columns == 1
    ):
        return None
    return replace(scheme, granularity=PerGroup(granularity.rows))


def packed_transposed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Return the headers of a module stored ``[in, out]``; ``shape`` is ``(out_features, in_features)``."""
    rows, columns = shape
    scale = (layer.weight.scale or ScaleType.F16).value.upper()
    return (
        StoredTensor(
            module + PACKED_SUFFIX, "I32", (columns, words_per_row(rows, layer.weight.bits))
        ),
        StoredTensor(f"{module}.weight_scale", scale, (layer.weight.groups(columns), rows)),
        StoredTensor(f"{module}.weight_shape", "I64", (2,)),
    )


def pack_transposed(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Pack codes and scales of a matrix ``[out, in]`` as `packed_transposed_tensors` describes."""
    import torch

    from quantforge.packers.bits import pack_rows, to_unsigned_codes

    bits = tensor.scheme.bits
    return {
        module + PACKED_SUFFIX: pack_rows(
            to_unsigned_codes(tensor.codes.T.contiguous(), bits), bits
        ),
        f"{module}.weight_scale": tensor.parameters["scales"].T.contiguous(),
        f"{module}.weight_shape": torch.tensor(tensor.shape[::-1], dtype=torch.int64),
    }


def _unpack_transposed(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Unpack a module stored ``[in, out]`` to a matrix ``[out, in]``.

    Raises:
        InputError: the tensors are not as `packed_transposed_tensors` announces, or a scale is not sound.
    """
    from quantforge.packers.bits import to_signed_codes, unpack_rows
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, scheme = layout.module, layout.scheme.weight
    require_headers(
        tensor_headers(tensors), packed_transposed_tensors(module, layout.scheme, layout.shape)
    )
    codes = unpack_rows(tensors[module + PACKED_SUFFIX], scheme.bits, layout.shape[0])
    scales = tensors[f"{module}.weight_scale"].T.contiguous()
    tensor = Quantized(
        to_signed_codes(codes, scheme.bits).T.contiguous(), {"scales": scales}, scheme
    )
    return require_valid_scales(tensor, f"{module}.weight_scale")


def read_transposed_layout(
    module: str, scheme: Scheme, tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    """Return the layout of a module stored ``[in, out]``, from the headers.

    Raises:
        InputError: the headers disagree with the scheme.
    """
    scale = f"{module}.weight_scale"
    columns, rows = (
        matrix_shape(tensors, module + PACKED_SUFFIX)[0],
        matrix_shape(tensors, scale)[1],
    )
    layer = LayerScheme(replace(scheme, scale=scale_type_of(tensors, scale)))
    require_whole_groups(module, columns, scheme.group_size(columns))
    expected = packed_transposed_tensors(module, layer, (rows, columns))
    require_headers(tensors, expected)
    names = tuple(item.name for item in expected)
    return ModuleLayout(module, layer, (rows, columns), names, transposed=True)
