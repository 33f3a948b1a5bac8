"""Experts in a plan: what single ones read is not observed, so that they are rounded without data or not at all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantforge.architectures.match import Matched
from quantforge.errors import RefusedError
from quantforge.model.statistics import Statistic
from quantforge.plans import Action, TensorPlan

WITHOUT_DATA = (
    "what single experts read is not observed, so that all layers are rounded without data"
)


def without_data(
    method: str, matched: Matched, tensors: Sequence[TensorPlan], wanted: frozenset[Statistic]
) -> tuple[str, ...]:
    """Return a note if a run does without the statistics that are ``wanted``, because it rounds single experts.

    Raises:
        RefusedError: it cannot, since its method or a measured range lives on them.
    """
    experts = {tensor.stored.name for tensor in matched.tensors if tensor.expert >= 0}
    rounded = [tensor for tensor in tensors if tensor.action is Action.QUANTIZE]
    found = [tensor for tensor in rounded if tensor.name in experts]
    if not found or not wanted:
        return ()
    if method == "rtn" and wanted == {Statistic.SQUARES}:
        return (WITHOUT_DATA,)
    share = sum(math.prod(t.shape) for t in found) / sum(math.prod(t.shape) for t in rounded)
    raise RefusedError(
        f"--method {method}: what single experts read is not observed, and they are {share:.0%} of what is rounded",
        "--method rtn with inputs that are not measured, or --ignore '*experts*'",
        tensor=found[0].name,
    )
