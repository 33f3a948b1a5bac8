"""Draft models: a smaller model with the same vocabulary, or the model itself quantized to fewer bits.

The model in fewer bits shares everything except the linears of its blocks with the original. It is faster because it
reads fewer bits, and its tokens are often accepted because it is the same model. It needs neither a second checkpoint
nor a tokenizer, and only the memory of its codes. Its weights are rounded to nearest in memory; a calibrated quantized
checkpoint of the same model is accepted more often and can be used like any other draft model.
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
from quantforge.runtime.decoding import DecodingStep
from quantforge.runtime.linear import PackedLinear
from quantforge.runtime.load import reason_to_decode
from quantforge.runtime.ragged_attention import Span
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.draft_options import DRAFT_BITS
from quantforge.runtime.speculation.drafter import Drafter, allocate_text_cache
from quantforge.runtime.speculation.tree import ROOT, DraftTree, Leaf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUPS = ("g32:asym", "g64:asym", "g64:sym")
DRAFT_SCHEMES = {
    f"int{bits}": f"int{bits}:{of}" for bits, of in zip(DRAFT_BITS, GROUPS, strict=True)
}
STRIP_COLUMNS = 512  # columns of a weight that are recovered at a time


class ModelDrafter(Drafter):
    """Drafter that runs a draft model with its own KV cache, one pass for each depth of the tree.

    Args:
        decoder: the draft model, with the vocabulary of the target model.
        max_tokens: most tokens of the text, including drafted ones.
        shape: branching factors of the draft tree by depth, see `parse_tree_shape`.
    """

    def __init__(self, decoder: Decoder, max_tokens: int, shape: Sequence[int]) -> None:
        self._decoder, self._shape = decoder, shape
        capacity = min(max_tokens, decoder.positions)
        self._cache = allocate_text_cache(decoder.cache, capacity)
        self._step = DecodingStep(decoder, self._cache)
        # Tokens of the text in the cache; computed nodes of the last tree follow
        self._cached_tokens = 0
        self._tree, self._computed = DraftTree(), 0

    @torch.inference_mode()
    def draft(self, history: Sequence[int], max_drafted: int, sampler: RowSampler) -> DraftTree:
        """Draft a tree of the tokens that the draft model finds most likely; see `Drafter.draft`.

        The first child of each node is the token that ``sampler`` would choose from the draft model's logits.
        """
        depth = min(max_drafted, len(self._shape), self._cache.max_tokens - len(history))
        if depth < 1:
            return DraftTree()
        path: list[int] = []  # the nodes of the last tree that became text
        for token in history[
            self._cached_tokens : -1
        ]:  # the last token is computed again for its logits
            node = self._tree.child(path[-1] if path else ROOT, token)
            if node is None or node >= self._computed:
                break
            path.append(node)
        self._cache.keep_tree_path(0, self._cached_tokens, path)
        logits = self._logits(list(history[self._cached_tokens + len(path) :]))[-1:]
        self._cached_tokens, self._computed = len(history), 0
        self._tree = tree = DraftTree()
        leaves: list[Leaf] = [(ROOT, sampler)]
        for level, count in enumerate(self._shape[:depth]):
            if level:
                mask = None if tree.is_chain else tree.mask(root=False)
                logits = self._logits(tree.tokens[self._computed :], mask)
                self._computed = len(tree.tokens)
            leaves = tree.extend_leaves(leaves, logits, count)
        return tree

    def _logits(self, tokens: list[int], mask: Tensor | None = None) -> Tensor:
        """Compute logits ``[tokens, vocabulary]`` of tree nodes, or ``[1, vocabulary]`` after consecutive tokens."""
        ids = torch.tensor(tokens, device=self._decoder.device)
        if len(tokens) == 1 and mask is None:
            return self._step(ids)
        span = Span(0, len(tokens), None if mask is None else mask.to(ids.device))
        hidden = self._decoder.hidden_of_spans(ids, [span], self._cache)
        return self._decoder.logits(hidden[-1:] if mask is None else hidden)


def quantize_draft(model: PreTrainedModel, bits: str) -> PreTrainedModel:
    """Return a copy of the model with the linears of its blocks quantized to fewer bits; all else is shared.

    Args:
        model: the model; not modified.
        bits: one of `DRAFT_SCHEMES`.

    Raises:
        InputError: no linear can be quantized further.
    """
    family = decoder_family(model.config.model_type)
    assert family is not None  # see `Decoder`
    scheme = parse(DRAFT_SCHEMES[bits])
    shared = {id(value): value for value in (*model.parameters(), *model.buffers())}
    draft: PreTrainedModel = deepcopy(model, shared)
    blocks = draft.get_submodule(family.blocks)
    quantized_count = 0
    for name, module in list(blocks.named_modules()):
        if isinstance(module, PackedLinear):
            columns, current_bits = module.problem.in_features, module.problem.bits
        elif isinstance(module, nn.Linear) and not reason_to_decode(
            draft, f"{family.blocks}.{name}", family
        ):
            columns, current_bits = module.in_features, 16
        else:
            continue
        if current_bits > scheme.bits and columns % scheme.group_size(columns) == 0:
            weight = recover_weight(module)
            tensor = quantize_matrices({"draft": weight}, None, {"draft": scheme}, "search")[
                "draft"
            ]
            packed = PackedLinear(tensor, module.bias, model.dtype, weight.device)
            blocks.set_submodule(name, packed)
            quantized_count += 1
    if not quantized_count:
        raise InputError(
            f"no linear of this model can be a draft in {scheme}",
            "its matrices have fewer bits already, or rows that no group divides: take --draft ngram",
        )
    return draft


def recover_weight(module: nn.Linear | PackedLinear) -> Tensor:
    """Return the weight ``[out, in]`` of a linear in float32; of a packed one, by multiplying an identity matrix."""
    if isinstance(module, nn.Linear):
        return module.weight.detach().float()
    columns = module.problem.in_features
    strips = []
    for start in range(0, columns, STRIP_COLUMNS):
        width = min(STRIP_COLUMNS, columns - start)
        identity_rows = torch.zeros(
            width, columns, dtype=module.problem.dtype, device=module.weight.device
        )
        identity_rows[torch.arange(width), torch.arange(start, start + width)] = 1
        y = module(identity_rows)
        strips.append((y if module.bias is None else y - module.bias).float().T)
    return torch.cat(strips, 1)
