"""Layout of one linear ``P`` ``[N, K]`` in GPTQ: announced, written and read.

Everything is transposed; with ``b`` bits and groups of ``G`` columns:

=============  ====  ================  =========================================================
``P.qweight``  I32   ``[K*b/32, N]``   codes, one bit stream per output, running down the rows
``P.qzeros``   I32   ``[K/G, N*b/32]``  zero points, one bit stream per group
``P.scales``   F16   ``[K/G, N]``
``P.g_idx``    I32   ``[K]``           group of each column
=============  ====  ================  =========================================================

The value is ``(code - zero) * scale``; a symmetric grid has the zero point ``2^(b-1)`` everywhere.
The first layout (``checkpoint_format: gptq``, read by everything) stores ``zero - 1``. Readers
disagree about a stored ``2^b - 1``, some carry into the neighbouring field, so a zero point of 0 is
refused; `quantforge.formats.gptq_v2` stores zero points as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantforge.errors import Fault, InputError, either
from quantforge.formats import Fit, ModuleLayout, Verdict
from quantforge.formats.agreement import agreement
from quantforge.formats.checks import by_group_index, sound
from quantforge.formats.contradictions import has_group_index
from quantforge.formats.convert import convert
from quantforge.formats.fits import float16_scales, grouped, integers, possible
from quantforge.formats.headers import announced, described, matrix, require, scale_of, whole_groups
from quantforge.grids import PerGroup, PerTensor, Row, ScaleType, Zero
from quantforge.plans import StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor


LEAST_ZERO = 1


WIDTHS = (2, 3, 4, 8)


def check(layer: LayerScheme, shape: tuple[int, int], *, least_zero: int = LEAST_ZERO) -> Fit:
    """Judge a weight: 2, 3, 4 and 8 bits; whole words along both dimensions; float16 scales.

    ``least_zero``, here and below, is 1 in the first layout and 0 in gptq_v2.
    """
    scheme = layer.weight
    if refusal := integers(layer):
        return refusal
    if scheme.bits not in WIDTHS:
        wider = Scheme("int8", scheme.granularity, scheme.zero)
        return Fit(Verdict.IMPOSSIBLE, f"the layout holds {either(WIDTHS)} bits", str(wider))
    if any(size * scheme.bits % 32 for size in shape):
        reason = f"{shape[0]}x{shape[1]} codes of {scheme.bits} bits do not fill 32-bit words"
        return Fit(Verdict.IMPOSSIBLE, reason)
    wanted = native(scheme, shape)
    return (
        float16_scales(scheme)
        or grouped(scheme, shape)
        or agreement(scheme, wanted, shape, least_zero)
    )


def native(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with float16 scales, and one scale per matrix as one per row."""
    del shape
    granularity = Row() if isinstance(scheme.granularity, PerTensor) else scheme.granularity
    return Scheme(scheme.grid, granularity, scheme.zero, ScaleType.F16)


