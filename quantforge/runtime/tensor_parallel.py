"""Tensor parallelism: each of several processes holds a part of every matrix of a block, and their results are summed.

Each part is an ordinary matrix whose codes and parameters are bit for bit those of the whole; `split_model` chooses it.
Every process gets the same tokens and computes the same logits, and so chooses the same next token.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from quantforge.errors import RefusedError, UsageError
from quantforge.runtime.kernel_weight import KernelWeight

_UNSPLIT_PARAMETERS = frozenset({"table"})  # parameters of the whole grid, not of rows
_SUPERBLOCK_PARAMETERS = frozenset({"d", "dmin"})  # one for each superblock


@dataclass(frozen=True, slots=True)
class TensorParallelRank:
    """Tensor-parallel rank of a process, with the sum over all processes.

    Attributes:
        rank: index of the process, from 0.
        ranks: number of processes.
        all_reduce: collective that returns the sum of a tensor over all processes, with the same bits in each.
    """

    rank: int
    ranks: int
    all_reduce: Callable[[Tensor], Tensor]

    def slice_of(self, size: int, label: str) -> slice:
        """Return the slice of ``size`` items that belongs to this process.

        Raises:
            RefusedError: ``size`` is not divisible by the number of processes.
        """
        if size % self.ranks:
            raise RefusedError(
                f"{label}: {size} cannot be split over {self.ranks} processes",
                "a number of processes that divides it",
            )
        slice_size = size // self.ranks
        return slice(self.rank * slice_size, (self.rank + 1) * slice_size)

    def slice_heads(self, scale: Tensor) -> Tensor:
        """Return the scales ``[kv_heads, ...]`` of this process's heads, or a single shared scale unchanged."""
        return scale if len(scale) == 1 else scale[self.slice_of(len(scale), "key/value heads")]


@dataclass(frozen=True, slots=True)
class WeightShard:
    """The rows or columns of a weight (or the entries of its bias) that one process holds.

    Attributes:
        module: name of the module that owns the weight.
        share: tensor-parallel rank of the process.
        rows: row ranges, concatenated; empty for all rows.
        columns: column range; None for all columns.
    """

    module: str
    share: TensorParallelRank
    rows: tuple[slice, ...] = ()
    columns: slice | None = None

    def slice_tensor(self, value: Tensor) -> Tensor:
        """Return a copy of the held part of a weight ``[out_features, in_features]`` or a bias ``[out_features]``."""
        if self.rows:
            return torch.cat([value[part_range] for part_range in self.rows])
        return value if self.columns is None else value[:, self.columns].clone()

    def slice_kernel_weight(self, weight: KernelWeight) -> KernelWeight:
        """Return the held part of a kernel weight.

        Raises:
            RefusedError: a quantization group or a tile of rows would be split.
        """
        problem, parameters = weight.problem, dict(weight.parameters)
        tile, group, superblock = problem.tile_rows, problem.group_size, problem.superblock_size
        shape = (problem.out_features, problem.in_features)
        rows, columns = self.rows or (slice(0, shape[0]),), self.columns or slice(0, shape[1])
        row_ranges = [
            self._parameter_range(part_range, tile, shape[0], "outputs in runs")
            for part_range in rows
        ]
        row_ranges = row_ranges[:1] if tile >= shape[0] else row_ranges
        for name in parameters.keys() - _UNSPLIT_PARAMETERS:
            size = superblock if name in _SUPERBLOCK_PARAMETERS else group
            column_range = self._parameter_range(columns, size, shape[1], "inputs in groups")
            parameters[name] = torch.cat(
                [parameters[name][part_range, column_range] for part_range in row_ranges]
            )
        width = columns.stop - columns.start
        shard_problem = replace(
            problem,
            out_features=sum(part_range.stop - part_range.start for part_range in rows),
            in_features=width,
            group_size=width if group == shape[1] else group,
            superblock_size=width if superblock == shape[1] else superblock,
        )
        codes = torch.cat([weight.codes[part_range, columns] for part_range in rows])
        return KernelWeight(shard_problem, codes, parameters)

    def _parameter_range(self, part_range: slice, size: int, total: int, label: str) -> slice:
        """Convert a range of rows or columns to the range of parameters, each of which covers ``size`` of them."""
        if size >= total:
            return slice(0, 1)
        if part_range.start % size or (part_range.stop % size and part_range.stop != total):
            raise RefusedError(
                f"{self.module}: {total} {label} of {size} cannot be cut at {part_range.start} and {part_range.stop}",
                "fewer processes, or a model in smaller groups",
                tensor=f"{self.module}.weight",
            )
        return slice(part_range.start // size, -(-part_range.stop // size))


def init_tensor_parallel(device: str) -> TensorParallelRank | None:
    """Initialize torch.distributed if needed; return the rank of this process, or None if it is the only one.

    Args:
        device: device of the model; CPUs use gloo, GPUs NCCL.

    Raises:
        UsageError: the process was not started by torchrun (the environment describes no process group).
    """
    if not dist.is_initialized():
        if torch.device(device).index is not None:
            torch.cuda.set_device(device)
        try:
            dist.init_process_group("gloo" if device == "cpu" else "nccl")
        except ValueError as error:
            raise UsageError(
                f"a model over several processes: {error}",
                "torchrun --nproc-per-node N -m quantforge generate MODEL PROMPT",
            ) from error
        atexit.register(dist.destroy_process_group)  # its threads, left to the end, may abort it
    if dist.get_world_size() == 1:
        return None
    return TensorParallelRank(dist.get_rank(), dist.get_world_size(), _all_reduce)


def _all_reduce(local_sum: Tensor) -> Tensor:
    """Sum the tensors of all processes in rank order, so that the result has the same bits in each."""
    partial_sums = [torch.empty_like(local_sum) for _ in range(dist.get_world_size())]
    dist.all_gather(partial_sums, local_sum.contiguous())
    return reduce(torch.add, (partial_sum.float() for partial_sum in partial_sums)).to(
        local_sum.dtype
    )
