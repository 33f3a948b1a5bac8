"""nvfp4 and mxfp8: elements of 4 or 8 bits under block scales of 8 bits.

``nvfp4`` holds e2m1 elements (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign; the code is the bit pattern) in groups of 16. The
step of a group is ``scale / divisor`` with an e4m3 ``scale``; the float32 ``divisor`` of the matrix is chosen so that
the largest group has the largest scale, 448 (compressed-tensors calls it the global scale). Matrices that engines fuse
(q, k and v) must share it, so they are fitted together. ``mxfp8`` holds e4m3 elements in groups of 32, whose
step is ``2^(exponents - 127)`` (OCP Microscaling Formats 1.0: the exponent of the largest weight of the group minus
that of the largest element, 448). mxfp4 is in `quantforge.packers.ggml`.

``search`` minimizes the squared error over the stored scales: for nvfp4 from half to twice the covering scale (so that
a group may also use only the levels below 6, where they are denser), with a divisor that leaves headroom; for mxfp8
over neighboring exponents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from quantforge.packers import ColumnGrid
from quantforge.packers.fp8 import round_to_float8, round_values, to_float32
from quantforge.packers.hessian_refit import FixedCodes, RefitStep, ScaleMoments
from quantforge.packers.nearest_levels import count_exceeded, look_up
from quantforge.packers.row_encoding import row_chunks
from quantforge.packers.scale_search import search_levels
from quantforge.packers.tensor import KernelInputs, QuantizedTensor
from quantforge.scheme import Scheme

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # the smallest subnormal
# All e2m1 numbers in rising order, and their codes.
_LEVELS = (*(-value for value in reversed(E2M1_MAGNITUDES[1:])), *E2M1_MAGNITUDES)
_CODES = (*range(15, 8, -1), *range(8))
# Thresholds that a value has to exceed to get the next level: half-way, or the float32 before half-way where the code
# of the next level is even.
_THRESHOLDS = tuple(
    (middle if code % 2 else middle.nextafter(torch.tensor(-torch.inf, dtype=torch.float32))).item()
    for middle, code in zip(
        (torch.tensor(pair, dtype=torch.float32).mean() for pair in pairwise(_LEVELS)),
        _CODES[1:],
        strict=True,
    )
)
# Of the largest element: 6 = 1.5 * 2^2, 448 = 1.75 * 2^8.
_MAX_ELEMENT_EXPONENT = {"mxfp4": 2, "mxfp8": 8}
SEARCH_FACTORS = tuple(2.0 ** (step / 8) for step in range(-7, 9) if step)
# Ratio of the largest scale that a search may choose to the one that covers the range.
SEARCH_HEADROOM = 1.5


def encode_e2m1(scaled: Tensor) -> Tensor:
    """Return the nearest codes of values in units of their step, uint8; ties go to the even code, values clamp at 6."""
    return look_up(torch.tensor(_CODES, dtype=torch.uint8), count_exceeded(scaled, _THRESHOLDS))


def decode_e2m1(codes: Tensor) -> Tensor:
    """Return the float32 values of e2m1 codes."""
    table = torch.tensor(
        [*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)], dtype=torch.float32
    )
    if codes.dim() != 2:
        return look_up(table, codes)
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for rows in row_chunks(codes):
        values[rows] = look_up(table, codes[rows])
    return values


def round_to_e2m1(scaled: Tensor) -> Tensor:
    """Round values in units of their step to the nearest e2m1 number."""
    return look_up(torch.tensor(_LEVELS, dtype=torch.float32), count_exceeded(scaled, _THRESHOLDS))


def e8m0_exponents(absmax: Tensor, grid: str) -> Tensor:
    """Return the biased exponents (uint8) for groups with the largest magnitude ``absmax``; 0 for a group of zeros."""
    exponent = absmax.frexp().exponent - 1 - _MAX_ELEMENT_EXPONENT[grid] + 127
    return torch.where(absmax > 0, exponent.clamp(0, 254), 0).to(torch.uint8)


def decode_e8m0(exponents: Tensor) -> Tensor:
    """Return ``2^(exponents - 127)`` for ``exponents`` 0..254 as exact float32; for 0 the result is subnormal."""
    bits = exponents.int() << 23
    return bits.masked_fill_(bits == 0, 1 << 22).view(torch.float32)


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose ``scales`` and ``divisor``, or ``exponents``, for ``weight`` ``[out, in]``; see `Packer`."""
    groups = weight.reshape(len(weight), scheme.groups(weight.shape[1]), -1)
    group_absmax = groups.abs().amax(-1)
    weights = None if importance is None else importance.view(groups.shape[1:])
    if scheme.grid == "mxfp8":
        return {"exponents": _choose_exponents(groups, group_absmax, weights, search=search)}
    matrix_absmax = group_absmax.amax().clamp(min=torch.finfo(torch.float32).tiny * E4M3_MAX)
    divisor = (E4M3_MAX * E2M1_MAX / (SEARCH_HEADROOM if search else 1.0) / matrix_absmax).view(
        1, 1
    )
    divisor = divisor.clamp(max=torch.finfo(torch.float32).max)
    if search:
        return {"scales": _search_scales(groups, divisor, weights), "divisor": divisor}
    return {"scales": round_scales_to_e4m3(group_absmax / E2M1_MAX * divisor), "divisor": divisor}


