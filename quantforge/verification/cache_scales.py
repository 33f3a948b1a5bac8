"""Check of the scales of an fp8 KV cache: positive numbers, and near the ranges that the source shows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import InputError
from quantforge.formats import kv_scales
from quantforge.formats.checks import positive
from quantforge.runtime.kv_cache import CachePeaks, read_scales
from quantforge.verification.findings import Report
from quantforge.verification.ranges import wrong_cache


def check_cache(report: Report, checkpoint: Checkpoint, caches: Mapping[int, CachePeaks]) -> None:
    """Check the scales; `kv_scales.found` checks that all are there.

    Args:
        report: gets the findings.
        checkpoint: that holds the scales.
        caches: what the source puts into the cache, by block, as far as it was seen.
    """
    headers = {name: entry.stored() for name, entry in checkpoint.entries.items()}
    found = kv_scales.found(checkpoint.config, headers)
    for name in sorted(found.stored):
        try:
            positive(name, checkpoint.read(name))
        except InputError as error:
            report.add("scale", name, error.message)
            return
    scales = read_scales(checkpoint, found, torch.device("cpu"))
    for block, seen in caches.items():
        for which, text in wrong_cache(scales[block], seen) if block in scales else ():
            report.add("scale", found.names[block]["kv".index(which)], text)
