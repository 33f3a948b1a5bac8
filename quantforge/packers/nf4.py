"""The 4-bit codebooks of bitsandbytes: NF4 and FP4, in groups that share one absolute maximum.

A code is an index into 16 fixed levels in ``[-1, 1]``, and stands for ``level * absmax``. NF4's levels are quantiles of
the normal distribution, with an exact 0 (Dettmers et al., arXiv 2305.14314, appendix E); FP4's have a sign, two bits of
exponent and one of mantissa, and are indexed by bit pattern. The constants are the published ones; the rounding rule is
that of bitsandbytes 0.50: thresholds are half-way between levels, and a value on a threshold goes to the lower level.

The group's scale is stored as float32 (``scales``), or is itself quantized (``DOUBLE``, "double quantization"): the
mean of all scales (``offset``) is subtracted, and the rest is rounded, in runs of 256 scales (row by row) with their
own absolute maximum (``nested``), to the 8-bit levels of `dynamic_map`. Without a search the bytes are those of
bitsandbytes, which chooses codes with the absolute maxima before they are quantized. (Its CPU kernel finds the nested
levels in a coarse table and takes a level next to the nearest one for about one scale in 500; its code for other
devices takes the nearest, as is done here.) After a search, or in GPTQ, codes are chosen with the decoded scale, which
is more accurate.

``search`` minimizes the squared error instead of covering the range. With float32 scales it may mirror a group by
a negative scale, because NF4 has one more level on its positive side.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from quantforge.grids import DOUBLE_QUANT_GROUP, PerGroup, ScaleType
from quantforge.numerics.threads import one_thread
from quantforge.packers import row_encoding as rows_loops
from quantforge.packers.hessian_refit import RefitStep
from quantforge.packers.nearest_levels import count_exceeded, look_up
from quantforge.packers.scale_search import search_levels
from quantforge.packers.tensor import KernelInputs, QuantizedTensor
from quantforge.scheme import Scheme

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(sign * level / 12 for sign in (1.0, -1.0) for level in _FP4_TWELFTHS)
CODEBOOKS: Mapping[str, tuple[float, ...]] = {"nf4": NF4, "fp4": FP4}
MIN_ABSMAX = 1e-38  # what a group of zeros is divided by
SEARCH_FACTORS = tuple(1.06 - 0.035 * step for step in range(13))


def codebook(grid: str) -> Tensor:
    """Return the 16 levels in the order of their codes, float32."""
    return torch.tensor(CODEBOOKS[grid], dtype=torch.float32)


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose the scales of ``weight`` ``[out, in]``; see the module and `Packer`."""
    groups = weight.reshape(len(weight), scheme.groups(weight.shape[1]), -1)
    scales = rows_loops.group_absmax(weight, groups.shape[1])
    if search:
        signs = (1.0,) if scheme.scale is ScaleType.DOUBLE else (1.0, -1.0)
        weights = None if importance is None else importance.view(groups.shape[1:])
        initial_scales = scales.clamp(min=MIN_ABSMAX)
        searched_scales = search_levels(
            groups,
            initial_scales,
            weights,
            functools.partial(_nearest_levels, grid=scheme.grid),
            lambda fitted: fitted,
            [sign * factor for sign in signs for factor in SEARCH_FACTORS],
        )
        scales = torch.where(scales > 0, searched_scales, scales)
    return quantize_scales(scales) if scheme.scale is ScaleType.DOUBLE else {"scales": scales}


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the nearest codes, uint8 in 0..15; ``columns`` are the positions of ``weight`` in the whole matrix."""
    scales = _rounding_scales(weight, parameters, scheme, columns)
    if rows_loops.supports(weight, columns):
        codes = rows_loops.encode_by_thresholds(
            weight, _safe_reciprocal(scales), _thresholds(scheme.grid)
        )
        return codes if scheme.grid == "nf4" else look_up(_codes_by_rank(scheme.grid), codes)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for rows in rows_loops.row_chunks(weight):
        codes[rows] = _level_ranks(_normalize(weight[rows], scales[rows]), scheme.grid)
    return codes if scheme.grid == "nf4" else look_up(_codes_by_rank(scheme.grid), codes)


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return ``level * scale`` in float32; ``columns`` as in `encode`."""
    table = codebook(scheme.grid)
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for rows in rows_loops.row_chunks(codes):
        values[rows] = look_up(table, codes[rows])
    scales = _group_scales(parameters, scheme, columns)
    grouped = values.view(len(values), scales.shape[1], -1)
    return grouped.mul_(scales.unsqueeze(-1)).view_as(values)


def quantize_scales(scales: Tensor) -> dict[str, Tensor]:
    """Quantize scales ``[out, groups]`` to uint8 ``scales``, ``nested`` ``[1, runs]`` and ``offset`` ``[1, 1]``."""
    with one_thread():  # a sum in float32: that of bitsandbytes on one thread
        offset = scales.flatten().mean()
    centered = (scales - offset).flatten()
    scale_runs = torch.nn.functional.pad(centered, (0, -len(centered) % DOUBLE_QUANT_GROUP)).view(
        -1, DOUBLE_QUANT_GROUP
    )
    nested = scale_runs.abs().amax(1)
    levels = dynamic_map().to(scales.device)
    thresholds = (levels[1:] + levels[:-1]) / 2
    scaled = scale_runs * nested.clamp(min=MIN_ABSMAX).reciprocal().unsqueeze(1)
    codes = torch.bucketize(scaled, thresholds).to(torch.uint8).flatten()[: len(centered)]
    return {
        "scales": codes.view_as(scales),
        "nested": nested.view(1, -1),
        "offset": offset.view(1, 1),
    }


