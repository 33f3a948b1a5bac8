"""Reading of one linear in the formats of compressed-tensors; `quantforge.formats.ct_layouts` has the tables."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.errors import Fault, InputError
from quantforge.formats import ModuleLayout, ct_turned
from quantforge.formats.checks import by_group_index, scalar, sound, whole_tiles
from quantforge.formats.contradictions import has_group_index
from quantforge.formats.ct_layouts import PACKED, PLAIN_CODES, WEIGHT, input_tensors, stored
from quantforge.formats.headers import described, matrix, require, scale_of, whole_groups
from quantforge.grids import Tile, words_per_row
from quantforge.plans import StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor


_OLD = "3-, 5-, 6- and 7-bit files of compressed-tensors before 0.18 are packed with gaps: not read"


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Read codes and parameters back."""
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    if layout.turned:
        return ct_turned.unpack(layout, tensors)
    module, scheme = layout.module, layout.scheme.weight
    if scheme.grid in {"nvfp4", "mxfp4"}:
        codes, parameters = _unpack_nibbles(layout, tensors)
    elif module + PACKED in layout.stored:
        return _unpack_words(layout, tensors)
    else:
        expected = stored(module, layout.scheme, layout.shape, plain=True)
        headers = described(tensors)
        found = {item.name: _comparable(item, headers.get(item.name)) for item in expected}
        require({name: item for name, item in found.items() if item}, expected)
        codes, scale = tensors[module + WEIGHT], tensors[f"{module}.weight_scale"]
        key = "exponents" if scheme.grid == "mxfp8" else "scales"
        parameters = {key: scale.reshape(scheme.parameter_shape(layout.shape))}
    scheme, parameters = whole_tiles(scheme, layout.shape[1], parameters)
    parameters |= _input_scale(layout, tensors)
    return sound(
        Quantized(codes, parameters, scheme, layout.scheme.input), f"{module}.weight_scale"
    )


