"""Ranges that calibration measured, of static inputs and of an fp8 KV cache, against what the source shows.

They cannot be checked from the weights alone. Calibration saw other text, and observers may cut tails off, so a range
is only unusual where it is far from what was seen and rounds that badly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import InputError
from quantforge.formats import kv_scales
from quantforge.formats.checks import positive
from quantforge.packers.fp8 import largest
from quantforge.packers.input_rounding import largest_input, simulate
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.cache_scales import CachePeaks, read_scales
from quantforge.verification.findings import Report
from quantforge.verification.forward import Inputs

# Ranges that are usual, of the range that was seen: of inputs (other text may have tokens several times as large), and
# of the cache, where e4m3 has room below and none above.
INPUT_RANGES, CACHE_RANGES = (0.1, 4.0), (0.45, 512.0)
CANDIDATES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.5)  # ranges that are tried, of the range that was seen
MAX_ERROR = 3.0  # of an unusual range, over that of the best candidate
MAX_SIBLINGS = 1.1  # quotient of the scales of two linears that read the same


def check_input(
    report: Report,
    module: str,
    found: QuantizedTensor,
    inputs: Inputs,
    columns: Tensor | None,
    others: dict[str, float],
) -> None:
    """Check the range of a static input.

    Args:
        report: gets the findings.
        module: the linear, by its canonical name.
        found: its weight, with the scale of its input.
        inputs: what the source's linears read.
        columns: factors that were moved into the weight's columns, out of the input.
        others: scales of shared inputs that were met, by their names; added to.
    """
    scale, activation = found.parameters["input_scale"], found.input
    assert activation is not None
    key = inputs.shared.get(module, module)
    other = others.setdefault(key, float(scale))
    if max(other, float(scale)) > MAX_SIBLINGS * min(other, float(scale)):
        text = f"input scale {float(scale):.4g}; {key} reads the same input and has {other:.4g}"
        report.warn("scale", module, text)
    raw, peaks = inputs.raw(module), inputs.peaks(module)
    if raw is None or peaks is None:
        return
    if columns is not None:
        raw, peaks = raw / columns, peaks / columns
    seen = float(peaks.max())
    if seen and not float(scale) > 0:
        report.add("scale", module, f"input scale {float(scale):.4g}; the source shows {seen:.3g}")
        return
    covered = float(scale) * largest_input(activation.grid)
    if not seen or INPUT_RANGES[0] * seen <= covered <= INPUT_RANGES[1] * seen:
        return

    def error(value: Tensor) -> float:
        return float((simulate(raw, activation, value) - raw).square().sum())

    least = min(error(scale * (seen / covered) * candidate) for candidate in CANDIDATES)
    if error(scale) > MAX_ERROR * least:
        text = f"input scale {float(scale):.4g} covers values up to {covered:.3g}; the source shows {seen:.3g}"
        report.warn("scale", module, text)


def check_cache(report: Report, checkpoint: Checkpoint, caches: Mapping[int, CachePeaks]) -> None:
    """Check the scales of an fp8 cache: positive numbers, and near the ranges that the source shows.

    `kv_scales.found` checks that all are there. ``caches``: what the source puts into the cache, by block.
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
        for which, text in cache_problems(scales[block], seen) if block in scales else ():
            report.warn("scale", found.names[block][which], text)


def cache_problems(scales: tuple[Tensor, Tensor], seen: CachePeaks) -> Iterator[tuple[int, str]]:
    """Yield 0 for keys or 1 for values, and what is unusual about their scales, of one element or ``[kv_heads]``."""
    for which, (peaks, scale) in enumerate(zip((seen.keys, seen.values), scales, strict=True)):
        if peaks is None:
            continue
        room = scale.float().cpu().flatten() * largest("fp8_e4m3")
        held = peaks.cpu() if len(room) > 1 else peaks.max().view(1).cpu()
        bad = (held > 0) & ((room < CACHE_RANGES[0] * held) | (room > CACHE_RANGES[1] * held))
        if bool(bad.any()):
            head = int(bad.nonzero()[0])
            where = f"head {head}: " if len(room) > 1 else ""
            text = f"covers values up to {float(room[head]):.3g}; the source shows {float(held[head]):.3g}"
            yield which, where + text
