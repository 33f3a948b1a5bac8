"""Runs of a quantized cache: how many channels share a scale, and the bytes of a row. No torch."""

from __future__ import annotations

KINDS = ("", "int8", "fp8", "int4")  # "" is the type of the activations
PARAMETER = 2  # bytes of a scale, or of a minimum


def run_of(head: int, kind: str) -> int:
    """Return the number of channels that share a scale."""
    for run in (32,) if kind == "int4" else (64, 32):
        if head % run == 0:
            return run
    return head


def row_bytes(head: int, kind: str, plain: int = 2) -> int:
    """Return the bytes of a row of ``head`` channels; ``plain`` are those of a channel that is not quantized."""
    if not kind:
        return head * plain
    runs = head // run_of(head, kind)
    return head // 2 + 2 * PARAMETER * runs if kind == "int4" else head + PARAMETER * runs
