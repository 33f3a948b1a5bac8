"""Shares of a model: each of several processes holds a part of every matrix of a block, and they sum their results.

Of attention each process holds some heads: rows of the projections to queries, keys and values, and the columns of the
output projection that read them. Of an MLP it holds rows of gate and up, and the same columns of down. A block then
needs two sums, behind the output projection and behind down; biases there are added once, to the sum. Norms, the
embedding and the head are in every process. So is what attention keeps of its heads: a cache of these heads alone.

Every process is told the same tokens and computes the same logits, and so chooses the same next token.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quantforge.architectures import LayerKind, Parameter
from quantforge.architectures.match import Matched
from quantforge.errors import RefusedError, UsageError
from quantforge.runtime.computed import supports
from quantforge.runtime.decoder_layer import multiply
from quantforge.runtime.weight_cuts import Cut, Share
from quantforge_kernels.layers import add_bias

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge.formats import ModuleLayout
    from quantforge.scheme import Activation

_SHARED = frozenset({"q", "kv", "qkv", "ffn", "gate_up"})  # dimensions
_BY_HEAD = frozenset({"heads", "kv_heads"})


class SummedLinear(nn.Module):
    """A linear layer of which every process holds some columns.

    Args:
        part: what is here of it; its bias is taken from it.
        share: of this process.
    """

    def __init__(self, part: nn.Module, share: Share) -> None:
        super().__init__()
        self.ranks = share.ranks
        self._total = share.total
        bias = part.bias
        assert bias is None or isinstance(bias, Tensor)
        self.bias = bias
        if bias is not None:
            part.register_parameter("bias", None)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """Multiply this process's ``x`` ``[..., columns]``; return the sum of all, ``[..., out_features]``."""
        y = self._total(multiply(self.part, x.reshape(-1, x.shape[-1])))
        y = y if self.bias is None else add_bias(y, self.bias)
        return y.view(*x.shape[:-1], -1)


def ranks_of(model: nn.Module) -> int:
    """Return how many processes share a model; 1: it is whole."""
    return next((one.ranks for one in model.modules() if isinstance(one, SummedLinear)), 1)


def cuts_of(
    model: PreTrainedModel,
    matched: Matched,
    layouts: Mapping[str, ModuleLayout],
    share: Share | None,
) -> dict[str, Cut]:
    """Return by name the parameters of which a process holds a part; none, where it is the only one.

    Args:
        model: the skeleton.
        matched: its checkpoint.
        layouts: the quantized linears, by the stored name of their module.
        share: of this process.

    Raises:
        RefusedError: a model that is not shared, with the reason.
    """
    if share is None:
        return {}
    family, sizes = matched.architecture, matched.dimensions
    if family is None or sizes is None or family.own_graph is None or not supports(model):
        raise _refused(f"model_type {matched.model_type!r} is not computed by the own decoder")
    share.of(sizes.kv_heads, "key/value heads")
    found = {}
    for index, kind in enumerate(matched.layers):
        if kind.stacks:
            raise _refused(f"{matched.block_name(index)}: experts of a mixture are not split")
        for item in kind.parameters:
            name = f"{matched.block_name(index)}.{item.name}"
            held = matched.by_name.get(name)
            if held is None:
                continue
            cut = _cut(matched, kind, item, name.rpartition(".")[0], share)
            if cut is None:
                continue
            layout = layouts.get(held.stored.name.removesuffix(".weight"))
            if layout is not None and layout.scheme.input is not None:
                _check_input(cut, layout.scheme.input)
            found[name] = cut
    return found


def sum_parts(model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Let layers of which some columns are here return the sum over all processes."""
    for cut in cuts.values():
        if cut.columns is not None:
            part = model.get_submodule(cut.module)
            model.set_submodule(cut.module, SummedLinear(part, cut.share))


def _cut(
    matched: Matched, kind: LayerKind, item: Parameter, module: str, share: Share
) -> Cut | None:
    """Return how a parameter of a block is cut; None: every process holds all of it."""
    family, sizes = matched.architecture, matched.dimensions
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
