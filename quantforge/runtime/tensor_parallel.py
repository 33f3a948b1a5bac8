"""Shares of a model: each of several processes holds a part of every matrix of a block, and they sum their results.

Of attention each process holds some heads: rows of the projections to queries, keys and values, and the columns of the
output projection that read them. Of an MLP it holds rows of gate and up, and the same columns of down. A block then
needs two sums, after the output projection and after down; biases there are added once, to the sum. Norms, the
embedding and the head are in every process. So is what attention keeps of its heads: a cache of these heads alone.

A cut of columns lies between groups, so that no scale is cut. What is left is a matrix of its own: its codes and
parameters are those of the whole, bit for bit.

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
from quantforge.runtime.linear import KernelWeight, SummedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge.formats import ModuleLayout
    from quantforge.scheme import Activation

_SHARED = frozenset({"q", "kv", "qkv", "ffn", "gate_up"})  # dimensions
_BY_HEAD = frozenset({"heads", "kv_heads"})
_OF_ALL = frozenset({"table"})  # parameters of the grid, not of rows
_UPPER = frozenset({"d", "dmin"})  # one for each superblock


@dataclass(frozen=True, slots=True)
class Share:
    """Share of one process.

    Attributes:
        rank: its number, from 0.
        ranks: how many processes there are.
        total: returns the sum of a tensor over all processes, the same bits in each; each has to call it.
    """

    rank: int
    ranks: int
    total: Callable[[Tensor], Tensor]

    def of(self, size: int, what: str) -> slice:
        """Return the run of ``size`` things that is this process's.

        Raises:
            RefusedError: there are not as many for each process.
        """
        if size % self.ranks:
            raise RefusedError(
                f"{what}: {size} cannot be split over {self.ranks} processes",
                "a number of processes that divides it",
            )
        part = size // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)

    def of_heads(self, scale: Tensor) -> Tensor:
        """Return the scales ``[kv_heads, ...]`` of the heads of this process; one scale for all stays."""
        return scale if len(scale) == 1 else scale[self.of(len(scale), "key/value heads")]


@dataclass(frozen=True, slots=True)
class Cut:
    """Runs of rows of a weight, or of its bias, one after the other; or a run of columns.

    Attributes:
        module: whose weight it is.
        share: of the process that holds it.
        rows: the runs; none are all rows.
        columns: the run; None is all columns.
    """

    module: str
    share: Share
    rows: tuple[slice, ...] = ()
    columns: slice | None = None

    def plain(self, value: Tensor) -> Tensor:
        """Return what is left of a weight ``[out_features, in_features]`` or a bias ``[out_features]``, copied."""
        if self.rows:
            return torch.cat([value[run] for run in self.rows])
        return value if self.columns is None else value[:, self.columns].clone()

    def kernel_weight(self, whole: KernelWeight) -> KernelWeight:
        """Return what is left of a weight, as kernels take it.

        Raises:
            RefusedError: a group, or a tile of rows, would be cut.
        """
        problem, parameters = whole.problem, dict(whole.parameters)
        tile, group, upper = problem.tile_rows, problem.group_size, problem.superblock_size
        left = (problem.out_features, problem.in_features)
        rows, columns = self.rows or (slice(0, left[0]),), self.columns or slice(0, left[1])
        runs = [self._among(run, tile, left[0], "outputs in runs") for run in rows]
        runs = runs[:1] if tile >= left[0] else runs
        for name in parameters.keys() - _OF_ALL:
            size = upper if name in _UPPER else group
            part = self._among(columns, size, left[1], "inputs in groups")
            parameters[name] = torch.cat([parameters[name][run, part] for run in runs])
        width = columns.stop - columns.start
        smaller = replace(
            problem,
            out_features=sum(run.stop - run.start for run in rows),
            in_features=width,
            group_size=width if group == left[1] else group,
            superblock_size=width if upper == left[1] else upper,
        )
        codes = torch.cat([whole.codes[run, columns] for run in rows])
        return KernelWeight(smaller, codes, parameters)

    def _among(self, run: slice, size: int, whole: int, what: str) -> slice:
        """Return a run of rows or columns among parameters of which each serves ``size`` of them."""
        if size >= whole:
            return slice(0, 1)
        if run.start % size or (run.stop % size and run.stop != whole):
            raise RefusedError(
                f"{self.module}: {whole} {what} of {size} cannot be cut at {run.start} and {run.stop}",
                "fewer processes, or a model in smaller groups",
                tensor=f"{self.module}.weight",
            )
        return slice(run.start // size, -(-run.stop // size))


def share_of_process(device: str) -> Share | None:
    """Return the share of this process; None: it is the only one.

    Args:
        device: where it computes: processors speak gloo, GPUs NCCL.

    Raises:
        UsageError: torchrun (or whoever else describes the processes in the environment) did not start it.
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
    return Share(dist.get_rank(), dist.get_world_size(), _total)


