"""Split a model for tensor parallelism: which rows or columns of each parameter a process holds.

In attention, each process holds some heads: rows of the query, key and value projections, and the matching columns of
the output projection; its KV cache covers these heads only. In an MLP it holds rows of gate and up, and the same
columns of down. A block then needs two sums, after the output projection and after down; biases there are added once,
to the sum. Norms, the embedding and the output head are replicated in every process.

Columns are split between quantization groups, so that no scale is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from quantforge.architectures import LayerKind, Parameter
from quantforge.architectures.match import ModelLayout
from quantforge.errors import RefusedError
from quantforge.runtime.decoder import supports
from quantforge.runtime.linear import RowParallelLinear
from quantforge.runtime.tensor_parallel import TensorParallelRank, WeightShard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge.formats import ModuleLayout
    from quantforge.scheme import Activation

_SPLIT_DIMENSIONS = frozenset({"q", "kv", "qkv", "ffn", "gate_up"})
_HEAD_DIMENSIONS = frozenset({"heads", "kv_heads"})


def find_shards(
    model: PreTrainedModel,
    model_layout: ModelLayout,
    layouts: Mapping[str, ModuleLayout],
    rank: TensorParallelRank,
) -> dict[str, WeightShard]:
    """Return the parameters of which this process holds only a part, by name.

    Args:
        model: the skeleton.
        model_layout: its checkpoint.
        layouts: the quantized linears, by the stored name of their module.
        rank: tensor-parallel rank of this process.

    Raises:
        RefusedError: the model cannot be split; the message says why.
    """
    family, sizes = model_layout.architecture, model_layout.dimensions
    if family is None or sizes is None or family.graph_if_complete is None or not supports(model):
        raise _cannot_split(
            f"model_type {model_layout.model_type!r} is not computed by the own decoder"
        )
    rank.slice_of(sizes.kv_heads, "key/value heads")
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
            shard = _shard_of_parameter(model_layout, kind, item, name.rpartition(".")[0], rank)
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
    rank: TensorParallelRank,
) -> WeightShard | None:
    """Return which part of a block parameter this process holds; None if the parameter is replicated."""
    family, sizes = model_layout.architecture, model_layout.dimensions
    assert family is not None
    assert sizes is not None
    graph = family.graph_if_complete
    assert graph is not None
    owner, _, leaf = item.name.rpartition(".")
    if owner not in kind.linears:
        is_head_norm = any(
            owner.startswith(f"{graph.attention_module}.{norm}.") for norm in graph.head_norms
        )
        if is_head_norm or _SPLIT_DIMENSIONS & {*item.shape}:
            raise _cannot_split(f"{module}: a norm of all heads, which are split")
        if _HEAD_DIMENSIONS & {*item.shape[:1]}:  # a row for each
            return WeightShard(module, rank, (rank.slice_of(sizes.size(item.shape[0]), module),))
        return None
    shape = next(
        parameter.shape for parameter in kind.parameters if parameter.name == f"{owner}.weight"
    )
    attention = owner.startswith(f"{graph.attention_module}.")
    if owner == f"{graph.attention_module}.{graph.output_proj}" or (
        not attention and shape[0] == "hidden"
    ):
        size = sizes.size(shape[1])
        return (
            WeightShard(module, rank, columns=rank.slice_of(size, f"{module}: inputs"))
            if leaf != "bias"
            else None
        )
    size, start, rows = sizes.size(shape[0]), 0, []
    part_sizes = [sizes.size(text) for text in family.slices.get(owner, ())]
    for part_size in part_sizes if sum(part_sizes) == size else [size]:
        part_range = rank.slice_of(part_size, f"{module}: outputs")
        rows.append(slice(start + part_range.start, start + part_range.stop))
        start += part_size
    return WeightShard(module, rank, tuple(rows))


def _check_input(shard: WeightShard, activation: Activation) -> None:
    """Check that rounding of the inputs does not depend on columns that other processes hold."""
    if activation.threshold is not None:
        raise _cannot_split(
            f"{shard.module}: columns of its input that are kept in 16 bits are not split"
        )
    if shard.columns is None or not activation.dynamic:
        return
    run = activation.granularity.removeprefix("g")
    if not run.isdecimal() or shard.columns.start % int(run):
        raise _cannot_split(
            f"{shard.module}: inputs are rounded by the range of a whole {activation.granularity}"
        )


def _cannot_split(reason: str) -> RefusedError:
    return RefusedError(
        f"a model over several processes: {reason}", "one process, without torchrun"
    )


def wrap_split_linears(model: nn.Module, shards: Mapping[str, WeightShard]) -> None:
    """Wrap the linears whose columns are split, so that their outputs are summed over all processes."""
    for shard in shards.values():
        if shard.columns is not None:
            linear = model.get_submodule(shard.module)
            model.set_submodule(shard.module, RowParallelLinear(linear, shard.share))
