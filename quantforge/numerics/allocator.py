"""Give freed memory back to the system, so that the peak is what is alive and not what once was.

glibc takes large blocks directly from the system and returns them when they are freed, but each such return raises the
limit of "large", up to 32 MB; from then on activations of that size are cut from a heap that only grows. On a small
model this kept a third more than was alive, and a little more with every block. Fixing the limit stops both.

What is returned has to be cleared when it is asked for again, and most blocks are asked for again at once. Therefore
blocks below the limit come from the heap, and the heap keeps a bounded amount of what is freed until a step is done
(`trim`). On a small llama that took a fifth off the time of a run and added 20 MB to its peak (``peak_memory.OVERHEAD``
counts them). Where blocks are larger both limits are parts of the peak that is forecast.

Each thread would have a heap of its own, and what one has freed another could not use: there is one for all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

LARGE = 8 << 20  # bytes; blocks from this size on are returned when they are freed
CHUNK_BYTES = 64 << 20  # of an embedding, read at once
KEPT = 64 << 20  # bytes at the top of the heap that may be free before they are returned
LARGE_PART, KEPT_PART = 80, 12  # of the peak, at most, where that is more
_M_MMAP_THRESHOLD = -3  # mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_ARENA_MAX = -8
_MOST = 1 << 30  # both are a C int


def return_freed_memory(peak: int = 0) -> bool:
    """Set the allocator's limits for the whole process; return whether the C library supports them (glibc).

    Args:
        peak: bytes that the run is expected to take.
    """
    mallopt = _function("mallopt")
    large = min(max(LARGE, peak // LARGE_PART), _MOST)
    kept = min(max(KEPT, peak // KEPT_PART), _MOST)
    return (
        mallopt is not None
        # Before glibc 2.35 it was 32 MB at most.
        and any(mallopt(_M_MMAP_THRESHOLD, limit) for limit in (large, LARGE))
        and bool(mallopt(_M_TRIM_THRESHOLD, kept))
        and bool(mallopt(_M_ARENA_MAX, 1))
    )


def trim() -> None:
    """Give what is free in the heap back to the system, where the C library can (glibc)."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _function(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    return found
