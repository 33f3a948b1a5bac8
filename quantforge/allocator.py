"""Give freed memory back to the system, so that the peak is what is alive and not what once was.

glibc takes large blocks directly from the system and returns them when they are freed, but each such return raises the
limit of "large", up to 32 MB; from then on activations of that size are cut from a heap that only grows. On a small
model this kept a third more than was alive, and a little more with every block. Fixing the limit stops both. The price
is that fresh pages have to be cleared: a tenth of the time of a forward at a width of 256, less beyond. What remains
in the heap is smaller, and is returned when a step is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

LARGE = 1 << 20  # bytes; blocks from this size on are returned when they are freed
_M_MMAP_THRESHOLD = -3  # mallopt(3)


def return_freed_memory() -> bool:
    """Fix the limit for the whole process; return whether the C library is one that has it (glibc)."""
    mallopt = _function("mallopt")
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, LARGE))


def trim() -> None:
    """Return what is free in the heap, where the C library can (glibc)."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _function(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    return found
