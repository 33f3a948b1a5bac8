"""Matching without declarations: what is taken for a linear layer in a family that nobody described.

Good enough for rounding one matrix at a time. Nothing is known about which activation a linear reads (apart from the
siblings whose names say so), so that methods which look at data are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from quantforge.architectures.heads import first_sibling, head_tensors, layers_of
from quantforge.architectures.matched import FLOATS, Matched, MatchedTensor, Role
from quantforge.architectures.routers import routers, weighs_an_index
from quantforge.architectures.towers import lists_of
from quantforge.plans import StoredTensor

RULE = (
    "a linear is every two-dimensional float tensor '*.weight' inside a numbered block of the decoder whose name "
    "contains none of: embed, lm_head, router, gate.weight, wte, wpe, weights_proj; and that is no norm, no "
    "convolution and no router of experts"
)
_NOT_LINEAR = re.compile(
    r"embed|lm_head|router|(^|\.)gate\.weight|(^|\.)(wte|wpe)\."
    r"|(^|\.)\w*conv\w*\.weight$",  # a convolution over time
    re.IGNORECASE,
)


def match_by_names(
    config: Mapping[str, Any],
    stored: Iterable[StoredTensor],
    reason: str,
    whole: Mapping[str, Any] | None = None,
) -> Matched:
    """Match the tensors of a model by their names alone.

    Args:
        config: of the decoder.
        stored: all tensors, those of other towers too.
        reason: why there is nothing better.
        whole: configuration of the checkpoint, if it is another one than the decoder's.
    """
    stored = list(stored)
    heads = head_tensors(config, layers_of(config), stored)
    names = {tensor.name for tensor in stored}
    own = [tensor for tensor in stored if tensor.name not in heads]
    lists = lists_of(config if whole is None else whole, config, own)
    spared = routers(config, {t.name: t.shape for t in own if lists.block(t.name) >= 0})
    tensors = []
    for tensor in stored:
        if tensor.name in heads:
            tensors.append(heads[tensor.name])
            continue
        index = lists.block(tensor.name)
        other = tensor.name in spared or lists.elsewhere(tensor.name)
        role = Role.OTHER if other else _role(tensor, index >= 0)
        shared = first_sibling(tensor.name, names) if role is Role.LINEAR else ""
        tensors.append(MatchedTensor(tensor.name, tensor, role, index, shared))
    has_head = any(tensor.role is Role.HEAD for tensor in tensors)
    return Matched(
        architecture=None,
        model_type=str(config.get("model_type", "")),
        config=config,
        dimensions=None,
        tensors=tuple(tensors),
        tied=config.get("tie_word_embeddings") is True and not has_head,
        rule=f"{reason}, so {RULE}",
    )


def _role(tensor: StoredTensor, in_block: bool) -> Role:
    name = tensor.name
    linear = (
        in_block and name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in FLOATS
    )
    spared = _NOT_LINEAR.search(name) or weighs_an_index(name) or _of_norm(name)
    if linear and not spared:
        return Role.LINEAR
    if len(tensor.shape) == 2 and not in_block:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and re.search(r"head$|unembed$", module):
            return Role.HEAD
        if ("embed" in name or "wte" in name) and "proj" not in name:
            return Role.EMBEDDING
    if "norm" in name:
        return Role.NORM
    return Role.BIAS if name.endswith(".bias") else Role.OTHER


def _of_norm(name: str) -> bool:
    """Return whether a stored tensor is of a norm itself; one with linears in it, or a block of that name, is none."""
    return "norm" in name.rpartition(".")[0].rpartition(".")[2].lower()
