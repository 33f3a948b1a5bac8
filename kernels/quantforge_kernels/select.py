"""Selection of the kernel for a problem: the first one that accepts it. The last one accepts everything."""

from __future__ import annotations

from quantforge_kernels import reference
from quantforge_kernels.cpu import grouped_integers, packed_integers, torch_operators
from quantforge_kernels.gpu import grouped_packed, packed, scaled
from quantforge_kernels.gpu import ternary_products as ternary
from quantforge_kernels.grouped import GroupedKernel, GroupedProblem, by_matrix
from quantforge_kernels.problem import Kernel, Problem

KERNELS: tuple[Kernel, ...] = (
    scaled.KERNEL,
    packed.INTEGERS,
    packed.TABLES,
    packed.FLOAT8,
    ternary.KERNEL,
    packed_integers.OF_OCTETS,
    packed_integers.KERNEL,
    torch_operators.INT4,
    torch_operators.INT8,
    reference.KERNEL,
)
GROUPED: tuple[GroupedKernel, ...] = (*grouped_packed.KERNELS, *grouped_integers.GROUPED)


def select(problem: Problem) -> Kernel:
    """Return the first kernel that accepts the problem."""
    return next(kernel for kernel in KERNELS if kernel.accepts(problem))


def select_grouped(problem: GroupedProblem) -> GroupedKernel:
    """Return the first kernel for grouped products that accepts; else products one after the other."""
    found = (kernel for kernel in GROUPED if kernel.accepts(problem))
    return next(found, None) or by_matrix(select(problem.each))
