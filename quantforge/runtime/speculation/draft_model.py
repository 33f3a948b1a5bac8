"""A draft model: a smaller model of the same vocabulary, or the model itself in fewer bits.

The model in fewer bits shares everything but the linears of its blocks. Reading fewer bits makes it faster, and being
the same model makes it agree. It needs no second checkpoint and no tokenizer, and takes the memory of its codes alone.
The weights are rounded to nearest as they are in memory; a quantized artifact of the same model, made with data, agrees
more often and can be given as any other draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantforge.architectures import decoder_family
from quantforge.errors import InputError
from quantforge.notation import parse
from quantforge.quantizers.rtn import quantize_matrices
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import Step
from quantforge.runtime.linear import PackedLinear
from quantforge.runtime.load import reason_to_decode
from quantforge.runtime.ragged_attention import Span
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.drafter import Drafter, cache_of_text
from quantforge.runtime.speculation.options import FEWER_BITS
from quantforge.runtime.speculation.tree import ROOT, DraftTree, Leaf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUPS = ("g32:asym", "g64:asym", "g64:sym")
SCHEMES = {f"int{bits}": f"int{bits}:{of}" for bits, of in zip(FEWER_BITS, GROUPS, strict=True)}
STRIP = 512  # columns of a weight that are recovered at a time


class ModelDrafter(Drafter):
    """Drafter that computes a draft model with a cache of its own: all nodes of a depth in one pass.

    Args:
        decoder: the draft model; its vocabulary is that of the model.
        room: most tokens of the text, drafted ones included.
        shape: of its trees, see `shape_of`.
    """

    def __init__(self, decoder: Decoder, room: int, shape: Sequence[int]) -> None:
        self._decoder, self._shape = decoder, shape
        most = min(room, decoder.positions)
        self._cache = cache_of_text(decoder.cache, most)
        self._step = Step(decoder, self._cache)
        self._read = 0  # tokens of the text in the cache; computed nodes of the last tree follow
        self._tree, self._computed = DraftTree(), 0

    @torch.inference_mode()
    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:
        """Return the most likely tokens after each other, as `Drafter.draft`.

        The first after each token is what ``sampler`` would choose of the draft's logits with the draw of that place.
        """
        depth = min(most, len(self._shape), self._cache.most_tokens - len(history))
        if depth < 1:
            return DraftTree()
        path: list[int] = []  # of the last tree, which the text followed
        for token in history[self._read : -1]:  # the last token is computed again for its logits
            node = self._tree.child(path[-1] if path else ROOT, token)
            if node is None or node >= self._computed:
                break
            path.append(node)
        self._cache.keep_path(0, self._read, path)
        logits = self._logits(list(history[self._read + len(path) :]))[-1:]
        self._read, self._computed = len(history), 0
        self._tree = tree = DraftTree()
        leaves: list[Leaf] = [(ROOT, sampler)]
        for place, count in enumerate(self._shape[:depth]):
            if place:
                mask = None if tree.is_chain else tree.mask(root=False)
                logits = self._logits(tree.tokens[self._computed :], mask)
                self._computed = len(tree.tokens)
            leaves = tree.grow(leaves, logits, count)
        return tree

    def _logits(self, tokens: list[int], mask: Tensor | None = None) -> Tensor:
        """Return logits ``[tokens, vocabulary]`` of nodes of the tree, or ``[1, vocabulary]`` after tokens in a row."""
        ids = torch.tensor(tokens, device=self._decoder.device)
        if len(tokens) == 1 and mask is None:
            return self._step(ids)
        span = Span(0, len(tokens), None if mask is None else mask.to(ids.device))
        hidden = self._decoder.hidden_of(ids, [span], self._cache)
        return self._decoder.logits(hidden[-1:] if mask is None else hidden)


def lower_bits(model: PreTrainedModel, bits: str) -> PreTrainedModel:
    """Return the model with the linears of its blocks rounded to fewer bits; it shares everything else.

    Args:
        model: stays as it is.
        bits: one of `SCHEMES`.

    Raises:
        InputError: nothing can be rounded.
    """
    family = decoder_family(model.config.model_type)
    assert family is not None  # see `Decoder`
    scheme = parse(SCHEMES[bits])
    shared = {id(value): value for value in (*model.parameters(), *model.buffers())}
    draft: PreTrainedModel = deepcopy(model, shared)
    blocks = draft.get_submodule(family.blocks)
    rounded = 0
    for name, module in list(blocks.named_modules()):
        if isinstance(module, PackedLinear):
            columns, held = module.problem.in_features, module.problem.bits
        elif isinstance(module, nn.Linear) and not reason_to_decode(
            draft, f"{family.blocks}.{name}", family
        ):
            columns, held = module.in_features, 16
        else:
            continue
        if held > scheme.bits and columns % scheme.group_size(columns) == 0:
            weight = weight_of(module)
            tensor = quantize_matrices({"draft": weight}, None, {"draft": scheme}, "search")[
                "draft"
            ]
            packed = PackedLinear(tensor, module.bias, model.dtype, weight.device)
            blocks.set_submodule(name, packed)
            rounded += 1
    if not rounded:
        raise InputError(
            f"no linear of this model can be a draft in {scheme}",
            "its matrices have fewer bits already, or rows that no group divides: take --draft ngram",
        )
    return draft


def weight_of(module: nn.Linear | PackedLinear) -> Tensor:
    """Return the weight ``[out, in]`` in float32 with which a linear multiplies, recovered by multiplying."""
    if isinstance(module, nn.Linear):
        return module.weight.detach().float()
    columns = module.problem.in_features
    strips = []
    for first in range(0, columns, STRIP):
        width = min(STRIP, columns - first)
        unit = torch.zeros(width, columns, dtype=module.problem.dtype, device=module.weight.device)
        unit[torch.arange(width), torch.arange(first, first + width)] = 1
        y = module(unit)
        strips.append((y if module.bias is None else y - module.bias).float().T)
    return torch.cat(strips, 1)