def fit_with_divisor(
    weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, importance: Tensor
) -> dict[str, Tensor]:
    """Search the ``scales`` of another ``weight`` ``[out, in]`` with the divisor of ``parameters``."""
    groups = weight.reshape(len(weight), scheme.groups(weight.shape[1]), -1)
    divisor, weights = parameters["divisor"], importance.view(groups.shape[1:])
    return {"scales": _search_scales(groups, divisor, weights), "divisor": divisor}


def _search_scales(groups: Tensor, divisor: Tensor, weights: Tensor | None) -> Tensor:
    covering_steps = (
        round_scales_to_e4m3(groups.abs().amax(-1) / E2M1_MAX * divisor).float() / divisor
    )
    round_to_stored = partial(_round_steps, divisor)
    best_steps = search_levels(
        groups, covering_steps, weights, round_to_e2m1, round_to_stored, SEARCH_FACTORS
    )
    return round_scales_to_e4m3(best_steps * divisor)


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the nearest codes of ``weight`` ``[out, n]``, the given columns of the matrix: uint8, or float8."""
    steps = _group_steps(parameters, scheme, columns)
    dtype = torch.uint8 if scheme.grid == "nvfp4" else torch.float8_e4m3fn
    codes = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for rows in row_chunks(weight):
        grouped = weight[rows].reshape(len(weight[rows]), steps.shape[1], -1)
        scaled = (grouped / steps[rows].unsqueeze(-1)).view(weight[rows].shape)
        codes[rows] = (
            encode_e2m1(scaled) if scheme.grid == "nvfp4" else round_to_float8(scaled, "fp8_e4m3")
        )
    return codes


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return ``element * step`` in float32; ``columns`` as in `encode`."""
    values = decode_e2m1(codes) if scheme.grid == "nvfp4" else to_float32(codes)
    steps = _group_steps(parameters, scheme, columns)
    return values.view(len(values), steps.shape[1], -1).mul_(steps.unsqueeze(-1)).view(codes.shape)


def round_scales_to_e4m3(scales: Tensor) -> Tensor:
    """Round positive scales to e4m3, never to 0 or to more than the largest number."""
    return scales.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)


def _round_steps(divisor: Tensor, steps: Tensor) -> Tensor:
    """Round steps to the values that a stored scale can represent."""
    return round_scales_to_e4m3(steps * divisor).float() / divisor


