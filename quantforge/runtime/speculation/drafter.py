"""What drafters have in common: the interface, their cache, linears of draft heads, and a drafter of a small network.

A drafter proposes the next tokens of one text, and may read what the model computed. That of a small network (EAGLE-3,
MTP) reads each token together with the model's state before it: after the model's text it reads what the model
computed, after drafted tokens its own states stand in for that. So it drafts place by place, as a draft model does, for
the price of a single layer.
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
from quantforge.runtime.speculation.options import MOST_NODES
from quantforge.runtime.speculation.tree import ROOT, DraftTree, Leaf
from quantforge_kernels.layers import linear

if TYPE_CHECKING:
    from quantforge.runtime.speculation.eagle3 import Eagle3Layer
    from quantforge.runtime.speculation.mtp import MtpLayer

Linear = Callable[[Tensor], Tensor]  # of activations [..., in_features]


@dataclass(frozen=True, slots=True)
class Computed:
    """What the model computed in a pass: of the prompt, or of the last token and a tree after it.

    Attributes:
        tree: of the pass; empty for the prompt.
        logits: ``[nodes + 1, vocabulary]``, after the last token of the text and after each node.
        hidden: ``[tokens, hidden]`` of what stays in the text (what was new in it, and the drafted tokens that were
            right), after the last norm.
        features: inputs of some blocks likewise, in the order of `Drafter.taps`.
        following: the token of the text that follows each of these.
    """

    tree: DraftTree
    logits: Tensor
    hidden: Tensor
    features: tuple[Tensor, ...]
    following: tuple[int, ...]


class Drafter(ABC):
    """Drafter of one text; it may keep state.

    Attributes:
        taps: blocks of the model whose inputs it reads in `observe`; None: it reads nothing that the model computes.
    """

    taps: tuple[int, ...] | None = None

    @abstractmethod
    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:
        """Draft how ``history`` may continue: at most ``most`` tokens in a row, and `MOST_NODES` in all, or none.

        Args:
            history: prompt and completion so far; longer at each call.
            most: at least 1.
            sampler: what will choose the tokens; it must be forked, not advanced.
        """

    def observe(self, computed: Computed) -> None:  # noqa: B027 (few drafters read passes)
        """Read a pass, with drafted tokens or without; not called where `taps` is None."""


def cache_of_text(make: Callable[[int, int], PagedCache], tokens: int) -> PagedCache:
    """Return a cache for one text, and a tree of drafted tokens after it.

    A pass writes all drafted tokens: places go beyond the last token of the text, positions do not.

    Args:
        make: a cache for so many sequences of so many tokens.
        tokens: most tokens of the text.
    """
    cache = make(1, tokens + MOST_NODES)
    cache.reserve(0, tokens + MOST_NODES)
    cache.most_tokens = tokens
    return cache


class FeatureDrafter(Drafter):
    """Drafter of a network for one text.

    Args:
        network: its weights.
        room: most tokens of the text.
        shape: of its trees, see `shape_of`.
    """

    def __init__(self, network: Eagle3Layer | MtpLayer, room: int, shape: Sequence[int]) -> None:
        self.taps = network.taps
        self._network, self._shape = network, shape
        self._cache = cache_of_text(network.cache, room)
        self._read = 0  # tokens of the text in its cache; the last tree follows
        self._last: Tensor | None = None  # its state at the text's last token

    @torch.inference_mode()
    def observe(self, computed: Computed) -> None:
        """Read the states of the model, and the tokens after them."""
        features = self._network.features(computed)
        self._cache.advance(0, self._read - self._cache.length(0))
        ids = torch.tensor(computed.following, device=features.device)
        self._last = self._network.compute(ids, features, Span(0, len(ids)), self._cache)[-1:]
        self._read += len(ids)

    @torch.inference_mode()
    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:  # noqa: ARG002 (read already)
        """Return what the network finds most likely, as `Drafter.draft`."""
        assert self._last is not None
        tree, states = DraftTree(), self._last  # of the root and of all nodes but the leaves
        leaves: list[Leaf] = [(ROOT, sampler)]
        for place, count in enumerate(self._shape[:most]):
            if place:
                new = range(len(states) - 1, len(tree.tokens))
                before = states[[tree.parents[node] + 1 for node in new]]
                ids = torch.tensor([tree.tokens[node] for node in new], device=states.device)
                span = Span(0, len(new), tree.mask(root=False).to(states.device))
                states = torch.cat((states, self._network.compute(ids, before, span, self._cache)))
            logits = self._network.logits(states[-len(leaves) :])
            leaves = tree.grow(leaves, logits, count)
        return tree


def read_linear(
    heads: DraftHeadDirectory, shape: tuple[int, int], names: Sequence[str], like: Tensor
) -> Linear:
    """Read a linear with a weight ``[out_features, in_features]``, and the bias beside it if there is one.

    Args:
        heads: the directory.
        shape: of the weight.
        names: of the module, the first that is there; without ``.weight``.
        like: has the type and the device of the activations.

    Raises:
        InputError: as `DraftHeadDirectory.read`.
    """
    weight, bias = heads.weight(shape, *(f"{name}.weight" for name in names)), None
    biases = [f"{name}.bias" for name in names]
    if heads.find(*biases):
        bias = heads.read(shape[:1], *biases).to(like.device, like.dtype)
    if isinstance(weight, QuantizedTensor):
        return PackedLinear(weight, bias, like.dtype, like.device)
    return partial(linear, weight=weight.to(like.device, like.dtype), bias=bias)
