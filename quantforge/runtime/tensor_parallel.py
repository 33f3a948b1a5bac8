"""Tensor parallelism: each of several processes holds a part of every matrix of a block, and their results are summed.

In attention, each process holds some heads: rows of the query, key and value projections, and the matching columns of
the output projection; its KV cache covers these heads only. In an MLP it holds rows of gate and up, and the same
columns of down. A block then needs two sums, after the output projection and after down; biases there are added once,
to the sum. Norms, the embedding and the output head are replicated in every process.

Columns are split between quantization groups, so that no scale is split. Each shard is an ordinary matrix whose codes
and parameters are bit for bit those of the whole.

Every process gets the same tokens and computes the same logits, and so chooses the same next token.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quantforge.architectures import LayerKind, Parameter
from quantforge.architectures.match import ModelLayout
from quantforge.errors import RefusedError, UsageError
from quantforge.runtime.decoder import supports
from quantforge.runtime.linear import KernelWeight, RowParallelLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge.formats import ModuleLayout
    from quantforge.scheme import Activation

_SPLIT_DIMENSIONS = frozenset({"q", "kv", "qkv", "ffn", "gate_up"})
_HEAD_DIMENSIONS = frozenset({"heads", "kv_heads"})
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

    def slice_of(self, size: int, what: str) -> slice:
        """Return the slice of ``size`` items that belongs to this process.

        Raises:
            RefusedError: ``size`` is not divisible by the number of processes.
        """
        if size % self.ranks:
            raise RefusedError(
                f"{what}: {size} cannot be split over {self.ranks} processes",
                "a number of processes that divides it",
            )
        part = size // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)

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

    def slice_kernel_weight(self, whole: KernelWeight) -> KernelWeight:
        """Return the held part of a kernel weight.

        Raises:
            RefusedError: a quantization group or a tile of rows would be split.
        """
        problem, parameters = whole.problem, dict(whole.parameters)
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
            part = self._parameter_range(columns, size, shape[1], "inputs in groups")
            parameters[name] = torch.cat(
                [parameters[name][part_range, part] for part_range in row_ranges]
            )
        width = columns.stop - columns.start
        shard_problem = replace(
            problem,
            out_features=sum(part_range.stop - part_range.start for part_range in rows),
            in_features=width,
            group_size=width if group == shape[1] else group,
            superblock_size=width if superblock == shape[1] else superblock,
        )
        codes = torch.cat([whole.codes[part_range, columns] for part_range in rows])
        return KernelWeight(shard_problem, codes, parameters)

    def _parameter_range(self, part_range: slice, size: int, whole: int, what: str) -> slice:
        """Convert a range of rows or columns to the range of parameters, each of which covers ``size`` of them."""
        if size >= whole:
            return slice(0, 1)
        if part_range.start % size or (part_range.stop % size and part_range.stop != whole):
            raise RefusedError(
                f"{self.module}: {whole} {what} of {size} cannot be cut at {part_range.start} and {part_range.stop}",
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


def _all_reduce(part: Tensor) -> Tensor:
    """Sum the tensors of all processes in rank order, so that the result has the same bits in each."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return reduce(torch.add, (one.float() for one in parts)).to(part.dtype)


def find_shards(
    model: PreTrainedModel,
    model_layout: ModelLayout,
    layouts: Mapping[str, ModuleLayout],
    share: TensorParallelRank,
) -> dict[str, WeightShard]:
    """Return the parameters of which this process holds only a part, by name.

    Args:
        model: the skeleton.
        model_layout: its checkpoint.
        layouts: the quantized linears, by the stored name of their module.
        share: tensor-parallel rank of this process.

    Raises:
        RefusedError: the model cannot be split; the message says why.
    """
    family, sizes = model_layout.architecture, model_layout.dimensions
    if family is None or sizes is None or family.complete_graph is None or not supports(model):
        raise _cannot_split(
            f"model_type {model_layout.model_type!r} is not computed by the own decoder"
        )
    share.slice_of(sizes.kv_heads, "key/value heads")
    shards = {}
    for index, kind in enumerate(model_layout.layers):
        if kind.stacks:
            raise _cannot_split(
                f"{model_layout.block_name(index)}: experts of a mixture are not split"
            )
        for item in kind.parameters:
            name = f"{model_layout.block_name(index)}.{item.name}"
            tensor = model_layout.by_name.get(name)
            if tensor is None:
                continue
            shard = _shard_of_parameter(model_layout, kind, item, name.rpartition(".")[0], share)
            if shard is None:
                continue
            layout = layouts.get(tensor.header.name.removesuffix(".weight"))
            if layout is not None and layout.scheme.input is not None:
                _check_input(shard, layout.scheme.input)
            shards[name] = shard
    return shards


def _shard_of_parameter(
    model_layout: ModelLayout,
    kind: LayerKind,
    item: Parameter,
    module: str,
    share: TensorParallelRank,
) -> WeightShard | None:
    """Return which part of a block parameter this process holds; None if the parameter is replicated."""
    family, sizes = model_layout.architecture, model_layout.dimensions
    assert family is not None
    assert sizes is not None
    graph = family.complete_graph
    assert graph is not None
    owner, _, leaf = item.name.rpartition(".")
    if owner not in kind.linears:
        is_head_norm = any(
            owner.startswith(f"{graph.attention_module}.{norm}.") for norm in graph.head_norms
        )
        if is_head_norm or _SPLIT_DIMENSIONS & {*item.shape}:
            raise _cannot_split(f"{module}: a norm of all heads, which are split")
        if _HEAD_DIMENSIONS & {*item.shape[:1]}:  # a row for each
            return WeightShard(module, share, (share.slice_of(sizes.size(item.shape[0]), module),))
        return None
    shape = next(one.shape for one in kind.parameters if one.name == f"{owner}.weight")
    attention = owner.startswith(f"{graph.attention_module}.")
    if owner == f"{graph.attention_module}.{graph.output_proj}" or (
        not attention and shape[0] == "hidden"
    ):
        size = sizes.size(shape[1])
        return (
            WeightShard(module, share, columns=share.slice_of(size, f"{module}: inputs"))
            if leaf != "bias"
            else None
        )
    size, start, rows = sizes.size(shape[0]), 0, []
    parts = [sizes.size(text) for text in family.slices.get(owner, ())]
    for part in parts if sum(parts) == size else [size]:
        part_range = share.slice_of(part, f"{module}: outputs")
        rows.append(slice(start + part_range.start, start + part_range.stop))
        start += part
    return WeightShard(module, share, tuple(rows))


def _check_input(shard: WeightShard, taken: Activation) -> None:
    """Check that rounding of the inputs does not depend on columns that other processes hold."""
    if taken.threshold is not None:
        raise _cannot_split(
            f"{shard.module}: columns of its input that are kept in 16 bits are not split"
        )
    if shard.columns is None or not taken.dynamic:
        return
    run = taken.granularity.removeprefix("g")
    if not run.isdecimal() or shard.columns.start % int(run):
        raise _cannot_split(
            f"{shard.module}: inputs are rounded by the range of a whole {taken.granularity}"
        )


def _cannot_split(why: str) -> RefusedError:
    return RefusedError(f"a model over several processes: {why}", "one process, without torchrun")


def wrap_split_linears(model: nn.Module, shards: Mapping[str, WeightShard]) -> None:
    """Wrap the linears whose columns are split, so that their outputs are summed over all processes."""
    for shard in shards.values():
        if shard.columns is not None:
            part = model.get_submodule(shard.module)
            model.set_submodule(shard.module, RowParallelLinear(part, shard.share))
