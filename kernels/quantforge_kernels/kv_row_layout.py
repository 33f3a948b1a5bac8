"""Sizes of a cached row of keys or values: channels that share a scale, and bytes. Does not import torch."""

from __future__ import annotations

CACHE_KINDS = ("", "int8", "fp8", "int4")  # "" is the type of the activations
PARAMETER_BYTES = 2  # bytes of a scale, or of a minimum


def channels_per_scale(head_dim: int, kind: str) -> int:
    """Return the number of channels that share a scale."""
    for width in (32,) if kind == "int4" else (64, 32):
        if head_dim % width == 0:
            return width
    return head_dim


def row_bytes(head_dim: int, kind: str, unquantized_bytes: int = 2) -> int:
    """Return the bytes of a row of ``head_dim`` channels; an unquantized channel takes ``unquantized_bytes``."""
    if not kind:
        return head_dim * unquantized_bytes
    scales = head_dim // channels_per_scale(head_dim, kind)
    return (
        head_dim // 2 + 2 * PARAMETER_BYTES * scales
        if kind == "int4"
        else head_dim + PARAMETER_BYTES * scales
    )
