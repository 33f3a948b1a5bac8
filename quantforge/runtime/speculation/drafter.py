"""The drafter interface, the cache of a drafter, and reading of draft-head linears.

A drafter proposes the next tokens of one text and may read what the model computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from quantforge.formats.sources.head_directory import DraftHeadDirectory
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.cache import PagedCache
from quantforge.runtime.linear import PackedLinear
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.draft_options import MAX_NODES
from quantforge.runtime.speculation.tree import DraftTree
from quantforge_kernels.layers import linear

Linear = Callable[[Tensor], Tensor]  # maps activations [..., in_features] to [..., out_features]


@dataclass(frozen=True, slots=True)
class PassOutputs:
    """Outputs of a forward pass of the model over the prompt, or over the last token and a draft tree.

    Attributes:
        tree: the draft tree; empty for the prompt.
        logits: ``[nodes + 1, vocabulary]``, after the last token of the text and after each node.
        hidden: final hidden states ``[tokens, hidden]`` of the new tokens that stay in the text, including
            accepted drafted tokens.
        features: inputs of some blocks for the same tokens, in the order of `Drafter.taps`.
        next_tokens: for each of these tokens, the token that follows it in the text.
    """

    tree: DraftTree
    logits: Tensor
    hidden: Tensor
    features: tuple[Tensor, ...]
    next_tokens: tuple[int, ...]


class Drafter(ABC):
    """Interface of a drafter for one text; it may keep state.

    Attributes:
        taps: blocks whose inputs `observe` reads; None if the drafter reads nothing that the model computes.
    """

    taps: tuple[int, ...] | None = None

    @abstractmethod
    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:
        """Draft continuations of ``history``: a tree of depth at most ``most`` and at most `MAX_NODES` nodes.

        Args:
            history: tokens of the prompt and the completion so far; it grows from call to call.
            most: most drafted tokens in a row, at least 1.
            sampler: the sampler of the text; fork it, do not advance it.
        """

    def observe(self, computed: PassOutputs) -> None:  # noqa: B027 (few drafters read passes)
        """Read the outputs of a pass of the model; not called if `taps` is None."""


def allocate_text_cache(make: Callable[[int, int], PagedCache], tokens: int) -> PagedCache:
    """Allocate a cache for one text with room for a draft tree after it.

    A pass stores all nodes of the tree in slots after the text, although their positions do not exceed its length.

    Args:
        make: allocates a cache for a number of sequences of a number of tokens.
        tokens: most tokens of the text.
    """
    cache = make(1, tokens + MAX_NODES)
    cache.reserve(0, tokens + MAX_NODES)
    cache.max_tokens = tokens
    return cache


def read_linear(
    heads: DraftHeadDirectory, shape: tuple[int, int], candidates: Sequence[str], like: Tensor
) -> Linear:
    """Read a linear of draft heads: weight ``[out_features, in_features]``, and bias if stored.

    Args:
        heads: the directory of draft heads.
        shape: shape of the weight.
        candidates: candidate module names, without ``.weight``; the first that exists is read.
        like: a tensor with the type and device of the activations.

    Raises:
        InputError: as `DraftHeadDirectory.read` does.
    """
    weight, bias = heads.weight(shape, *(f"{name}.weight" for name in candidates)), None
    biases = [f"{name}.bias" for name in candidates]
    if heads.find(*biases):
        bias = heads.read(shape[:1], *biases).to(like.device, like.dtype)
    if isinstance(weight, QuantizedTensor):
        return PackedLinear(weight, bias, like.dtype, like.device)
    return partial(linear, weight=weight.to(like.device, like.dtype), bias=bias)
