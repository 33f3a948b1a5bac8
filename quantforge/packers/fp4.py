"""nvfp4 and mxfp8: elements of 4 or 8 bits under block scales of 8 bits.

``nvfp4`` holds e2m1 elements (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign; the code is the bit pattern) in groups of 16. The
step of a group is ``scale / divisor`` with an e4m3 ``scale``; the float32 ``divisor`` of the matrix is chosen so that
the largest group takes the largest scale, 448 (compressed-tensors calls it the global scale). Matrices that engines
join (q, k and v) have to share it, so that they are fitted as one. ``mxfp8`` holds e4m3 elements in groups of 32, whose
step is ``2^(exponents - 127)`` (OCP Microscaling Formats 1.0: the exponent of the largest weight of the group, less
that of the largest element, 448). mxfp4 is in `quantforge.packers.ggml`.

``search`` minimises the squared error over the stored scales: of nvfp4 from half to twice the covering scale (so that a
group may also use the levels below 6 only, where they are denser), with a divisor that leaves room above; of mxfp8
over neighbouring exponents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from quantforge.packers import Points
from quantforge.packers.fp8 import cast, rounded, widened
from quantforge.packers.hessian_refit import Held, Refit, ScaleMoments
from quantforge.packers.nearest_levels import count_above, look_up
from quantforge.packers.row_encoding import chunks
from quantforge.packers.scale_search import search_levels
from quantforge.packers.tensor import KernelTerms, QuantizedTensor
from quantforge.scheme import Scheme

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_LARGEST = 6.0
E4M3_LARGEST = 448.0
E4M3_LEAST = 2.0**-9  # the smallest subnormal
_LEVELS = (*(-value for value in reversed(E2M1[1:])), *E2M1)  # in rising order
_CODES = (*range(15, 8, -1), *range(8))  # of these
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
_EXPONENT = {
    "mxfp4": 2,
    "mxfp8": 8,
}  # of the largest number of the elements: 6 = 1.5 * 2^2, 448 = 1.75 * 2^8
FACTORS = tuple(2.0 ** (step / 8) for step in range(-7, 9) if step)
ROOM = 1.5  # the largest scale that a search may ask for, over the one that covers the range


def codes_e2m1(scaled: Tensor) -> Tensor:
    """Return the nearest codes of values in units of their step, uint8; beyond 6 is 6, ties go to the even code."""
    return look_up(torch.tensor(_CODES, dtype=torch.uint8), count_above(scaled, _THRESHOLDS))


def values_e2m1(codes: Tensor) -> Tensor:
    """Return the float32 elements of codes."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float32)
    if codes.dim() != 2:
        return look_up(table, codes)
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for rows in chunks(codes):
        values[rows] = look_up(table, codes[rows])
    return values


def nearest_e2m1(scaled: Tensor) -> Tensor:
    """Round values in units of their step to e2m1."""
    return look_up(torch.tensor(_LEVELS, dtype=torch.float32), count_above(scaled, _THRESHOLDS))


def e8m0_exponents(peak: Tensor, grid: str) -> Tensor:
    """Return the biased exponents (uint8) for the largest magnitude ``peak`` of each group; 0 for a group of zeros."""
    exponent = peak.frexp().exponent - 1 - _EXPONENT[grid] + 127
    return torch.where(peak > 0, exponent.clamp(0, 254), 0).to(torch.uint8)


def power_of_two(exponents: Tensor) -> Tensor:
    """Return ``2^(exponents - 127)`` of ``exponents`` 0..254 as float32, exactly: the least of them is subnormal."""
    bits = exponents.int() << 23
    return bits.masked_fill_(bits == 0, 1 << 22).view(torch.float32)


def fit(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, search: bool = False
) -> dict[str, Tensor]:
    """Choose ``scales`` and ``divisor``, or ``exponents``, for ``weight`` ``[out, in]``; see `Packer`."""
    groups = weight.reshape(len(weight), scheme.groups(weight.shape[1]), -1)
    peaks = groups.abs().amax(-1)
    weights = None if importance is None else importance.view(groups.shape[1:])
    if scheme.grid == "mxfp8":
        return {"exponents": _exponents(groups, peaks, weights, search=search)}
    peak = peaks.amax().clamp(min=torch.finfo(torch.float32).tiny * E4M3_LARGEST)
    divisor = (E4M3_LARGEST * E2M1_LARGEST / (ROOM if search else 1.0) / peak).view(1, 1)
    divisor = divisor.clamp(max=torch.finfo(torch.float32).max)
    if search:
        return {"scales": _searched(groups, divisor, weights), "divisor": divisor}
    return {"scales": nearest_scales(peaks / E2M1_LARGEST * divisor), "divisor": divisor}


def fit_under(
    weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, importance: Tensor
) -> dict[str, Tensor]:
    """Search the ``scales`` of another ``weight`` ``[out, in]`` under the divisor of ``parameters``."""
    groups = weight.reshape(len(weight), scheme.groups(weight.shape[1]), -1)
    divisor, weights = parameters["divisor"], importance.view(groups.shape[1:])
    return {"scales": _searched(groups, divisor, weights), "divisor": divisor}


def _searched(groups: Tensor, divisor: Tensor, weights: Tensor | None) -> Tensor:
    covering = nearest_scales(groups.abs().amax(-1) / E2M1_LARGEST * divisor).float() / divisor
    stored = partial(_steps, divisor)
    found = search_levels(groups, covering, weights, nearest_e2m1, stored, FACTORS)
    return nearest_scales(found * divisor)


