"""What looks wrong about tensors by themselves: no source is needed, and nothing of it is proven.

Trained weights are centered on zero, no row or column of them is one number, groups are of comparable size, two
matrices are never equal, and the gains of a norm change slowly from block to block. Blocks may have been copied on
purpose, though, and a network may have learned anything.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quantforge.packers.tensor import QuantizedTensor
from quantforge.verification.rounding import group_width

MIN_CODES = 32  # with fewer, equal codes are chance
LARGEST_PEAK = 2.0**14  # of the largest weight of a group, over that of the median group
OFF_ZERO = 0.15  # of the mean of the median group, over the mean magnitude of the weights
OFF_BY_ONE = (
    0.3  # how far from one the difference of two gains may be, where a family stores them less one
)


def anomalies(tensor: QuantizedTensor, value: Tensor) -> Iterator[tuple[str, str]]:
    """Yield checks and descriptions of what is unusual about a matrix, ``value`` ``[out, in]`` when it is decoded."""
    width = group_width(tensor.scheme, value.shape[1])
    peaks = value.abs().view(len(value), -1, width).amax(-1)
    peaks = peaks[peaks > 0]  # scales of groups of zeros mean nothing
    if peaks.numel() and float(peaks.max()) > LARGEST_PEAK * float(peaks.median()):
        text = f"the largest weight is {float(peaks.max()):.3g}, that of the median group {float(peaks.median()):.3g}"
        yield "scale", f"{text}: its scale may be wrong"
    usual = float(value.abs().mean())
    groups = tensor.scheme.groups(value.shape[1])
    if value.shape[1] % groups == 0 and value.shape[1] // groups >= MIN_CODES // 2:
        means = value.view(len(value), groups, -1).mean(-1)
        if abs(float(means.median())) > OFF_ZERO * usual:
            yield (
                "zero-convention",
                "its weights are not centered on zero: zero points or codes may be off by one",
            )
    codes = tensor.codes.view(torch.uint8) if tensor.codes.is_floating_point() else tensor.codes
    for dim, what in ((0, "column"), (1, "row")):
        if codes.shape[dim] < MIN_CODES or codes.shape[1] != value.shape[1]:
            continue
        constant = (codes.amin(dim) == codes.amax(dim)) & (value.abs().amax(dim) > 0.1 * usual)
        if places := constant.nonzero().flatten().tolist():
            more = f", and {len(places) - 1} more" if len(places) > 1 else ""
            yield "groups", f"{what} {places[0]} has the same code everywhere{more}"


def fingerprints(tensor: QuantizedTensor) -> Iterator[tuple[str, str]]:
    """Yield "codes" and "scales" with the digest of each, where two matrices have the same by no chance."""
    for part, value in (("codes", tensor.codes), ("scales", tensor.parameters.get("scales"))):
        if value is None or value.numel() < MIN_CODES:
            continue
        raw = value.contiguous().flatten().view(torch.uint8)
        if len(torch.unique(raw[:4096])) >= MIN_CODES // 4:  # scales may well be all alike
            yield part, hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def gains_off_by_one(gains: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the names of norms whose gains are one off those of the same norm in other blocks, with a description.

    Args:
        gains: the median gain of each norm by its stored name, in the order of blocks.
    """
    series: dict[str, list[str]] = {}
    for name in gains:
        series.setdefault(re.sub(r"\.\d+\.", ".#.", name), []).append(name)
    for names in series.values():
        values = [gains[name] for name in names]
        for index, name in enumerate(names):
            if off := off_by_one(values, index):
                size = "larger" if off > 0 else "smaller"
                yield (
                    name,
                    f"its gains are {abs(off):.2f} {size} than those of this norm in the blocks beside it",
                )


def off_by_one(gains: Sequence[float], index: int) -> float:
    """Return how far one of ``gains``, in the order of blocks, is off the others; 0 where that is not about one.

    Gains may grow with depth: each is compared with those beside it, and only where the others agree in that way.
    """
    others = [*gains[:index], *gains[index + 1 :]]
    if len(others) < 3:
        return 0.0
    off = _difference(gains, index)
    usual = max(abs(_difference(others, place)) for place in range(len(others)))
    return off if abs(abs(off) - 1) < OFF_BY_ONE and usual < OFF_BY_ONE else 0.0


def _difference(gains: Sequence[float], index: int) -> float:
    """Return what one gain is above the mean of those beside it, the first and last above one or the line of two."""
    if 0 < index < len(gains) - 1:
        return gains[index] - (gains[index - 1] + gains[index + 1]) / 2
    near, far = (gains[1], gains[2]) if index == 0 else (gains[-2], gains[-3])
    return min(gains[index] - near, gains[index] - (2 * near - far), key=abs)
