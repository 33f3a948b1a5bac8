"""Comparison of a tensor that is stored as it is with what the manifest states of it: zeros, factors, tuning."""

from __future__ import annotations

from torch import Tensor

from quantforge.architectures.match import Matched, MatchedTensor
from quantforge.verification import tuned_gains
from quantforge.verification.folded import Factors
from quantforge.verification.tuned_gains import TuningStated
from quantforge.verification.zeros import Zeros, differs


def beyond_stated(
    tensor: MatchedTensor,
    value: Tensor,
    targets: tuple[Tensor, Tensor],
    factors: Factors,
    zeros: Zeros | None,
    tuned: TuningStated,
    matched: Matched,
) -> str | None:
    """Say how a tensor differs from the source's by more than is stated, None where it does not.

    Args:
        tensor: which one.
        value: as it is stored.
        targets: the source's, and that with its factors.
        factors: of its block.
        zeros: those that are stated.
        tuned: what is stated of tuning.
        matched: the artifact.
    """
    whole, target = targets
    module = tensor.name.removesuffix(".weight").removesuffix(".bias")
    if tuned is TuningStated.PLAIN:
        offset = tuned_gains.tuned_offset(tensor, matched)
        if offset is not None:
            return tuned_gains.beyond_tuning(value, target, offset)
    elif tuned is TuningStated.FOLDED:
        if tensor.name.endswith(".bias") and module in factors.norms:
            return tuned_gains.beyond_fold(value, target * factors.norms[module])
        if target.dim() == 2 and module in factors.columns:
            target = tuned_gains.with_own_factor(value, whole, factors.columns[module])
    return differs(tensor, value, target, factors, zeros)
