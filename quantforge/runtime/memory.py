"""Device memory: checks that a model and its KV cache fit before loading, and peak memory of a piece of work.

GPU memory cannot be swapped out: a model that is too large would fail halfway through loading. The checks are
arithmetic on sizes from file headers; a margin is kept for activations, code and the allocator.

The peak of a piece of work is the memory it uses in addition to what the process held before. Linux tracks the
high-water mark of the resident set and resets it when 5 is written to ``/proc/self/clear_refs`` (proc(5)). Memory that
was freed but not returned by the allocator would hide later use, so it is returned first. If the mark cannot be reset,
the high-water mark of the whole process is used, but only if the work raised it; otherwise the peak is None.
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
from quantforge.planning.capacity import USABLE_MEMORY_SHARE  # of what is free
from quantforge_files import system

MIN_BITS = 2
_STATUS_FILE = Path("/proc/self/status")
_CLEAR_REFS_FILE = Path("/proc/self/clear_refs")


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a GPU in bytes; None for a CPU, whose memory is shared and can be swapped."""
    if device.type != "cuda":
        return None
    num_free: int = torch.cuda.mem_get_info(device)[0]
    return num_free


def check_weights_fit(needed: int, weights: int, num_free: int | None) -> None:
    """Check that the weights of a model fit into device memory.

    Args:
        needed: bytes that the weights will take.
        weights: number of weights.
        num_free: free bytes on the device; None skips the check.

    Raises:
        ResourceError: they do not fit; the message names the bits per weight that would.
    """
    if num_free is None or needed <= USABLE_MEMORY_SHARE * num_free:
        return
    bits = int(8 * USABLE_MEMORY_SHARE * num_free / weights)
    suggestion = f"about {bits} bits per weight fit: quantize --bits {min(bits, 8)}"
    raise ResourceError(
        f"the weights take {needed / 1e9:.1f} GB on the GPU, {num_free / 1e9:.1f} GB are free",
        f"{suggestion if bits >= MIN_BITS else 'no precision fits'}, or use --device cpu",
    )


def check_cache_fits(
    sequences: int, tokens: int, token_bytes: int, needed: int, num_free: int | None
) -> None:
    """Check that a KV cache fits into device memory.

    Args:
        sequences: number of sequences.
        tokens: most tokens per sequence.
        token_bytes: bytes of one token in all layers.
        needed: total bytes; less than the product of the above if layers have a sliding window.
        num_free: free bytes on the device; None skips the check.

    Raises:
        ResourceError: it does not fit; the message names the number of sequences, or tokens, that would.
    """
    if num_free is None or needed <= USABLE_MEMORY_SHARE * num_free:
        return
    fitting_tokens = int(USABLE_MEMORY_SHARE * num_free / token_bytes)
    suggestion = (
        f"{fitting_tokens // tokens} sequences"
        if fitting_tokens >= tokens
        else f"one sequence of {fitting_tokens} tokens"
    )
    raise ResourceError(
        f"a cache of {sequences} sequences of {tokens} tokens takes {needed / 1e9:.1f} GB, "
        f"{num_free / 1e9:.1f} GB are free on the GPU",
        f"{suggestion} would fit; int8, fp8 and int4 caches are smaller",
    )


class PeakMemory:
    """Context manager that measures peak memory; afterwards ``bytes`` is the peak above the start, None if unknown."""

    def __init__(self, device: str = "cpu") -> None:
        self.bytes: int | None = None
        self._device = torch.device(device)
        self._start_bytes = 0
        self._was_reset = False

    def __enter__(self) -> Self:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start_bytes = torch.cuda.memory_allocated(self._device)
        else:
            trim()
            self._was_reset = _reset_high_water_mark()
            self._start_bytes = (
                _read_status_bytes("VmRSS") if self._was_reset else system.peak_memory()
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._start_bytes
        elif self._was_reset:
            self.bytes = _read_status_bytes("VmHWM") - self._start_bytes
        elif (peak := system.peak_memory()) > self._start_bytes:
            self.bytes = peak - self._start_bytes


def _reset_high_water_mark() -> bool:
    try:
        descriptor = open_existing(_CLEAR_REFS_FILE)
        try:
            os.write(descriptor, b"5")
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def _read_status_bytes(key: str) -> int:
    """Read a memory field of ``/proc/self/status``, in bytes."""
    lines = _STATUS_FILE.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))
