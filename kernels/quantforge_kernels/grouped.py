"""Grouped products: rows, each multiplied by the matrices of its owners, as tokens are by their experts.

    y[p] = x[p / each] W[owner[p]]^T          p = 0 ... rows * each - 1

A pair ``p`` is one row and one of its owners. All matrices have one `Problem`, and are laid out by the
kernel that multiplies one of them; each of its packed tensors gets a first dimension that counts the
matrices, so that a matrix is a view of them. Of the matrices that own no row nothing is read.

`by_matrix` makes the grouped form of any kernel: the rows of an owner are gathered and multiplied at once,
one owner after the other. That of the fallback kernel is what the others have to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from quantforge_kernels.problem import Kernel, Packed, Parameters, Problem

SHARED = frozenset({"table"})  # one for all matrices


@dataclass(frozen=True, slots=True)
class GroupedProblem:
    """Products of rows with some of several matrices.

    Attributes:
        each: the product with one matrix.
        matrices: how many there are.
    """

    each: Problem
    matrices: int


class Owners:
    """Owners of rows: which matrices multiply them.

    Args:
        index: whole numbers ``[rows, each]``, below ``matrices``.
        matrices: how many there are.
    """

    def __init__(self, index: Tensor, matrices: int) -> None:
        self.pairs = index.reshape(-1).int().contiguous()
        self.matrices = matrices

    @cached_property
    def order(self) -> Tensor:
        """Return the pairs by owner, int32; those of one owner in their order."""
        return torch.argsort(self.pairs, stable=True).int()

    @cached_property
    def starts(self) -> Tensor:
        """Return where in `order` the pairs of each matrix begin, int32 ``[matrices + 1]``; nothing waits for it."""
        bounds = torch.arange(self.matrices + 1, dtype=torch.int32, device=self.pairs.device)
        return torch.searchsorted(self.pairs[self.order], bounds).int()

    def groups(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the matrices that own pairs, with these; the host waits for the device here."""
        starts = self.starts.tolist()
        for matrix, (first, last) in enumerate(pairwise(starts)):
            if first < last:
                yield matrix, self.order[first:last]


@dataclass(frozen=True, slots=True)
class GroupedKernel:
    """A way to multiply rows by the packed matrices of their owners.

    Attributes:
        name: as shown in reports.
        layout: of one matrix.
        accepts: whether the kernel solves a problem on this machine, and is meant for it.
        matmul: ``(x [rows, in], owners, packed [matrices, ...], problem) -> y [pairs, out]``, in the type of ``x``.
        waits: the host has to know the owners, so that no CUDA graph holds it.
    """

    name: str
    layout: Kernel
    accepts: Callable[[GroupedProblem], bool]
    matmul: GroupedMatmul
    waits: bool = False


GroupedMatmul = Callable[[Tensor, Owners, Packed, GroupedProblem], Tensor]


def grouped_form(kernel: Kernel, matmul: GroupedMatmul) -> GroupedKernel:
    """Return the grouped form of a kernel with a program of its own, for the problems that the kernel accepts."""
    return GroupedKernel(
        f"{kernel.name}-grouped", kernel, lambda problem: kernel.accepts(problem.each), matmul
    )


def by_matrix(kernel: Kernel) -> GroupedKernel:
    """Return the grouped form of a kernel: one product after the other."""

    def matmul(x: Tensor, owners: Owners, packed: Packed, problem: GroupedProblem) -> Tensor:
        each = len(owners.pairs) // max(1, len(x))
        y = x.new_empty(len(owners.pairs), problem.each.out_features)
        for number, pairs in owners.groups():
            rows = x[pairs // each]
            y[pairs] = kernel.matmul(rows, matrix(packed, number), problem.each)
        return y

    return GroupedKernel(
        kernel.name, kernel, lambda problem: kernel.accepts(problem.each), matmul, waits=True
    )


def matrix(packed: Packed, number: int) -> Packed:
    """Return one packed matrix, as views."""
    return {name: value if name in SHARED else value[number] for name, value in packed.items()}


def stack(
    weights: Sequence[tuple[Tensor, Parameters]] | Iterator[tuple[Tensor, Parameters]],
    problem: GroupedProblem,
    kernel: GroupedKernel,
) -> Packed:
    """Lay matrices out, one after the other: each is let go of before the next is asked for.

    Args:
        weights: codes and parameters of every matrix, as `Kernel.prepare` takes them.
        problem: of all of them.
        kernel: that multiplies.

    Raises:
        ValueError: matrices differ in the types of what is packed, or in what they share.
    """
    held: dict[str, Tensor] = {}
    for number, (codes, parameters) in enumerate(weights):
        packed = kernel.layout.prepare(codes, parameters, problem.each)
        if not held:
            held = {
                name: value if name in SHARED else value.new_empty(problem.matrices, *value.shape)
                for name, value in packed.items()
            }
        for name, value in packed.items():
            into = held[name] if name in SHARED else held[name][number]
            if into.dtype != value.dtype or into.shape != value.shape:
                raise ValueError(f"{name} of matrix {number} differs from that of the first")
            if name in SHARED and not torch.equal(into, value):
                raise ValueError(f"{name} of matrix {number} is not that of the first")
            if name not in SHARED:
                into.copy_(value)
    return held
