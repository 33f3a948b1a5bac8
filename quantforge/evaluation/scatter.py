"""Scatter of KL divergence (logarithmic) against the size of the weights, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 704, 360, 70, 150, 20, 45
_LETTER = 7  # its width, about


def scatter(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw KL (logarithmic) against size as SVG; nothing when no model has moved from the reference."""
    points = [
        (row["weight_bytes"] / 1e6, row["kl_mean"], name)
        for name, row in zip(names, rows, strict=True)
        if row["kl_mean"] is not None and row["kl_mean"] > 0
    ]
    if not points:
        return ""
    right: float = 1.1 * max(size for size, _, _ in points)
    low = math.floor(min(math.log10(kl) for _, kl, _ in points))
    high = max(low + 1, math.ceil(max(math.log10(kl) for _, kl, _ in points)))

    def x(size: float) -> float:
        return _LEFT + size / right * (_WIDTH - _LEFT - _RIGHT)

    def y(exponent: float) -> float:
        return _TOP + (high - exponent) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_grid_line(y(power), f"1e{power}") for power in range(low, high + 1)]
    step = _round_step(right / 4)
    parts += [_size_mark(x(step * i), step * i) for i in range(int(right / step) + 1)]
    below = 0.0
    for size, kl, name in sorted(points, key=lambda point: -point[1]):
        left, top = x(size), y(math.log10(kl))
        below = max(top + 4, below + 13)  # names of neighbours do not cover each other
        fits = left + 9 + _LETTER * len(name) < _WIDTH
        beside = f'x="{left + 9:.1f}"' if fits else f'x="{left - 9:.1f}" text-anchor="end"'
        parts.append(
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="5"><title>{escape(name)}: {size:.1f} MB, '
            f'KL {kl:.5f}</title></circle><text {beside} y="{below:.1f}">'
            f"{escape(name)}</text>"
        )
    label = "KL divergence to the reference (nats per token) against the size of the weights (MB)"
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 5}">{label}</text>')
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">\n{body}\n</svg>\n'
    )


def _round_step(size: float) -> float:
    """Return the least of 1, 2, 5, 10, 20 ... (times a power of ten) that is not below ``size``."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= size)


def _grid_line(top: float, text: str) -> str:
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{top + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _size_mark(left: float, size: float) -> str:
    top = _HEIGHT - _BOTTOM + 16
    return f'<text x="{left:.1f}" y="{top}" text-anchor="middle">{size:.3g}</text>'