def dequantize_scales(parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the float32 scales ``[out, groups]`` that `quantize_scales` encoded."""
    codes = parameters["scales"]
    nested = parameters["nested"].flatten().repeat_interleave(DOUBLE_QUANT_GROUP)[: codes.numel()]
    values = dynamic_map().to(codes.device)[codes.long()] * nested.view(codes.shape)
    return values + parameters["offset"]


@functools.cache
def dynamic_map() -> Tensor:
    """Return the 256 sorted levels of bitsandbytes' signed dynamic map (Dettmers, arXiv 1511.04561, section 2).

    For each of seven powers of ten they are the midpoints of equal steps from 0.1 to 1, twice as many for each larger
    power.
    """
    levels = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        midpoints = (edges[:-1] + edges[1:]) / 2
        positive = (10.0 ** (exponent - 6) * midpoints).tolist()
        levels += [*positive, *(-value for value in positive)]
    return torch.tensor(sorted(levels), dtype=torch.float32)


@functools.cache
def _sorted_levels(grid: str) -> tuple[tuple[float, int], ...]:
    """Return the levels in rising order with their codes."""
    return tuple(sorted((level, code) for code, level in enumerate(CODEBOOKS[grid])))


@functools.cache
def _thresholds(grid: str) -> tuple[float, ...]:
    levels = torch.tensor(
        [level for level, _ in _sorted_levels(grid)], dtype=torch.float32
    ).tolist()
    return tuple(
        torch.tensor(
            [(low + high) / 2 for low, high in pairwise(levels)], dtype=torch.float32
        ).tolist()
    )


def _codes_by_rank(grid: str) -> Tensor:
    """Return the code of each level, levels in rising order."""
    return torch.tensor([code for _, code in _sorted_levels(grid)], dtype=torch.uint8)


def _level_ranks(scaled: Tensor, grid: str) -> Tensor:
    """Return the index of the nearest level among the sorted levels, uint8."""
    return count_exceeded(scaled, _thresholds(grid))


def _nearest_levels(scaled: Tensor, grid: str) -> Tensor:
    return look_up(
        torch.tensor([level for level, _ in _sorted_levels(grid)], dtype=torch.float32),
        _level_ranks(scaled, grid),
    )


def _safe_reciprocal(scales: Tensor) -> Tensor:
    return torch.where(scales.abs() < MIN_ABSMAX, MIN_ABSMAX, scales).reciprocal()


def _normalize(weight: Tensor, scales: Tensor) -> Tensor:
    """Divide weights by their scales."""
    inverse = _safe_reciprocal(scales)
    grouped = weight.reshape(len(weight), inverse.shape[1], -1)
    return (grouped * inverse.unsqueeze(-1)).view(weight.shape)


def _rounding_scales(
    weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None
) -> Tensor:
    """Return the scales that codes are chosen with: the unquantized maxima for double quantization without a search."""
    if scheme.scale is ScaleType.DOUBLE and columns is None:
        absmax = rows_loops.group_absmax(weight, scheme.groups(weight.shape[1]))
        requantized = quantize_scales(absmax)
        if all(torch.equal(requantized[name], parameters[name]) for name in requantized):
            return absmax
    return _group_scales(parameters, scheme, columns)


def _group_scales(
    parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None
) -> Tensor:
    """Return float32 scales of all groups, of a single one, or of each of ``columns``."""
    is_double_quantized = scheme.scale is ScaleType.DOUBLE
    scales = parameters["scales"]
    if columns is None:
        return dequantize_scales(parameters) if is_double_quantized else scales
    assert isinstance(scheme.granularity, PerGroup)
    size = scheme.granularity.size
    first_group, last_group = columns.start // size, (columns.stop - 1) // size
    group_of_column = torch.arange(columns.start, columns.stop, device=scales.device) // size
    groups = group_of_column[:1] if first_group == last_group else group_of_column
    if not is_double_quantized:
        return scales[:, groups]
    rows = torch.arange(len(scales), device=scales.device).unsqueeze(1)
    nested = parameters["nested"].flatten()[(rows * scales.shape[1] + groups) // DOUBLE_QUANT_GROUP]
    values = dynamic_map().to(scales.device)[scales[:, groups].long()] * nested
    return values + parameters["offset"]


def column_grid(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> None:
    """Return None: quantizers call `encode` for each column."""


def refit_steps(scheme: Scheme, in_features: int) -> Sequence[RefitStep]:  # noqa: ARG001
    """Return no steps: scales stay as they were fitted."""
    return ()


def kernel_inputs(tensor: QuantizedTensor) -> KernelInputs:
    """Return the tensor as the kernels take it; double-quantized scales become float32, 0.37 bits per weight more."""
    is_double_quantized = tensor.scheme.scale is ScaleType.DOUBLE
    scales = (
        dequantize_scales(tensor.parameters) if is_double_quantized else tensor.parameters["scales"]
    )
    parameters = {"scales": scales, "table": codebook(tensor.scheme.grid)}
    return KernelInputs("table", tensor.codes, parameters)
