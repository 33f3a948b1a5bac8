"""Selection of the kernel for a problem: the first one that accepts it. The last one accepts everything."""

from __future__ import annotations

from quantforge_kernels import reference
from quantforge_kernels.cpu import packed_integers, torch_operators
from quantforge_kernels.gpu import packed, scaled
from quantforge_kernels.gpu import ternary_products as ternary
from quantforge_kernels.problem import Kernel, Problem

KERNELS: tuple[Kernel, ...] = (
    scaled.KERNEL,
    packed.INTEGERS,
    packed.TABLES,
    packed.FLOAT8,
    ternary.KERNEL,
    packed_integers.KERNEL,
    torch_operators.INT4,
    torch_operators.INT8,
    reference.KERNEL,
)


def select(problem: Problem) -> Kernel:
    """Return the first kernel that accepts the problem."""
    return next(kernel for kernel in KERNELS if kernel.accepts(problem))
