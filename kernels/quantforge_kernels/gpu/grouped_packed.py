"""Grouped products with packed weights on a GPU, by `gpu.matvec` and `gpu.rows`: one launch for all matrices.

Planes and parameters of the matrices lie one after the other, as rows of one taller matrix. Few pairs are multiplied
one by one, each by the rows of its owner (`matvec_kernel`): nothing has to be sorted, and one token is sent to
different experts anyhow. More pairs are sorted by their owners and cut into strips of one owner (`rows_kernel`); a
program finds its strip in the list of starts. The host waits for nothing, so that a CUDA graph holds it all.
"""

from __future__ import annotations

from torch import Tensor

from quantforge_kernels.gpu import packed as single
from quantforge_kernels.gpu.plane_launches import launch, least_tile, shape_of, strip_of
from quantforge_kernels.gpu.tiles import configure
from quantforge_kernels.grouped import GroupedKernel, GroupedProblem, OwnedRows, Owners
from quantforge_kernels.problem import Kernel, Packed

ONE_BY_ONE = 16  # pairs, or as many as a quarter of the matrices: then few of them share an owner


def matmul(x: Tensor, owners: Owners, packed: Packed, problem: GroupedProblem) -> Tensor:
    """Multiply rows ``x`` ``[rows, in]`` by the matrices of their owners; return ``[pairs, out]``."""
    pairs, task = len(owners.pairs), problem.each
    if pairs == 0:
        return x.new_empty(0, task.out_features)
    few = pairs <= max(ONE_BY_ONE, owners.matrices // 4)
    kernel = "matvec" if few else "rows"
    return launch_grouped(kernel, x, owners, packed, problem)


def launch_grouped(
    kernel: str, x: Tensor, owners: Owners, packed: Packed, problem: GroupedProblem
) -> Tensor:
    """Launch one of the two kernels, with the tile that is configured for it."""
    pairs, shape = len(owners.pairs), shape_of(problem.each)
    strips = pairs if kernel == "matvec" else -(-pairs // strip_of(pairs, owners.matrices))
    size = (shape.out_features, shape.in_features)
    least = least_tile(kernel, shape)
    tile = configure(kernel, size, shape.bits, shape.group, least, x.device, strips)
    planes, tensors = flat(packed)
    return launch(kernel, OwnedRows(x.contiguous(), owners), planes, tensors, shape, tile)


def flat(packed: Packed) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the planes and the parameters of all matrices as those of one taller matrix."""
    rows = {
        name: value.flatten(0, 1) if value.dim() > 2 else value for name, value in packed.items()
    }
    planes = [rows[f"words{i}"] for i in range(3) if f"words{i}" in rows]
    return planes, {name: value for name, value in rows.items() if not name.startswith("words")}


def _grouped(kernel: Kernel) -> GroupedKernel:
    return GroupedKernel(
        f"{kernel.name}-grouped", kernel, lambda problem: kernel.accepts(problem.each), matmul
    )


KERNELS = tuple(_grouped(kernel) for kernel in (single.INTEGERS, single.TABLES, single.FLOAT8))
