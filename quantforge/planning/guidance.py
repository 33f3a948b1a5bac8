"""What ``--guide N`` asks of a plan: which models and methods it is for, how many strips fit, and its file.

The weights of all calibration tokens (`quantforge.model.token_weights`) are in one file, in the order of the linears
that are listed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quantforge.architectures.match import Matched
from quantforge.errors import RefusedError, UsageError
from quantforge.plans import Plan, TensorPlan
from quantforge.quantizers import ERROR_FEEDBACK
from quantforge.recipe import CalibrationOptions

FLOAT = 4
ROUNDER = (ERROR_FEEDBACK,)  # words of the methods that take guided statistics


def guided(tensors: Iterable[TensorPlan], matched: Matched) -> Mapping[str, TensorPlan]:
    """Return the linears of blocks that are quantized, by canonical name, block after block."""
    plans = {
        tensor.name: tensor for tensor in tensors if tensor.part >= 0 and tensor.scheme is not None
    }
    return {
        tensor.name.removesuffix(".weight"): plans[tensor.stored.name]
        for tensor in matched.tensors
        if tensor.block >= 0 and tensor.stored.name in plans
    }


def file_bytes(plan: Plan, matched: Matched, calibration: CalibrationOptions) -> int:
    """Return the bytes of the file of weights, 0 without a guide."""
    tokens = calibration.samples * calibration.length
    return FLOAT * plan.guide * tokens * len(guided(plan.tensors, matched)) if plan.guide else 0


def refuse_guide(
    strips: int, words: tuple[str, ...], tensors: Iterable[TensorPlan], matched: Matched
) -> None:
    """Refuse guided statistics where nothing takes them, or where gradients are not computed.

    Args:
        strips: of output rows; 0 asks for no guide.
        words: the transforms and the rounder.
        tensors: of the draft.
        matched: the model.

    Raises:
        UsageError: the method takes none, nothing of a block is quantized, or a matrix has fewer rows than strips.
        RefusedError: the model has experts, or blocks that read more of earlier ones than the states behind the last.
    """
    if not strips:
        return
    if words != ROUNDER:
        raise UsageError(
            f"--guide {strips}: --method {'+'.join(words)} does not take guided statistics",
            f"--method {ERROR_FEEDBACK}, or leave --guide out",
        )
    linears = guided(tensors, matched)
    if not linears:
        raise UsageError(f"--guide {strips}: no matrix of a block is quantized", "leave --guide out")
    if any(kind.stacks for kind in matched.layers) or any(t.expert >= 0 for t in linears.values()):
        raise RefusedError(
            f"--guide {strips}: the model has experts, and no gradients of single experts are computed",
            "leave --guide out",
        )
    name, least = min(
        ((name, tensor.matrix[0]) for name, tensor in linears.items()), key=lambda found: found[1]
    )
    if strips > least:
        raise UsageError(f"--guide {strips}: {name} has {least} rows", f"--guide {least} at most")
