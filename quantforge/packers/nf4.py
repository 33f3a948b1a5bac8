"""The 4-bit codebooks of bitsandbytes: NF4 and FP4, in groups that share one absolute maximum.

A code is an index into 16 fixed levels in ``[-1, 1]``, and stands for ``level * absmax``. NF4's levels are quantiles of
the normal distribution, with an exact 0 (Dettmers et al., arXiv 2305.14314, appendix E); FP4's are a sign, two bits of
exponent and one of mantissa, indexed by bit pattern. The published constants are restated here; the rounding rule is
that of bitsandbytes 0.50: thresholds half-way between levels, a value on one goes to the lower level.

The group's scale is stored as float32 (``scales``), or again quantized (``DOUBLE``, "double quantization"): less their
mean (``offset``), in runs of 256 scales (row by row) with their own absolute maximum (``nested``), to the 8-bit levels
of `dynamic_map`. Without a search the bytes are those of bitsandbytes: codes are chosen under the maxima before these
were quantized. (Its CPU kernel looks the nested levels up in a coarse table and takes one that is near for one scale
in some 500; its code for other devices takes the nearest, as is done here.) After a search, or in GPTQ, codes are
chosen under the scale as it will be decoded, which is nearer.

``search`` minimises the squared error instead of covering the range. With float32 scales it may turn a group around by
a negative scale, because NF4 has one level more on its positive side.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from quantforge.grids import DOUBLE_QUANT_GROUP, PerGroup, ScaleType
from quantforge.numerics.threads import one_thread
from quantforge.packers import Points
from quantforge.packers import row_encoding as rows_loops
from quantforge.packers.hessian_refit import Refit
from quantforge.packers.nearest_levels import count_above, look_up
from quantforge.packers.scale_search import search_levels
from quantforge.packers.tensor import KernelTerms, QuantizedTensor
from quantforge.scheme import Scheme

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(sign * level / 12 for sign in (1.0, -1.0) for level in _FP4_TWELFTHS)
BOOKS: Mapping[str, tuple[float, ...]] = {"nf4": NF4, "fp4": FP4}
LEAST = 1e-38  # what a group of zeros is divided by
FACTORS = tuple(1.06 - 0.035 * step for step in range(13))


def book(grid: str) -> Tensor:
    """Return the 16 levels by code, float32."""
    return torch.tensor(BOOKS[grid], dtype=torch.float32)


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose the scales of ``weight`` ``[out, in]``: see the module, and `Packer`."""
    groups = weight.reshape(len(weight), scheme.groups(weight.shape[1]), -1)
    scales = rows_loops.peaks(weight, groups.shape[1])
    if search:
        signs = (1.0,) if scheme.scale is ScaleType.DOUBLE else (1.0, -1.0)
        weights = None if importance is None else importance.view(groups.shape[1:])
        start = scales.clamp(min=LEAST)
        found = search_levels(
            groups,
            start,
            weights,
            functools.partial(_levels, grid=scheme.grid),
            lambda fitted: fitted,
            [sign * factor for sign in signs for factor in FACTORS],
        )
        scales = torch.where(scales > 0, found, scales)
    return nest(scales) if scheme.scale is ScaleType.DOUBLE else {"scales": scales}


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the nearest codes, uint8 in 0..15; ``columns`` is the run of columns that ``weight`` holds."""
    scales = _rounding_scales(weight, parameters, scheme, columns)
    if rows_loops.suits(weight, columns):
        codes = rows_loops.ranks(weight, _inverse(scales), _thresholds(scheme.grid))
        return codes if scheme.grid == "nf4" else look_up(_order(scheme.grid), codes)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for rows in rows_loops.chunks(weight):
        codes[rows] = _ranks(_divided(weight[rows], scales[rows]), scheme.grid)
    return codes if scheme.grid == "nf4" else look_up(_order(scheme.grid), codes)


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return ``level * scale`` in float32; ``columns`` as in `encode`."""
    table = book(scheme.grid)
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for rows in rows_loops.chunks(codes):
        values[rows] = look_up(table, codes[rows])
    scales = _scales(parameters, scheme, columns)
    grouped = values.view(len(values), scales.shape[1], -1)
    return grouped.mul_(scales.unsqueeze(-1)).view_as(values)


def nest(scales: Tensor) -> dict[str, Tensor]:
    """Quantize scales ``[out, groups]`` to uint8 ``scales``, ``nested`` ``[1, runs]`` and ``offset`` ``[1, 1]``."""
    with one_thread():  # a sum in float32: that of bitsandbytes on one thread
        offset = scales.flatten().mean()
    flat = (scales - offset).flatten()
    runs = torch.nn.functional.pad(flat, (0, -len(flat) % DOUBLE_QUANT_GROUP)).view(
        -1, DOUBLE_QUANT_GROUP
    )
    nested = runs.abs().amax(1)
    levels = dynamic_map().to(scales.device)
    thresholds = (levels[1:] + levels[:-1]) / 2
    scaled = runs * nested.clamp(min=LEAST).reciprocal().unsqueeze(1)
    codes = torch.bucketize(scaled, thresholds).to(torch.uint8).flatten()[: len(flat)]
    return {
        "scales": codes.view_as(scales),
        "nested": nested.view(1, -1),
        "offset": offset.view(1, 1),
    }