def encode(
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return the nearest codes of ``weight`` ``[out, n]``, the run ``columns`` of the matrix: uint8, or float8."""
    steps = _steps_of(parameters, scheme, columns)
    kind = torch.uint8 if scheme.grid == "nvfp4" else torch.float8_e4m3fn
    codes = torch.empty(weight.shape, dtype=kind, device=weight.device)
    for rows in chunks(weight):
        grouped = weight[rows].reshape(len(weight[rows]), steps.shape[1], -1)
        scaled = (grouped / steps[rows].unsqueeze(-1)).view(weight[rows].shape)
        codes[rows] = codes_e2m1(scaled) if scheme.grid == "nvfp4" else cast(scaled, "fp8_e4m3")
    return codes


def decode(
    codes: Tensor,
    parameters: Mapping[str, Tensor],
    scheme: Scheme,
    columns: slice | None = None,
) -> Tensor:
    """Return ``element * step`` in float32; ``columns`` as in `encode`."""
    values = values_e2m1(codes) if scheme.grid == "nvfp4" else widened(codes)
    steps = _steps_of(parameters, scheme, columns)
    return values.view(len(values), steps.shape[1], -1).mul_(steps.unsqueeze(-1)).view(codes.shape)


def nearest_scales(scales: Tensor) -> Tensor:
    """Round positive scales to e4m3, never to 0 and never beyond the largest."""
    return scales.clamp(E4M3_LEAST, E4M3_LARGEST).to(torch.float8_e4m3fn)


def _steps(divisor: Tensor, steps: Tensor) -> Tensor:
    """Round steps to what a stored scale makes of them."""
    return nearest_scales(steps * divisor).float() / divisor


def _exponents(groups: Tensor, peaks: Tensor, importance: Tensor | None, *, search: bool) -> Tensor:
    exponents = e8m0_exponents(peaks, "mxfp8")
    if not search:
        return exponents

    def stored(steps: Tensor) -> Tensor:
        nearest = steps.clamp(min=2.0**-127).log2().round().clamp(-127, 127)
        return power_of_two((nearest + 127).to(torch.uint8))

    start = power_of_two(exponents)
    levels = partial(rounded, grid="fp8_e4m3")
    found = search_levels(groups, start, importance, levels, stored, (0.5, 2.0))
    return torch.where(peaks > 0, found.log2().round() + 127, 0).to(torch.uint8)


def _steps_of(parameters: Mapping[str, Tensor], scheme: Scheme, columns: slice | None) -> Tensor:
    """Return the steps of all groups, of one, or of each column of the run."""
    key = "scales" if scheme.grid == "nvfp4" else "exponents"
    chosen = parameters[key]
    if columns is not None:
        size = scheme.group_size(0)
        first, last = columns.start // size, (columns.stop - 1) // size
        if first == last:
            chosen = chosen[:, first : first + 1]
        else:
            run = torch.arange(columns.start, columns.stop, device=chosen.device)
            chosen = chosen[:, run // size]
    if scheme.grid == "nvfp4":
        return chosen.float() / parameters["divisor"]
    return power_of_two(chosen)


def points(parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor) -> Points | None:
    """Return the values that ``columns`` can take; None of mxfp8: its levels are too many to count thresholds."""
    if scheme.grid != "nvfp4":
        return None
    steps = (parameters["scales"].float() / parameters["divisor"]).T
    scales = steps[columns // scheme.group_size(0)]
    none = torch.zeros_like(scales)
    return Points(scales, none, none, (0, 15), torch.uint8, _table())


@cache
def _table() -> tuple[Tensor, Tensor, Tensor]:
    """Return the table of `Points`, in which a value at a threshold belongs above it."""
    thresholds = torch.tensor(_THRESHOLDS, dtype=torch.float32)
    return (
        thresholds.nextafter(torch.tensor(torch.inf)),
        torch.tensor(_LEVELS, dtype=torch.float32),
        torch.tensor(_CODES, dtype=torch.float32),
    )


def refits(scheme: Scheme, in_features: int) -> Sequence[Refit]:
    """Return one step of nvfp4: it fits the scale of a group under the divisor; nothing of mxfp8."""
    if scheme.grid != "nvfp4":
        return ()
    return (Refit(scheme.group_size(in_features), _refit),)


def _refit(parameters: dict[str, Tensor], held: Held) -> Tensor:
    divisor = parameters["divisor"][0].double()
    scales = parameters["scales"][:, held.group]
    moments, old = ScaleMoments(values_e2m1(held.codes), held), scales / divisor
    fitted = nearest_scales(moments.fit(old) * divisor).to(scales)
    gain = moments.gain(old, fitted / divisor)
    better = gain > 0
    parameters["scales"][:, held.group] = torch.where(better, fitted, scales)
    return torch.where(better, gain, 0)


def kernel_terms(tensor: QuantizedTensor) -> KernelTerms:
    """Return the terms of the kernels: exponents as powers of two, scales under the divisor of the whole matrix."""
    parameters = tensor.parameters
    if "exponents" in parameters:
        scales = power_of_two(parameters["exponents"]).bfloat16()
        return KernelTerms("fp8", tensor.codes.view(torch.uint8), {"scales": scales})
    d = parameters["divisor"].float().reciprocal().expand(len(tensor.codes), 1)
    table = values_e2m1(torch.arange(16, dtype=torch.uint8))
    found = {"scales": parameters["scales"], "d": d, "table": table}
    return KernelTerms("table", tensor.codes, found, tensor.shape[1], "e4m3")
