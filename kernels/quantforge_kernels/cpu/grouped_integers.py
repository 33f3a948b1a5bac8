"""Grouped products of packed integers on a processor with vectors: one program for a few pairs of rows and owners.

Decoding sends a token to some experts: every pair has an owner of its own, and the program multiplies them one after
the other, from the matrices as they lie. Of more pairs several have one owner; they are gathered and multiplied
together, so that they share the unpacking of words (`grouped.by_matrix`). The bits of a row are the same either way.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from quantforge_kernels.cpu.packed_integers import KERNEL, OF_OCTETS, plan_of, rounded
from quantforge_kernels.grouped import GroupedKernel, GroupedProblem, Owners, by_matrix
from quantforge_kernels.problem import Kernel, Packed

FEW = 8  # pairs; or as many as half of the matrices
_GATHERED = by_matrix(KERNEL)


def matmul(x: Tensor, owners: Owners, packed: Packed, problem: GroupedProblem) -> Tensor:
    """Multiply rows ``x`` ``[rows, in]`` by the matrices of their owners; return ``[pairs, out]``."""
    pairs = len(owners.pairs)
    if pairs == 0:
        return x.new_empty(0, problem.each.out_features)
    if pairs > max(FEW, problem.matrices // 2):
        return _GATHERED.matmul(x, owners, packed, problem)
    plan = plan_of(problem.each, tuple((name, value.dtype) for name, value in packed.items()))
    if x.shape[1] < plan.columns:
        x = pad(x, (0, plan.columns - x.shape[1]))
    x = x.contiguous()
    y = x.new_empty(pairs, plan.tiles * plan.lanes)
    _scratch, addresses = rounded(x, y, plan)  # in use until the program has run
    work = (0, pairs * plan.tiles)
    words = plan.words(packed, work, len(x), addresses, plan.tiles)
    plan.grouped()([*words, owners.pairs.data_ptr(), pairs // len(x)])
    return y[:, : problem.each.out_features]


def _grouped(layout: Kernel) -> GroupedKernel:
    return GroupedKernel(
        f"{layout.name}-grouped", layout, lambda problem: layout.accepts(problem.each), matmul
    )


GROUPED = (_grouped(OF_OCTETS), _grouped(KERNEL))
