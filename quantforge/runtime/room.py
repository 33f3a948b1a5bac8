"""Room for weights and caches on a GPU: checked before anything is loaded, with what would fit.

On a GPU nothing is paged out: a model that is too large fails in the middle. Both checks are
arithmetic on sizes that headers tell; a margin is kept for activations, code and the allocator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantforge.errors import ResourceError
from quantforge.planning.capacity import MARGIN  # of what is free

if TYPE_CHECKING:
    from quantforge.runtime.cache_layout import CacheShape

LEAST_BITS = 2


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
    shape: CacheShape, sequences: int, tokens: int, free: int | None, needed: int | None = None
) -> None:
    """Refuse a cache that does not fit.

    Args:
        shape: of its entries.
        sequences: of them.
        tokens: of each.
        free: bytes that are free; None is any.
        needed: bytes that it takes, where layers with a window do not hold all tokens.

    Raises:
        ResourceError: naming the sequences, or else the tokens, that would fit.
    """
    needed = shape.token_bytes * sequences * tokens if needed is None else needed
    if free is None or needed <= MARGIN * free:
        return
    room = int(MARGIN * free / shape.token_bytes)
    fits = f"{room // tokens} sequences" if room >= tokens else f"one sequence of {room} tokens"
    raise ResourceError(
        f"a cache of {sequences} sequences of {tokens} tokens takes {needed / 1e9:.1f} GB, "
        f"{free / 1e9:.1f} GB are free on the GPU",
        f"{fits} would fit; int8, fp8 and int4 caches are smaller",
    )
