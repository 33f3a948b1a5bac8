"""Memory of a device: room that is checked before anything is loaded, and what a stretch of work takes.

On a GPU nothing is paged out: a model that is too large fails in the middle. Both checks are
arithmetic on sizes that headers tell; a margin is kept for activations, code and the allocator.

The peak of a stretch of work is what it takes above what the process held before it. Linux counts the high-water mark
of the resident set and resets it when 5 is written to ``/proc/self/clear_refs`` (proc(5)). Memory that was freed but
not yet returned by the allocator would hide later use, so it is returned first. Where the mark cannot be reset, the
mark of the whole process answers, but only if the stretch raised it; otherwise the peak is unknown, and None says so.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Self

import torch

from quantforge.errors import ResourceError
from quantforge.files.disk import open_existing
from quantforge.numerics.allocator import trim
from quantforge.planning.capacity import MARGIN  # of what is free
from quantforge_files import system

LEAST_BITS = 2
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that are free on a GPU; None for a CPU, which has swap and other users."""
    if device.type != "cuda":
        return None
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def check_weights(needed: int, weights: int, free: int | None) -> None:
    """Refuse a model that does not fit.

    Args:
        needed: bytes that it will hold.
        weights: their number.
        free: bytes that are free; None is any.

    Raises:
        ResourceError: naming the bits per weight that would fit.
    """
    if free is None or needed <= MARGIN * free:
        return
    bits = int(8 * MARGIN * free / weights)
    fits = f"about {bits} bits per weight fit: quantize --bits {min(bits, 8)}"
    raise ResourceError(
        f"the weights take {needed / 1e9:.1f} GB on the GPU, {free / 1e9:.1f} GB are free",
        f"{fits if bits >= LEAST_BITS else 'no precision fits'}, or use --device cpu",
    )


def check_cache(
    sequences: int, tokens: int, token_bytes: int, needed: int, free: int | None
) -> None:
    """Refuse a cache that does not fit.

    Args:
        sequences: how many it is to hold.
        tokens: of each.
        token_bytes: bytes of a token in all layers.
        needed: bytes that it takes; fewer than of all tokens where layers have a window.
        free: bytes that are free; None is any.

    Raises:
        ResourceError: naming the sequences, or else the tokens, that would fit.
    """
    if free is None or needed <= MARGIN * free:
        return
    room = int(MARGIN * free / token_bytes)
    fits = f"{room // tokens} sequences" if room >= tokens else f"one sequence of {room} tokens"
    raise ResourceError(
        f"a cache of {sequences} sequences of {tokens} tokens takes {needed / 1e9:.1f} GB, "
        f"{free / 1e9:.1f} GB are free on the GPU",
        f"{fits} would fit; int8, fp8 and int4 caches are smaller",
    )


class PeakMemory:
    """Context manager; afterwards ``bytes`` is the peak above the start, or None if unknown."""

    def __init__(self, device: str = "cpu") -> None:
        self.bytes: int | None = None
        self._device = torch.device(device)
        self._before = 0
        self._reset = False

    def __enter__(self) -> Self:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            trim()
            self._reset = _reset_mark()
            self._before = _status("VmRSS") if self._reset else system.peak_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        elif self._reset:
            self.bytes = _status("VmHWM") - self._before
        elif (mark := system.peak_bytes()) > self._before:
            self.bytes = mark - self._before


def _reset_mark() -> bool:
    try:
        descriptor = open_existing(_CLEAR)
        try:
            os.write(descriptor, b"5")
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def _status(key: str) -> int:
    """Read a field of ``/proc/self/status``, in bytes."""
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))
