"""Tuning in a plan: for which models, methods and formats it is, and what it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quantforge.architectures.match import Matched
from quantforge.errors import RefusedError, UsageError
from quantforge.formats import DEFAULT, format_of
from quantforge.planning.guidance import learnable
from quantforge.plans import TensorPlan
from quantforge.quantizers import BEST, ERROR_FEEDBACK
from quantforge.quantizers.tuning.bounds import whole_epochs
from quantforge.recipe import CalibrationOptions

HINT = "leave --tune out"
DENSE, MIXED = 5, 7  # forward passes that take as long as an epoch


def epoch_passes(matched: Matched) -> int:
    """Return how many forward passes take as long as an epoch: blocks with experts run as far as these first."""
    return MIXED if any(kind.stacks for kind in matched.layers) else DENSE


def tune_notes(epochs: int, calibration: CalibrationOptions, matched: Matched) -> tuple[str, ...]:
    """Say what tuning takes; nothing without it."""
    if not epochs:
        return ()
    tokens = calibration.samples * calibration.length
    many, each = ("1 epoch", "") if epochs == 1 else (f"{epochs} epochs", "each ")
    passes = f"{each}about as long as {epoch_passes(matched)} forward passes"
    whole = whole_epochs(epochs)
    then = (
        f"; then {whole} over the whole model, whose codes are in memory meanwhile" if whole else ""
    )
    codes = ", and six bytes more for each" if whole > 1 else ""
    return (f"tune: {many} over {tokens:,} tokens, {passes}: one block after block{then}{codes}",)


def refuse_tune(
    epochs: int,
    words: Sequence[str],
    key: str,
    tensors: Iterable[TensorPlan],
    matched: Matched,
    rows: int = 0,
) -> None:
    """Refuse tuning where nothing can be tuned, or where it is not known how.

    Args:
        epochs: 0 asks for no tuning.
        words: the transforms and the rounder.
        key: of the format.
        tensors: of the draft.
        matched: the model.
        rows: of calibration text; one cannot be held out of itself.

    Raises:
        UsageError: the method or the format takes none, nothing of a block is quantized, or there is one row.
        RefusedError: the model has experts that it does not compute in stacks, or a scheme has neither scales nor codes
            that could be tuned.
    """
    if not epochs:
        return
    said = f"--tune {epochs}"
    if (method := "+".join(words)) not in {ERROR_FEEDBACK, BEST}:
        raise UsageError(
            f"{said}: results of --method {method} are not tuned",
            f"--method {ERROR_FEEDBACK}, or {HINT}",
        )
    if not format_of(key).ABOUT.tunable:
        raise UsageError(
            f"{said}: the scales of {key} files are not tuned", f"--format {DEFAULT}, or {HINT}"
        )
    if rows == 1:
        raise UsageError(f"{said}: one calibration row", "--samples 8, or more")
    for name, tensor in learnable(said, HINT, tensors, matched).items():
        assert tensor.scheme is not None
        scheme = tensor.scheme.weight
        if tensor.scheme.input is not None:
            raise RefusedError(f"{said}: {name} reads rounded inputs ({tensor.scheme})", HINT)
        if scheme.scaled or scheme.table:
            continue
        if scheme.in_powers:
            raise RefusedError(
                f"{said}: the scales of {name} are powers of two, its codes floats ({scheme})", HINT
            )
        raise RefusedError(
            f"{said}: {name} has no scale for each group or row ({scheme})",
            f"--scheme int4:g128:sym for instance, or {HINT}",
        )
