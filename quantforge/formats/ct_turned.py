"""Layout of a linear whose family stores it ``[in, out]`` (a Conv1D), as transformers decodes it on loading.

transformers gives packed weights to modules of the class Linear alone. With ``dequantize`` in the configuration it
decodes every stored weight by itself instead, and what it decodes has to have the shape of the parameter. So files hold
the matrix as the model does: a stream of codes per input, and one scale for a block of ``G`` inputs and one output.

==================  =====  ==========================  =====================================
``P.weight_packed``  I32    ``[in, ceil(out*b/32)]``    ``code + 2^(b-1)``
``P.weight_scale``   float  ``[in/G, out]``             ``block_structure`` is ``[G, 1]``
``P.weight_shape``   I64    ``[2]``                     ``(in, out)``
==================  =====  ==========================  =====================================

The library reads no packed zero points of blocks, so that symmetric integers in groups alone are stored so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.formats import ModuleLayout
from quantforge.formats.checks import sound
from quantforge.formats.ct_layouts import PACKED
from quantforge.formats.headers import described, matrix, require, scale_of, whole_groups
from quantforge.grids import PerGroup, ScaleType, Tile, words_per_row
from quantforge.plans import StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor


def turnable(layer: LayerScheme) -> bool:
    """Return whether files can hold a matrix of this scheme ``[in, out]``."""
    weight = layer.weight
    grouped = isinstance(weight.granularity, PerGroup)
    return weight.integer and weight.symmetric and grouped and layer.input is None


def in_blocks(scheme: Scheme) -> Scheme:
    """Return the scheme of a matrix ``[out, in]`` as that of the matrix in the files."""
    assert isinstance(scheme.granularity, PerGroup)
    return replace(scheme, granularity=Tile(scheme.granularity.size, 1))


def in_groups(scheme: Scheme) -> Scheme | None:
    """Undo `in_blocks`; None for a scheme of any other blocks."""
    found = scheme.granularity
    if not (scheme.integer and scheme.symmetric and isinstance(found, Tile) and found.columns == 1):
        return None
    return replace(scheme, granularity=PerGroup(found.rows))


def stored(module: str, layer: LayerScheme, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
    """Announce the tensors of one module; ``shape`` is ``(out_features, in_features)``."""
    rows, columns = shape
    scale = (layer.weight.scale or ScaleType.F16).value.upper()
    return (
        StoredTensor(module + PACKED, "I32", (columns, words_per_row(rows, layer.weight.bits))),
        StoredTensor(f"{module}.weight_scale", scale, (layer.weight.groups(columns), rows)),
        StoredTensor(f"{module}.weight_shape", "I64", (2,)),
    )


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Lay out codes and scales of a matrix ``[out, in]`` as `stored` announced."""
    import torch

    from quantforge.packers.bits import pack_rows, unsigned

    bits = tensor.scheme.bits
    return {
        module + PACKED: pack_rows(unsigned(tensor.codes.T.contiguous(), bits), bits),
        f"{module}.weight_scale": tensor.parameters["scales"].T.contiguous(),
        f"{module}.weight_shape": torch.tensor(tensor.shape[::-1], dtype=torch.int64),
    }


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Read codes and scales back as those of a matrix ``[out, in]``.

    Raises:
        InputError: the tensors are not as `stored` announces, or a scale is not sound.
    """
    from quantforge.packers.bits import signed, unpack_rows
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, scheme = layout.module, layout.scheme.weight
    require(described(tensors), stored(module, layout.scheme, layout.shape))
    codes = unpack_rows(tensors[module + PACKED], scheme.bits, layout.shape[0])
    scales = tensors[f"{module}.weight_scale"].T.contiguous()
    tensor = Quantized(signed(codes, scheme.bits).T.contiguous(), {"scales": scales}, scheme)
    return sound(tensor, f"{module}.weight_scale")


def layout_of(module: str, scheme: Scheme, tensors: Mapping[str, StoredTensor]) -> ModuleLayout:
    """Return the layout of a module of this scheme (`in_groups`, its scale type open), from the headers.

    Raises:
        InputError: the headers disagree with the scheme.
    """
    scale = f"{module}.weight_scale"
    columns, rows = matrix(tensors, module + PACKED)[0], matrix(tensors, scale)[1]
    layer = LayerScheme(replace(scheme, scale=scale_of(tensors, scale)))
    whole_groups(module, columns, scheme.group_size(columns))
    expected = stored(module, layer, (rows, columns))
    require(tensors, expected)
    names = tuple(item.name for item in expected)
    return ModuleLayout(module, layer, (rows, columns), names, turned=True)