def unnest(parameters: Mapping[str, Tensor]) -> Tensor:
    """Return float32 scales ``[out, groups]`` of what `nest` gave."""
    codes = parameters["scales"]
    nested = parameters["nested"].flatten().repeat_interleave(DOUBLE_QUANT_GROUP)[: codes.numel()]
    values = dynamic_map().to(codes.device)[codes.long()] * nested.view(codes.shape)
    return values + parameters["offset"]


@functools.cache
def dynamic_map() -> Tensor:
    """Return the 256 sorted levels of bitsandbytes' signed dynamic map (Dettmers, arXiv 1511.04561, section 2).

    For each of seven powers of ten, the midpoints of equal steps from 0.1 to 1, twice as many for each larger power.
    """
    levels = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        positive = (10.0 ** (power - 6) * middles).tolist()
        levels += [*positive, *(-value for value in positive)]
    return torch.tensor(sorted(levels), dtype=torch.float32)


@functools.cache
def _sorted(grid: str) -> tuple[tuple[float, int], ...]:
    """Return the levels in rising order with their codes."""
    return tuple(sorted((level, code) for code, level in enumerate(BOOKS[grid])))


@functools.cache
def _thresholds(grid: str) -> tuple[float, ...]:
    levels = torch.tensor([level for level, _ in _sorted(grid)], dtype=torch.float32).tolist()
    return tuple(
        torch.tensor(
            [(low + high) / 2 for low, high in pairwise(levels)], dtype=torch.float32
        ).tolist()
    )


def _order(grid: str) -> Tensor:
    """Return the code of each rank."""
    return torch.tensor([code for _, code in _sorted(grid)], dtype=torch.uint8)


def _ranks(scaled: Tensor, grid: str) -> Tensor:
    """Return how many thresholds each value exceeds: the rank of its level, uint8."""
    return count_above(scaled, _thresholds(grid))


def _levels(scaled: Tensor, grid: str) -> Tensor:
    return look_up(
        torch.tensor([level for level, _ in _sorted(grid)], dtype=torch.float32),
        _ranks(scaled, grid),
    )


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales.abs() < LEAST, LEAST, scales).reciprocal()


def _divided(weight: Tensor, scales: Tensor) -> Tensor:
    """Return weights in units of their scale."""
    inverse = _inverse(scales)
    grouped = weight.reshape(len(weight), inverse.shape[1], -1)
    return (grouped * inverse.unsqueeze(-1)).view(weight.shape)


def _rounding_scales(
    weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None
) -> Tensor:
    """Return the scales that codes are chosen under: of plain double quantization the maxima themselves."""
    if scheme.scale is ScaleType.DOUBLE and columns is None:
        maxima = rows_loops.peaks(weight, scheme.groups(weight.shape[1]))
        plain = nest(maxima)
        if all(torch.equal(plain[name], parameters[name]) for name in plain):
            return maxima
    return _scales(parameters, scheme, columns)


def _scales(parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None) -> Tensor:
    """Return float32 scales of all groups, of one, or of each column of the run."""
    double = scheme.scale is ScaleType.DOUBLE
    scales = parameters["scales"]
    if columns is None:
        return unnest(parameters) if double else scales
    assert isinstance(scheme.granularity, PerGroup)
    size = scheme.granularity.size
    first, last = columns.start // size, (columns.stop - 1) // size
    run = torch.arange(columns.start, columns.stop, device=scales.device) // size
    chosen = run[:1] if first == last else run
    if not double:
        return scales[:, chosen]
    rows = torch.arange(len(scales), device=scales.device).unsqueeze(1)
    nested = parameters["nested"].flatten()[(rows * scales.shape[1] + chosen) // DOUBLE_QUANT_GROUP]
    values = dynamic_map().to(scales.device)[scales[:, chosen].long()] * nested
    return values + parameters["offset"]


def points(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> Points | None:  # noqa: ARG001
    """Return None: rounders call `encode` for every column."""
    return None


def refits(scheme: Scheme, in_features: int) -> Sequence[Refit]:  # noqa: ARG001
    """Return nothing: scales stay as they are fitted."""
    return ()


def kernel_terms(tensor: QuantizedTensor) -> KernelTerms:
    """Return the terms of the kernels; scales that are nested are spelled out in float32, 0.37 bits per weight more."""
    double = tensor.scheme.scale is ScaleType.DOUBLE
    scales = unnest(tensor.parameters) if double else tensor.parameters["scales"]
    parameters = {"scales": scales, "table": book(tensor.scheme.grid)}
    return KernelTerms("table", tensor.codes, parameters)
