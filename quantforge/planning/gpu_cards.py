"""GPUs: memory, bandwidth and 16-bit compute of the devices that models are served on, from the makers' datasheets.

Gigabytes are decimal, as datasheets print them: a driver may show a few per cent more, never less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantforge.errors import UsageError, nearest_hint

_H100 = "nvidia.com/en-us/data-center/h100"
_H200 = "nvidia.com/en-us/data-center/h200"
_A100 = "nvidia.com/en-us/data-center/a100"
_ADA = "NVIDIA Ada GPU architecture, white paper, appendix A"


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of GPU.

    Attributes:
        memory: bytes of memory.
        bandwidth: memory bandwidth in bytes per second.
        compute: dense 16-bit matrix products in floating-point operations per second; 0 if unknown.
        source: where its maker states these figures.
    """

    memory: float
    bandwidth: float
    compute: float
    source: str


GB, TB, TERA = 1e9, 1e12, 1e12
CARDS: Mapping[str, Card] = {
    "l4": Card(24 * GB, 300 * GB, 121 * TERA, "nvidia.com/en-us/data-center/l4"),
    "rtx-3090": Card(24 * GB, 936 * GB, 71 * TERA, "NVIDIA Ampere GA102, white paper"),
    "rtx-4090": Card(24 * GB, 1008 * GB, 165.2 * TERA, _ADA),
    "rtx-5090": Card(32 * GB, 1792 * GB, 209.5 * TERA, "NVIDIA RTX Blackwell, white paper"),
    "a100-40gb": Card(40 * GB, 1555 * GB, 312 * TERA, _A100),
    "l40s": Card(48 * GB, 864 * GB, 362 * TERA, "nvidia.com/en-us/data-center/l40s"),
    "a100-80gb": Card(80 * GB, 2039 * GB, 312 * TERA, _A100),
    "h100-pcie": Card(80 * GB, 2 * TB, 756 * TERA, _H100),
    "h100-sxm": Card(80 * GB, 3.35 * TB, 989 * TERA, _H100),
    "h200": Card(141 * GB, 4.8 * TB, 989 * TERA, _H200),
    "mi300x": Card(192 * GB, 5.3 * TB, 1307.4 * TERA, "amd.com, Instinct MI300X datasheet"),
}


def card_of(name: str) -> Card:
    """Return a GPU by its name, ignoring case; raise `UsageError` with the nearest name if there is none."""
    if name.lower() not in CARDS:
        raise UsageError(f"--device-name {name}: no such card", nearest_hint(name.lower(), CARDS))
    return CARDS[name.lower()]
