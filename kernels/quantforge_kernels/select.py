"""Which kernel solves a problem: the first that accepts it. The last one accepts everything."""

from __future__ import annotations

from quantforge_kernels import cpu, packed, reference, scaled, ternary, vector
from quantforge_kernels.problem import Kernel, Problem

KERNELS: tuple[Kernel, ...] = (
    scaled.KERNEL,
    packed.INTEGERS,
    packed.TABLES,
    packed.FLOAT8,
    ternary.KERNEL,
    vector.KERNEL,
    cpu.INT4,
    cpu.INT8,
    reference.KERNEL,
)


def select(problem: Problem) -> Kernel:
    """Return the first kernel that accepts the problem."""
    return next(kernel for kernel in KERNELS if kernel.accepts(problem))
