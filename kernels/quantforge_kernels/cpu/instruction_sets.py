"""The best instruction set that CPU programs may use, and the two environment variables that limit it.

Programs need vectors of 8 lanes of 32 bits (AVX2) or of 16 lanes (AVX-512). If `best_instruction_set` returns None, no
program is compiled, LLVM is not imported, and torch computes everything.
"""

from __future__ import annotations

import os
from functools import cache

INSTRUCTION_SETS = ("avx512vnni", "avx512bw", "avx2")  # the best first
LANES = {"avx512vnni": 16, "avx512bw": 16, "avx2": 8}  # numbers of 32 bits in a vector
SWITCH_VARIABLE = "QUANTFORGE_CPU_PROGRAMS"  # of the environment: ``on`` (also when empty or left out), or ``off``
LIMIT_VARIABLE = "QUANTFORGE_CPU_LIMIT"  # of the environment: one of `INSTRUCTION_SETS`


@cache
def best_instruction_set() -> str | None:
    """Return the best of `INSTRUCTION_SETS` that this CPU has and `LIMIT_VARIABLE` allows, or None.

    If it is None, no program may be used: `SWITCH_VARIABLE` is ``off``, or the CPU has none of them.

    Raises:
        ValueError: `SWITCH_VARIABLE` is neither ``on`` nor ``off``.
    """
    if not programs_enabled():
        return None
    import llvmlite.binding as llvm

    if not llvm.get_process_triple().startswith("x86_64"):
        return None
    host_features, best_allowed = (
        llvm.get_host_cpu_features(),
        INSTRUCTION_SETS.index(allowed_instruction_set()),
    )
    return next((name for name in INSTRUCTION_SETS[best_allowed:] if host_features.get(name)), None)


def programs_enabled() -> bool:
    """Return whether `SWITCH_VARIABLE` allows compiled programs.

    Raises:
        ValueError: it is neither ``on`` nor ``off``.
    """
    value = os.environ.get(SWITCH_VARIABLE) or "on"
    if value not in {"on", "off"}:
        raise ValueError(f"{SWITCH_VARIABLE}={value}: it is on or off")
    return value == "on"


def allowed_instruction_set() -> str:
    """Return the best instruction set that `LIMIT_VARIABLE` allows; AVX2 if its value is not in `INSTRUCTION_SETS`."""
    name = os.environ.get(LIMIT_VARIABLE) or INSTRUCTION_SETS[0]
    return name if name in INSTRUCTION_SETS else INSTRUCTION_SETS[-1]


def avx512_disallowed() -> bool:
    """Return whether `LIMIT_VARIABLE` forbids AVX-512 with all its extensions."""
    return allowed_instruction_set() == INSTRUCTION_SETS[-1]
