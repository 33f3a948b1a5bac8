"""Grouped products for mixtures of experts: each row is multiplied by the matrices of its experts.

    y[p] = x[p / top_k] W[expert[p]]^T          p = 0 ... rows * top_k - 1

A pair ``p`` is a row and one of its experts. All matrices have the same `MatmulSpec` and the layout of the kernel that
multiplies a single one; each packed tensor gets a leading dimension over the matrices, so that one matrix is a view.
Matrices without rows are not read.

`make_looped_kernel` makes a grouped kernel of any kernel: it gathers the rows of one expert and multiplies them at
once, one expert after the other. For the fallback kernel, this defines what the others have to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from quantforge_kernels.matmul_spec import Kernel, MatmulSpec, PackedWeight, QuantParams

SHARED_TENSORS = frozenset({"table"})  # one for all matrices


@dataclass(frozen=True, slots=True)
class GroupedMatmulSpec:
    """Specification of the products of rows with some of several matrices.

    Attributes:
        matrix_spec: the product with one matrix.
        num_matrices: number of matrices (experts).
    """

    matrix_spec: MatmulSpec
    num_matrices: int


class ExpertRouting:
    """Assignment of rows to experts, whose matrices multiply them.

    Attributes:
        expert_of_pair: int32 ``[pairs]``, the expert of each pair of a row and an expert.
        num_matrices: number of experts.

    Args:
        index: whole numbers ``[rows, experts_per_row]`` below ``num_matrices``.
        num_matrices: number of experts.
    """

    def __init__(self, index: Tensor, num_matrices: int) -> None:
        self.expert_of_pair = index.reshape(-1).int().contiguous()
        self.num_matrices = num_matrices

    @cached_property
    def sorted_pairs(self) -> Tensor:
        """Return the pairs sorted by expert (int32); pairs of one expert keep their order."""
        return torch.argsort(self.expert_of_pair, stable=True).int()

    @cached_property
    def expert_starts(self) -> Tensor:
        """Return where in `sorted_pairs` each expert begins, int32 ``[num_matrices + 1]``; does not synchronize."""
        bounds = torch.arange(
            self.num_matrices + 1, dtype=torch.int32, device=self.expert_of_pair.device
        )
        return torch.searchsorted(self.expert_of_pair[self.sorted_pairs], bounds).int()

    def pairs_by_expert(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each expert that has pairs, and its pairs; the host waits for the GPU here."""
        starts = self.expert_starts.tolist()
        for index, (first, last) in enumerate(pairwise(starts)):
            if first < last:
                yield index, self.sorted_pairs[first:last]


@dataclass(frozen=True, slots=True)
class GroupedKernel:
    """An implementation of grouped products, as plain functions.

    Attributes:
        name: as shown in reports.
        base_kernel: the kernel of one matrix, whose layout is used.
        accepts: whether the kernel supports a specification on this machine and is meant for it.
        matmul: ``(x [rows, in], routing, packed [num_matrices, ...], spec) -> y [pairs, out]``, in the type of ``x``.
        needs_host_sync: the host has to read the routing, so that a CUDA graph cannot capture it.
    """

    name: str
    base_kernel: Kernel
    accepts: Callable[[GroupedMatmulSpec], bool]
    matmul: GroupedMatmul
    needs_host_sync: bool = False


GroupedMatmul = Callable[[Tensor, ExpertRouting, PackedWeight, GroupedMatmulSpec], Tensor]


def make_grouped_kernel(kernel: Kernel, matmul: GroupedMatmul) -> GroupedKernel:
    """Make a grouped kernel of a fused function, for the specifications that ``kernel`` accepts."""
    return GroupedKernel(
        f"{kernel.name}-grouped", kernel, lambda spec: kernel.accepts(spec.matrix_spec), matmul
    )


def make_looped_kernel(kernel: Kernel) -> GroupedKernel:
    """Make a grouped kernel that calls ``kernel`` for one expert after the other."""

    def matmul(
        x: Tensor, routing: ExpertRouting, packed: PackedWeight, spec: GroupedMatmulSpec
    ) -> Tensor:
        experts_per_row = len(routing.expert_of_pair) // max(1, len(x))
        y = x.new_empty(len(routing.expert_of_pair), spec.matrix_spec.out_features)
        for index, pairs in routing.pairs_by_expert():
            rows = x[pairs // experts_per_row]
            y[pairs] = kernel.matmul(rows, select_matrix(packed, index), spec.matrix_spec)
        return y

    return GroupedKernel(
        kernel.name,
        kernel,
        lambda spec: kernel.accepts(spec.matrix_spec),
        matmul,
        needs_host_sync=True,
    )


def select_matrix(packed: PackedWeight, index: int) -> PackedWeight:
    """Return one packed matrix of several, as views."""
    return {
        name: value if name in SHARED_TENSORS else value[index] for name, value in packed.items()
    }


def prepare_stacked(
    weights: Sequence[tuple[Tensor, QuantParams]] | Iterator[tuple[Tensor, QuantParams]],
    spec: GroupedMatmulSpec,
    kernel: GroupedKernel,
) -> PackedWeight:
    """Prepare matrices one after the other and stack them; each is released before the next is requested.

    Args:
        weights: codes and parameters of every matrix, as `Kernel.prepare` takes them.
        spec: the specification of all of them.
        kernel: the kernel that will multiply.

    Raises:
        ValueError: matrices differ in the types of their packed tensors, or in a tensor that they should share.
    """
    stacked: dict[str, Tensor] = {}
    for index, (codes, parameters) in enumerate(weights):
        packed = kernel.base_kernel.prepare(codes, parameters, spec.matrix_spec)
        if not stacked:
            stacked = {
                name: value
                if name in SHARED_TENSORS
                else value.new_empty(spec.num_matrices, *value.shape)
                for name, value in packed.items()
            }
        for name, value in packed.items():
            target = stacked[name] if name in SHARED_TENSORS else stacked[name][index]
            if target.dtype != value.dtype or target.shape != value.shape:
                raise ValueError(f"{name} of matrix {index} differs from that of the first")
            if name in SHARED_TENSORS and not torch.equal(target, value):
                raise ValueError(f"{name} of matrix {index} is not that of the first")
            if name not in SHARED_TENSORS:
                target.copy_(value)
    return stacked
