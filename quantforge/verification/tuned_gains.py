"""Gains of norms that were tuned, against the source: each is the source's, within the bounds of tuning.

The manifest names them. Nothing was folded into the readers of such a norm, which are compared with the source's as
they are; norms that it does not name equal the source's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quantforge.architectures import Absorbs
from quantforge.architectures.match import Matched, MatchedTensor
from quantforge.model.tuning_bounds import MOST
from quantforge.plans import Action

STORED = 2.0**-7  # relative, what both lose where they are stored in 16 bits


def stated_gains(document: Mapping[str, Any] | None) -> frozenset[str] | None:
    """Return the stored names of the gains that a manifest says were tuned; None where nothing was."""
    tensors = (document or {}).get("tensors")
    found = [item for item in tensors or () if isinstance(item, dict) and "tuned" in item]
    if not found:
        return None
    return frozenset(str(item.get("name")) for item in found if item.get("action") == Action.KEEP)


def beyond_tuning(
    tensor: MatchedTensor, found: Tensor, target: Tensor, matched: Matched
) -> str | None:
    """Say which gain is further from the source's than tuning takes one, None where none is."""
    if found.shape != target.shape:
        return f"{list(found.shape)}, the source has {list(target.shape)}"
    offset = _offset(tensor, matched)
    change = (found.float() - target).abs()
    gains = (target + offset).abs()
    wrong = change > MOST * gains + STORED * (gains + target.abs())
    if not bool(wrong.any()):
        return None
    place = int((change * wrong).argmax())
    return (f"{int(wrong.sum())} of {target.numel()} gains are further from the source's than tuning takes them, e.g. "
            f"{float(found.flatten()[place]):.5g} for {float(target.flatten()[place]):.5g}")  # fmt: skip


def _offset(tensor: MatchedTensor, matched: Matched) -> float:
    """Return what the norm adds to what is stored."""
    block = matched.block_name(tensor.block)
    for shared in matched.layers[tensor.block].inputs:
        absorber = shared.absorber
        if absorber is not None and f"{block}.{absorber.module}.weight" == tensor.name:
            return 1.0 if absorber.kind is Absorbs.NORM_PLUS_ONE else 0.0
    return 0.0
