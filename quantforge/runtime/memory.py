"""Memory that a stretch of work takes above what the process held before it.

Linux counts the high-water mark of the resident set and resets it when 5 is written to
``/proc/self/clear_refs`` (proc(5)). Memory that was freed but not yet returned by the allocator
would hide later use, so it is returned first. Where the mark cannot be reset, the mark of the whole
process answers, but only if the stretch raised it; otherwise the peak is unknown, and None says so.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Self

import torch

from quantforge.checkpoint.disk import existing
from quantforge.numerics.allocator import trim
from quantforge_files import system

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


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
        descriptor = existing(_CLEAR)
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