def _choose_exponents(
    groups: Tensor, group_absmax: Tensor, importance: Tensor | None, *, search: bool
) -> Tensor:
    exponents = e8m0_exponents(group_absmax, "mxfp8")
    if not search:
        return exponents

    def round_to_powers(steps: Tensor) -> Tensor:
        nearest = steps.clamp(min=2.0**-127).log2().round().clamp(-127, 127)
        return decode_e8m0((nearest + 127).to(torch.uint8))

    initial_steps = decode_e8m0(exponents)
    round_to_levels = partial(round_values, grid="fp8_e4m3")
    best_steps = search_levels(
        groups, initial_steps, importance, round_to_levels, round_to_powers, (0.5, 2.0)
    )
    return torch.where(group_absmax > 0, best_steps.log2().round() + 127, 0).to(torch.uint8)


def _group_steps(parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None) -> Tensor:
    """Return the steps of all groups, of a single one, or of each of ``columns``."""
    key = "scales" if scheme.grid == "nvfp4" else "exponents"
    scales = parameters[key]
    if columns is not None:
        size = scheme.group_size(0)
        first_group, last_group = columns.start // size, (columns.stop - 1) // size
        if first_group == last_group:
            scales = scales[:, first_group : first_group + 1]
        else:
            column_indices = torch.arange(columns.start, columns.stop, device=scales.device)
            scales = scales[:, column_indices // size]
    if scheme.grid == "nvfp4":
        return scales.float() / parameters["divisor"]
    return decode_e8m0(scales)


def column_grid(
    parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor
) -> ColumnGrid | None:
    """Return the values that ``columns`` can take; None for mxfp8, whose levels are too many to count thresholds."""
    if scheme.grid != "nvfp4":
        return None
    steps = (parameters["scales"].float() / parameters["divisor"]).T
    scales = steps[columns // scheme.group_size(0)]
    zeros = torch.zeros_like(scales)
    return ColumnGrid(scales, zeros, zeros, (0, 15), torch.uint8, _level_table())


@cache
def _level_table() -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``table`` of `ColumnGrid` for e2m1, in which a value at a threshold belongs to the level above it."""
    thresholds = torch.tensor(_THRESHOLDS, dtype=torch.float32)
    return (
        thresholds.nextafter(torch.tensor(torch.inf)),
        torch.tensor(_LEVELS, dtype=torch.float32),
        torch.tensor(_CODES, dtype=torch.float32),
    )


def refit_steps(scheme: Scheme, in_features: int) -> Sequence[RefitStep]:
    """Return one step for nvfp4, which fits the scale of a group while the divisor is fixed; none for mxfp8."""
    if scheme.grid != "nvfp4":
        return ()
    return (RefitStep(scheme.group_size(in_features), _refit_scale),)


def _refit_scale(parameters: dict[str, Tensor], fixed: FixedCodes) -> Tensor:
    divisor = parameters["divisor"][0].double()
    scales = parameters["scales"][:, fixed.group]
    moments, old_step = ScaleMoments(decode_e2m1(fixed.codes), fixed), scales / divisor
    candidate = round_scales_to_e4m3(moments.fit(old_step) * divisor).to(scales)
    gain = moments.gain(old_step, candidate / divisor)
    is_better = gain > 0
    parameters["scales"][:, fixed.group] = torch.where(is_better, candidate, scales)
    return torch.where(is_better, gain, 0)


def kernel_inputs(tensor: QuantizedTensor) -> KernelInputs:
    """Return the tensor as the kernels take it: exponents become powers of two, the divisor becomes a factor ``d``."""
    parameters = tensor.parameters
    if "exponents" in parameters:
        scales = decode_e8m0(parameters["exponents"]).bfloat16()
        return KernelInputs("fp8", tensor.codes.view(torch.uint8), {"scales": scales})
    inverse_divisor = parameters["divisor"].float().reciprocal().expand(len(tensor.codes), 1)
    table = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    kernel_parameters = {"scales": parameters["scales"], "d": inverse_divisor, "table": table}
    return KernelInputs("table", tensor.codes, kernel_parameters, tensor.shape[1], "e4m3")
