"""The drafter interface, the cache of a drafter, reading of draft-head linears, and drafting from hidden states.

A drafter proposes the next tokens of one text and may read what the model computed. `HiddenStateDrafter` runs a small
network (EAGLE-3, MTP) that reads each token together with the model's hidden state before it. For drafted tokens, its
own states take the place of the model's. So it drafts token by token, like a draft model, for the cost of one layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.formats.sources.head_directory import DraftHeadDirectory
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.cache import PagedCache
from quantforge.runtime.linear import PackedLinear
from quantforge.runtime.ragged_attention import Span
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.options import MAX_NODES
from quantforge.runtime.speculation.tree import ROOT, DraftTree, Leaf
from quantforge_kernels.layers import linear

if TYPE_CHECKING:
    from quantforge.runtime.speculation.eagle3 import Eagle3Layer
    from quantforge.runtime.speculation.mtp import MtpLayer

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


class HiddenStateDrafter(Drafter):
    """Drafter that runs an EAGLE-3 or MTP layer on the model's hidden states.

    Args:
        network: the draft layer.
        max_tokens: most tokens of the text.
        shape: branching factors of the draft tree by depth, see `parse_tree_shape`.
    """

    def __init__(
        self, network: Eagle3Layer | MtpLayer, max_tokens: int, shape: Sequence[int]
    ) -> None:
        self.taps = network.taps
        self._network, self._shape = network, shape
        self._cache = allocate_text_cache(network.cache, max_tokens)
        self._cached_tokens = 0  # tokens of the text in its cache; those of the last tree follow
        self._last_output: Tensor | None = None  # the layer's output at the last token of the text

    @torch.inference_mode()
    def observe(self, computed: PassOutputs) -> None:
        """Run the layer on the model's hidden states and the tokens that follow them."""
        features = self._network.features(computed)
        self._cache.advance(0, self._cached_tokens - self._cache.length(0))
        ids = torch.tensor(computed.next_tokens, device=features.device)
        self._last_output = self._network.compute(ids, features, Span(0, len(ids)), self._cache)[
            -1:
        ]
        self._cached_tokens += len(ids)

    @torch.inference_mode()
    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:  # noqa: ARG002 (read already)
        """Draft a tree of the tokens that the layer finds most likely; see `Drafter.draft`."""
        assert self._last_output is not None
        tree, states = (
            DraftTree(),
            self._last_output,
        )  # outputs at the root and at all nodes except the leaves
        leaves: list[Leaf] = [(ROOT, sampler)]
        for level, count in enumerate(self._shape[:most]):
            if level:
                new_nodes = range(len(states) - 1, len(tree.tokens))
                parent_states = states[[tree.parents[node] + 1 for node in new_nodes]]
                ids = torch.tensor([tree.tokens[node] for node in new_nodes], device=states.device)
                span = Span(0, len(new_nodes), tree.mask(root=False).to(states.device))
                states = torch.cat(
                    (states, self._network.compute(ids, parent_states, span, self._cache))
                )
            logits = self._network.logits(states[-len(leaves) :])
            leaves = tree.extend_leaves(leaves, logits, count)
        return tree


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
