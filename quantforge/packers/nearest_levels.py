"""Nearest of a few sorted levels for each of many values: thresholds are counted, levels looked up.

On a CPU by numpy, whose comparisons take an eighth of the time of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor


def count_above(values: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Return how many ``thresholds`` (float32 numbers) each of the float32 ``values`` exceeds, uint8; NaN none."""
    if values.device.type != "cpu":
        counts = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
        for threshold in thresholds:
            counts += (values > threshold).view(torch.uint8)
        return counts
    array = values.numpy()
    found, above = numpy.zeros(array.shape, numpy.uint8), numpy.empty(array.shape, numpy.bool_)
    for threshold in thresholds:
        numpy.greater(array, numpy.float32(threshold), out=above)
        numpy.add(found, above.view(numpy.uint8), out=found)
    return torch.from_numpy(found)


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return ``table[codes]`` for a 1-D ``table``; that codes are below its length is not checked."""
    if codes.device.type == "cpu" and codes.dtype == torch.uint8 and len(table) <= 1 << 8:
        found = torch.empty(codes.shape, dtype=table.dtype)
        numpy.take(table.numpy(), codes.numpy(), out=found.numpy(), mode="clip")
        return found
    return table.to(codes.device).index_select(0, codes.int().flatten()).view(codes.shape)