def _input_scale(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for item in input_tensors(layout.module, layout.scheme):
        if item.name not in tensors:
            raise InputError(
                f"{item.name}: missing, although the input's scale is static",
                tensor=item.name,
                fault=Fault.SCALE,
            )
        scale = scalar(item.name, tensors[item.name])
        found["input_scale"] = 1 / scale if item.name.endswith("global_scale") else scale
    return found


def _unpack_nibbles(
    layout: ModuleLayout, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    import torch

    module, scheme = layout.module, layout.scheme.weight
    require(described(tensors), stored(module, layout.scheme, layout.shape))
    octets, scale = tensors[module + PACKED], tensors[f"{module}.weight_scale"]
    codes = torch.stack((octets & 15, octets >> 4), 2).view(layout.shape)
    if scheme.grid == "mxfp4":
        return codes, {"exponents": scale}
    name = f"{module}.weight_global_scale"
    return codes, {"scales": scale, "divisor": scalar(name, tensors[name])}


def _unpack_words(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    from quantforge.packers.bits import signed, unpack_rows
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, scheme, shape = layout.module, layout.scheme.weight, layout.shape
    require(described(tensors), stored(module, layout.scheme, shape, plain=False), _OLD)
    _check_shape(f"{module}.weight_shape", tensors, (layout.rows or shape[0], shape[1]))
    codes = unpack_rows(tensors[module + PACKED], scheme.bits, shape[1])
    parameters = {"scales": tensors[f"{module}.weight_scale"]}
    zeros = tensors.get(f"{module}.weight_zero_point")
    if scheme.symmetric:
        codes = signed(codes, scheme.bits)
    elif zeros is not None:
        rows = unpack_rows(zeros.T.contiguous(), scheme.bits, shape[0])
        parameters["zeros"] = rows.T.contiguous()
    tensor = sound(Quantized(codes, parameters, scheme), f"{module}.weight_scale")
    index = tensors.get(f"{module}.weight_g_idx")
    if index is None or bool(
        (index == -1).all()
    ):  # the library fills an index that it has no use for
        return tensor
    return by_group_index(tensor, index, f"{module}.weight_g_idx", scattered=layout.scattered)


def _check_shape(name: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    require(described(tensors), [StoredTensor(name, "I64", (2,))])
    if (recorded := tuple(tensors[name].tolist())) != shape:
        raise _wrong_shape(name, recorded, shape)


def _columns(
    module: str, scheme: Scheme, tensors: Mapping[str, StoredTensor], packed: tuple[int, int]
) -> int:
    """Return the columns of a module packed into ``packed`` rows x words, as ``weight_shape`` records them.

    Words alone do not tell them: the last word of a row may hold padding. Where its values were not read, whole groups
    tell them, and with one scale per row the words are taken to be full.

    Raises:
        InputError: the recorded shape does not fit the other tensors.
    """
    (rows, words), size, name = packed, scheme.group_size(0), f"{module}.weight_shape"
    groups = matrix(tensors, f"{module}.weight_scale")[1]
    columns = groups * size if size else words * 32 // scheme.bits
    require(tensors, [StoredTensor(name, "I64", (2,))])
    if not tensors[name].data:
        return columns
    recorded: tuple[int, int] = struct.unpack("<2q", tensors[name].data)
    fits = recorded[1] == columns if size else words_per_row(recorded[1], scheme.bits) == words
    if recorded[0] != rows or recorded[1] < 1 or not fits:
        raise _wrong_shape(name, recorded, (rows, columns))
    return recorded[1]


def _wrong_shape(name: str, recorded: tuple[int, ...], shape: tuple[int, int]) -> InputError:
    return InputError(
        f"{name}: {'x'.join(map(str, recorded))}, but by config.json, the other tensors hold {shape[0]}x{shape[1]}",
        "the checkpoint is damaged",
        tensor=name,
    )


def layout_of(
    module: str,
    layer: LayerScheme,
    tensors: Mapping[str, StoredTensor],
    *,
    scattered: bool | None = None,
) -> ModuleLayout:
    """Return the layout of a module that is stored with this scheme (its scale type open), from the headers.

    Raises:
        InputError: the headers disagree with the scheme, or columns are said to be ``scattered`` and nothing says how.
    """
    scheme, packed = layer.weight, module + PACKED in tensors
    scale_name = f"{module}.weight_scale"
    rows, columns = matrix(tensors, module + (PACKED if packed else WEIGHT))
    if scheme.scale is None:
        scheme = replace(scheme, scale=scale_of(tensors, scale_name))
    if scheme.grid in {"nvfp4", "mxfp4"}:
        columns *= 2
    elif packed:
        columns = _columns(module, scheme, tensors, (rows, columns))
    if not packed and (scheme.grid not in PLAIN_CODES or not scheme.symmetric):
        raise InputError(
            f"{module}: {scheme} in codes that are not packed is not read",
            f"{', '.join(PLAIN_CODES)} without zero points are",
            tensor=module,
        )
    layer = replace(layer, weight=scheme)
    if not isinstance(scheme.granularity, Tile):  # the last tile of a row may be narrower
        whole_groups(module, columns, scheme.group_size(columns))
    expected = stored(module, layer, (rows, columns), plain=not packed)
    found = {item.name: _comparable(item, tensors.get(item.name)) for item in expected}
    require({name: item for name, item in found.items() if item}, expected, _OLD)
    index = f"{module}.weight_g_idx"
    has_group_index(scattered, index, scheme.groups(columns), tensors)
    names = (*(item.name for item in expected), *([index] if index in tensors else []))
    return ModuleLayout(module, layer, (rows, columns), names, scattered)


def _comparable(expected: StoredTensor, found: StoredTensor | None) -> StoredTensor | None:
    """Return a scalar scale as one of a single element, in whatever shape and type a tool wrote it."""
    if found is None or expected.shape != (1,):
        return found
    single = all(size == 1 for size in found.shape)
    known = found.dtype in {"F16", "BF16", "F32"}
    return expected if single and known else found
