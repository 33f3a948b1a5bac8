"""Gains of norms that were tuned, against the source: each is the source's, within the bounds of tuning.

The recipe of the manifest, or of a result that it was made of, says so. Unless a transform came before, nothing was
folded into the readers of such a norm, which are compared with the source's as they are. All other tensors that are
kept equal the source's.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from quantforge.architectures import Absorbs
from quantforge.architectures.match import Matched, MatchedTensor
from quantforge.model.tuning_bounds import MOST
from quantforge.recipe import from_toml
from quantforge.verification.opening import chain, folds_factors

STORED = 2.0**-7  # relative, what both lose where they are stored in 16 bits


class TuningStated(Enum):
    """How far tuning has changed a result: not, scales and gains, or scales and gains into which factors were folded.

    The last are judged as folded ones.
    """

    NOT = auto()
    PLAIN = auto()
    FOLDED = auto()

    @property
    def slack(self) -> float:
        """Return the part of itself by which a scale or gain was changed at most."""
        return 0.0 if self is TuningStated.NOT else MOST

    @classmethod
    def of(cls, document: Mapping[str, Any] | None) -> TuningStated:
        """Return what the recipe of a result, or of one of those that it was made of, asks for."""
        recipes = (item.get("recipe") for item in chain(document))
        known = (text for text in recipes if isinstance(text, str) and text)
        if not any(from_toml(text, "the recipe of its manifest").tune for text in known):
            return cls.NOT
        return cls.FOLDED if folds_factors(document) else cls.PLAIN


def tuned_offset(tensor: MatchedTensor, matched: Matched) -> float | None:
    """Return what a norm that tuning changes adds to what is stored, None for every other tensor."""
    if tensor.block < 0:
        return None
    block = matched.block_name(tensor.block)
    for shared in matched.layers[tensor.block].inputs:
        absorber = shared.absorber
        if absorber is None or absorber.kind is Absorbs.ROWS:
            continue
        if f"{block}.{absorber.module}.weight" == tensor.name:
            return 1.0 if absorber.kind is Absorbs.NORM_PLUS_ONE else 0.0
    return None


def beyond_tuning(found: Tensor, target: Tensor, offset: float) -> str | None:
    """Say which gain is further from the source's than tuning takes one, None where none is.

    Args:
        found: the result's, as it is stored.
        target: the source's, likewise.
        offset: what the norm adds to both.
    """
    if found.shape != target.shape:
        return f"{list(found.shape)}, the source has {list(target.shape)}"
    change = (found.float() - target).abs()
    gains = (target + offset).abs()
    wrong = ~(change <= MOST * gains + STORED * (gains + target.abs()))
    if not bool(wrong.any()):
        return None
    place = int((change * wrong).argmax())
    return (f"{int(wrong.sum())} of {target.numel()} gains are further from the source's than tuning takes them, e.g. "
            f"{float(found.flatten()[place]):.5g} for {float(target.flatten()[place]):.5g}")  # fmt: skip


def within(factor: Tensor, columns: Tensor, slack: float) -> Tensor:
    """Return a factor as near as it may be to what gains tell that were changed by ``slack`` of themselves at most."""
    return torch.minimum(torch.maximum(factor, columns * (1 - slack)), columns * (1 + slack))


def with_own_factor(found: Tensor, source: Tensor, columns: Tensor) -> Tensor:
    """Return what a reader of a tuned norm, which is stored as it is, should hold: its columns tell their factor.

    Args:
        found: ``[out_features, in_features]``, as it is stored.
        source: the source's.
        columns: the factor of each column, as the gains tell it that were tuned afterwards.
    """
    energy = source.square().sum(0).clamp(min=1e-30)
    return source * within((source * found.float()).sum(0) / energy, columns, MOST)


def beyond_fold(found: Tensor, target: Tensor) -> str | None:
    """Say which bias of a norm differs from what its gain tells by more than tuning takes that gain, None for none.

    Args:
        found: the result's bias, which tuning leaves as the factors have made it.
        target: the source's, times what became of the gain.
    """
    if found.shape != target.shape:
        return f"{list(found.shape)}, the source has {list(target.shape)}"
    size = found.float().abs()
    wrong = ~((found.float() - target).abs() <= MOST * size + STORED * (size + target.abs()))
    if not bool(wrong.any()):
        return None
    place = int(wrong.int().argmax())
    return (f"{int(wrong.sum())} of {target.numel()} biases do not follow the gains of their norm, e.g. "
            f"{float(found.flatten()[place]):.5g} for {float(target.flatten()[place]):.5g}")  # fmt: skip