def stored(module: str, layer: LayerScheme, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
    """Announce the tensors of one module."""
    bits, groups = layer.weight.bits, native(layer.weight, shape).groups(shape[1])
    return (
        StoredTensor(f"{module}.qweight", "I32", (shape[1] * bits // 32, shape[0])),
        StoredTensor(f"{module}.qzeros", "I32", (groups, shape[0] * bits // 32)),
        StoredTensor(f"{module}.scales", "F16", (groups, shape[0])),
        StoredTensor(f"{module}.g_idx", "I32", (shape[1],)),
    )


def pack(
    module: str, tensor: QuantizedTensor, *, least_zero: int = LEAST_ZERO
) -> dict[str, Tensor]:
    """Lay out codes, zero points (less ``least_zero``), scales and group numbers."""
    import torch

    from quantforge.packers.bits import pack_rows, unsigned

    scheme, columns = native(tensor.scheme, tensor.shape), tensor.shape[1]
    possible(module, check(LayerScheme(scheme), tensor.shape))
    tensor = convert(tensor, scheme, least_zero)
    scales = tensor.parameters["scales"].T.contiguous()
    zeros = torch.full(scales.shape, 1 << (scheme.bits - 1), dtype=torch.uint8)
    if not scheme.symmetric:
        zeros = tensor.parameters["zeros"].T.contiguous()
    index = torch.arange(columns, dtype=torch.int32) // scheme.group_size(columns)
    return {
        f"{module}.qweight": pack_rows(
            unsigned(tensor.codes, scheme.bits), scheme.bits
        ).T.contiguous(),
        f"{module}.qzeros": pack_rows(zeros - least_zero, scheme.bits),
        f"{module}.scales": scales,
        f"{module}.g_idx": index,
    }


def unpack(
    layout: ModuleLayout, tensors: Mapping[str, Tensor], *, least_zero: int = LEAST_ZERO
) -> QuantizedTensor:
    """Read codes and parameters back; scattered groups as `by_group_index` says."""
    from quantforge.packers.bits import signed, unpack_rows
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, scheme, shape = layout.module, layout.scheme.weight, layout.shape
    require(described(tensors), announced(layout, stored))
    codes = unpack_rows(tensors[f"{module}.qweight"].T.contiguous(), scheme.bits, shape[1])
    zeros = unpack_rows(tensors[f"{module}.qzeros"], scheme.bits, shape[0])
    _check_zeros(f"{module}.qzeros", zeros, scheme, least_zero)
    parameters = {"scales": tensors[f"{module}.scales"].T.contiguous()}
    if scheme.symmetric:
        codes = signed(codes, scheme.bits)
    else:
        parameters["zeros"] = (zeros + least_zero).T.contiguous()
    tensor = sound(Quantized(codes, parameters, scheme), f"{module}.scales")
    index = tensors.get(f"{module}.g_idx")
    if index is None:
        return tensor
    return by_group_index(tensor, index, f"{module}.g_idx", scattered=layout.scattered)


def _check_zeros(name: str, zeros: Tensor, scheme: Scheme, least_zero: int) -> None:
    middle = (1 << (scheme.bits - 1)) - least_zero
    if scheme.symmetric and bool((zeros != middle).any()):
        raise InputError(
            f"{name}: zero points differ from {middle}, although config.json says sym = true",
            "engines disagree about such a file; set sym to false if it is asymmetric",
            tensor=name,
            fault=Fault.ZERO,
        )
    if bool((zeros.int() + least_zero >= 1 << scheme.bits).any()):
        raise InputError(
            f"{name}: a stored zero point of {(1 << scheme.bits) - 1}, which readers take for "
            f"{1 << scheme.bits} or for 0",
            "the file was written with a zero point of 0, which its layout cannot hold",
            tensor=name,
            fault=Fault.ZERO,
        )


def layout_of(
    module: str, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    """Return the layout of one module from its headers and what the configuration says of it.

    Raises:
        InputError: a width that is not read, or headers that disagree with the configuration.
    """
    bits, size = config.get("bits"), config.get("group_size", -1)
    if bits not in WIDTHS or not isinstance(size, int):
        raise InputError(
            f"{module}: config.json says GPTQ with bits = {bits!r}, group_size = {size!r}",
            f"{either(WIDTHS)} bits and a number are read",
            tensor=module,
        )
    scale = scale_of(tensors, f"{module}.scales")
    words, rows = matrix(tensors, f"{module}.qweight")
    columns = words * 32 // bits
    granularity = PerGroup(size) if size > 0 else Row()
    zero = Zero.NONE if config.get("sym", True) else Zero.INT
    scheme = Scheme(f"int{bits}", granularity, zero, scale)
    whole_groups(module, columns, scheme.group_size(columns))
    names = [tensor.name for tensor in stored(module, LayerScheme(scheme), (rows, columns))]
    present = tuple(name for name in names if name in tensors or not name.endswith("g_idx"))
    scattered = config.get("desc_act")
    if not isinstance(scattered, bool | None):
        raise InputError(f"{module}: desc_act = {scattered!r}", "true or false", tensor=module)
    layout = ModuleLayout(module, LayerScheme(scheme), (rows, columns), present, scattered)
    require(tensors, announced(layout, stored))
    has_group_index(scattered, f"{module}.g_idx", scheme.groups(columns), present)
    return layout
