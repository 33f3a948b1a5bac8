"""Matching without declarations: what is taken for a linear layer in a family that nobody described.

Good enough for rounding one matrix at a time. Nothing is known about which activation a linear reads (apart from the
siblings whose names say so), so that methods which look at data are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from quantforge.architectures.matched import FLOATS, Matched, MatchedTensor, Role
from quantforge.architectures.routers import routers
from quantforge.plans import StoredTensor

RULE = (
    "a linear is every two-dimensional float tensor '*.weight' inside a numbered block whose name contains none of: "
    "embed, norm, lm_head, router, gate.weight, wte, wpe, vision, visual, audio, projector; "
    "and that is no router of experts"
)
_NOT_LINEAR = re.compile(
    r"embed|norm|lm_head|router|(^|\.)gate\.weight|(^|\.)(wte|wpe)\.|vision|visual|audio|projector",
    re.IGNORECASE,
)
TOWERS = re.compile(r"vision|visual|audio|projector", re.IGNORECASE)
BLOCK = re.compile(r"^(.*?)\.(\d+)\.(.+)$")
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def match_by_names(
    config: Mapping[str, Any], stored: Iterable[StoredTensor], reason: str
) -> Matched:
    """Match the tensors of a (text) model by their names alone; ``reason`` says why there is nothing better."""
    stored = list(stored)
    names = {tensor.name for tensor in stored}
    spared = routers(config, {t.name: t.shape for t in stored if BLOCK.match(t.name)})
    tensors = []
    for tensor in stored:
        block = BLOCK.match(tensor.name)
        role = Role.OTHER if tensor.name in spared else _role(tensor, block is not None)
        shared = _first_sibling(tensor.name, names) if role is Role.LINEAR else ""
        index = int(block[2]) if block else -1
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
    if linear and not _NOT_LINEAR.search(name):
        return Role.LINEAR
    if len(tensor.shape) == 2 and not in_block:
        if "embed" in name or "wte" in name:
            return Role.EMBEDDING
        if "head" in name:
            return Role.HEAD
    if "norm" in name:
        return Role.NORM
    return Role.BIAS if name.endswith(".bias") else Role.OTHER


def _first_sibling(name: str, names: set[str]) -> str:
    parent, _, leaf = name.removesuffix(".weight").rpartition(".")
    for siblings in _SIBLINGS:
        if leaf in siblings:
            leaf = next(word for word in siblings if f"{parent}.{word}.weight" in names)
    return f"{parent}.{leaf}"