def _total(part: Tensor) -> Tensor:
    """Return the sum of all processes' parts in the order of their ranks, so that its bits are the same everywhere."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return reduce(torch.add, (one.float() for one in parts)).to(part.dtype)


def cuts_of(
    model: PreTrainedModel,
    model_layout: ModelLayout,
    layouts: Mapping[str, ModuleLayout],
    share: Share,
) -> dict[str, Cut]:
    """Return by name the parameters of which a process holds a part.

    Args:
        model: the skeleton.
        model_layout: its checkpoint.
        layouts: the quantized linears, by the stored name of their module.
        share: of this process.

    Raises:
        RefusedError: a model that is not shared, with the reason.
    """
    family, sizes = model_layout.architecture, model_layout.dimensions
    if family is None or sizes is None or family.own_graph is None or not supports(model):
        raise _refused(f"model_type {model_layout.model_type!r} is not computed by the own decoder")
    share.of(sizes.kv_heads, "key/value heads")
    found = {}
    for index, kind in enumerate(model_layout.layers):
        if kind.stacks:
            raise _refused(f"{model_layout.block_name(index)}: experts of a mixture are not split")
        for item in kind.parameters:
            name = f"{model_layout.block_name(index)}.{item.name}"
            held = model_layout.by_name.get(name)
            if held is None:
                continue
            cut = _cut(model_layout, kind, item, name.rpartition(".")[0], share)
            if cut is None:
                continue
            layout = layouts.get(held.header.name.removesuffix(".weight"))
            if layout is not None and layout.scheme.input is not None:
                _check_input(cut, layout.scheme.input)
            found[name] = cut
    return found


def _cut(
    model_layout: ModelLayout, kind: LayerKind, item: Parameter, module: str, share: Share
) -> Cut | None:
    """Return how a parameter of a block is cut; None: every process holds all of it."""
    family, sizes = model_layout.architecture, model_layout.dimensions
    assert family is not None
    assert sizes is not None
    graph = family.own_graph
    assert graph is not None
    owner, _, leaf = item.name.rpartition(".")
    if owner not in kind.linears:
        each = any(owner.startswith(f"{graph.attention}.{norm}.") for norm in graph.head_norms)
        if each or _SHARED & {*item.shape}:
            raise _refused(f"{module}: a norm of all heads, which are split")
        if _BY_HEAD & {*item.shape[:1]}:  # a row for each
            return Cut(module, share, (share.of(sizes.size(item.shape[0]), module),))
        return None
    shape = next(one.shape for one in kind.parameters if one.name == f"{owner}.weight")
    attention = owner.startswith(f"{graph.attention}.")
    if owner == f"{graph.attention}.{graph.output}" or (not attention and shape[0] == "hidden"):
        whole = sizes.size(shape[1])
        return (
            Cut(module, share, columns=share.of(whole, f"{module}: inputs"))
            if leaf != "bias"
            else None
        )
    whole, first, rows = sizes.size(shape[0]), 0, []
    parts = [sizes.size(text) for text in family.slices.get(owner, ())]
    for part in parts if sum(parts) == whole else [whole]:
        run = share.of(part, f"{module}: outputs")
        rows.append(slice(first + run.start, first + run.stop))
        first += part
    return Cut(module, share, tuple(rows))


def _check_input(cut: Cut, taken: Activation) -> None:
    """Refuse inputs whose rounding depends on columns that other processes hold."""
    if taken.threshold is not None:
        raise _refused(f"{cut.module}: columns of its input that are kept in 16 bits are not split")
    if cut.columns is None or not taken.dynamic:
        return
    run = taken.granularity.removeprefix("g")
    if not run.isdecimal() or cut.columns.start % int(run):
        raise _refused(
            f"{cut.module}: inputs are rounded by the range of a whole {taken.granularity}"
        )


def _refused(why: str) -> RefusedError:
    return RefusedError(f"a model over several processes: {why}", "one process, without torchrun")


def sum_parts(model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Let layers of which some columns are here return the sum over all processes."""
    for cut in cuts.values():
        if cut.columns is not None:
            part = model.get_submodule(cut.module)
            model.set_submodule(cut.module, SummedLinear(part, cut.share))
