"""Instructions of this processor that programs may use, and the two variables of the environment that limit them.

Programs want vectors: of 8 lanes of 32 bits (AVX2) or of 16 (AVX-512). `feature` names the best instructions that there
are, or None: then no program is made, nothing of LLVM is imported, and torch computes.
"""

from __future__ import annotations

import os
from functools import cache

FEATURES = ("avx512vnni", "avx512bw", "avx2")  # the best first
LANES = {"avx512vnni": 16, "avx512bw": 16, "avx2": 8}  # numbers of 32 bits in a vector
SWITCH = "QUANTFORGE_CPU_PROGRAMS"  # of the environment: ``on`` (also when empty or left out), or ``off``
LIMIT = "QUANTFORGE_CPU_LIMIT"  # of the environment: one of `FEATURES`


@cache
def feature() -> str | None:
    """Return the best of `FEATURES` that this processor has and that `LIMIT` allows; None where no program is made.

    That is: `SWITCH` is off, or the processor has none of them.

    Raises:
        ValueError: `SWITCH` has another value.
    """
    if not switched_on():
        return None
    import llvmlite.binding as llvm

    if not llvm.get_process_triple().startswith("x86_64"):
        return None
    there, first = llvm.get_host_cpu_features(), FEATURES.index(limit())
    return next((name for name in FEATURES[first:] if there.get(name)), None)


def switched_on() -> bool:
    """Return whether programs may be made, as far as `SWITCH` says.

    Raises:
        ValueError: it is neither ``on`` nor ``off``.
    """
    value = os.environ.get(SWITCH) or "on"
    if value not in {"on", "off"}:
        raise ValueError(f"{SWITCH}={value}: it is on or off")
    return value == "on"


def limit() -> str:
    """Return the best of `FEATURES` that may be used: by `LIMIT`, or the least where it names none of them."""
    name = os.environ.get(LIMIT) or FEATURES[0]
    return name if name in FEATURES else FEATURES[-1]


def without_avx512() -> bool:
    """Return whether `LIMIT` takes AVX-512 away, and all that belongs to it."""
    return limit() == FEATURES[-1]
