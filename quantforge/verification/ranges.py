"""Ranges that calibration measured: of static inputs, and of keys and values in the cache.

Nothing in the weights tells them, but the source does: it shows what its linears read. Calibration saw other text, and
observers may cut tails off, so a range is only a finding where it is far from what was seen and rounds that badly.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantforge.packers.fp8 import largest
from quantforge.packers.input_rounding import largest_input, simulate
from quantforge.runtime.kv_cache import CachePeaks
from quantforge.scheme import Activation

NEAR = (
    0.1,
    4.0,
)  # of the range that was seen: in order whatever it costs; other text may have tokens 5 times as large
CANDIDATES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.5)
COSTS = 3.0  # times the error of the best candidate
SIBLINGS = 1.1  # of two linears that read the same
CACHE = 0.45, 512.0  # of the range that was seen; e4m3 has room below, none above


def covered(activation: Activation, scale: float) -> float:
    """Return the largest magnitude that a static input can have without being cut."""
    return scale * largest_input(activation.grid)


def wrong_input(activation: Activation, scale: Tensor, inputs: Tensor, peaks: Tensor) -> str | None:
    """Say what is wrong with the scale of a static input, if anything is.

    Args:
        activation: how it is rounded.
        scale: float32, of one element.
        inputs: a sample, ``[tokens, in]``.
        peaks: of all that was seen, ``[in]``.
    """
    seen = float(peaks.max())
    share = covered(activation, float(scale)) / max(seen, 1e-30)
    if NEAR[0] <= share <= NEAR[1]:
        return None

    def error(value: Tensor) -> float:
        return float((simulate(inputs, activation, value) - inputs).square().sum())

    least = min(error(scale / share * candidate) for candidate in CANDIDATES)
    if error(scale) <= COSTS * least:
        return None
    return f"covers {share:.3g} times the range of {seen:.3g} that the source shows"


def wrong_cache(scales: tuple[Tensor, Tensor], seen: CachePeaks) -> Iterator[tuple[str, str]]:
    """Yield ``k`` or ``v``, and what is wrong with its scales, of one element or ``[kv_heads]``."""
    pairs = zip("kv", scales, (seen.keys, seen.values), strict=True)
    for name, scale, peaks in pairs:
        if peaks is None:
            continue
        room = scale.float().cpu().flatten() * largest("fp8_e4m3")
        held = peaks.cpu() if len(room) > 1 else peaks.max().view(1).cpu()
        share = room / torch.where(held > 0, held, room)  # any scale holds zeros
        far = torch.where(share < CACHE[0], CACHE[0] / share, share / CACHE[1])
        head = int(far.argmax())
        if float(far[head]) > 1:
            yield (
                name,
                f"head {head}: covers {float(share[head]):.3g} times the range that the source shows",
            )
