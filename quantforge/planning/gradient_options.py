"""What takes gradients in a plan: guided statistics and tuning, for which models, methods and formats, at what cost.

The weights of all calibration tokens (`guidance.token_weights`) are in one file, in the order of the linears that
`quantized_linears` lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from quantforge.architectures.match import ModelLayout
from quantforge.errors import RefusedError, UsageError
from quantforge.formats import DEFAULT_FORMAT, load_format
from quantforge.planning.weight_traffic import expert_share
from quantforge.plans import TensorPlan
from quantforge.quantizers import AWQ_GPTQ, GPTQ
from quantforge.quantizers.tuning import whole_model_epochs
from quantforge.recipe import CalibrationOptions

FLOAT = 4
HINT = "leave --tune out"
DENSE, MIXED = 5, 7  # forward passes that take as long as an epoch of tuning


def quantized_linears(
    tensors: Iterable[TensorPlan], model_layout: ModelLayout
) -> Mapping[str, TensorPlan]:
    """Return the linears of blocks that are quantized, by canonical name, block after block."""
    plans = {
        tensor.name: tensor for tensor in tensors if tensor.block >= 0 and tensor.scheme is not None
    }
    return {
        tensor.name.removesuffix(".weight"): plans[tensor.header.name]
        for tensor in model_layout.tensors
        if tensor.block >= 0 and tensor.header.name in plans
    }


def learnable(
    said: str, hint: str, tensors: Iterable[TensorPlan], model_layout: ModelLayout
) -> Mapping[str, TensorPlan]:
    """Return what `quantized_linears` does for an option that takes gradients.

    Args:
        said: the option, in messages.
        hint: what to type instead.
        tensors: of the draft.
        model_layout: the model.

    Raises:
        UsageError: there is none.
        RefusedError: some are of experts that the model does not compute in stacks.
    """
    linears = quantized_linears(tensors, model_layout)
    if not linears:
        raise UsageError(f"{said}: no matrix of a block is quantized", hint)
    if any(
        one.expert >= 0 and not model_layout.layers[one.block].stacks for one in linears.values()
    ):
        raise RefusedError(
            f"{said}: the model has experts, which it computes otherwise than as one stack", hint
        )
    return linears


def disk_bytes(
    strips: int,
    tensors: Sequence[TensorPlan],
    model_layout: ModelLayout,
    calibration: CalibrationOptions,
) -> int:
    """Return the bytes that the backward pass of a guide takes on the disk.

    These are the file of weights, the hidden states in front of some blocks (`guidance.backward`) and of one
    run of blocks between two of these, and the gradients.
    """
    if model_layout.dimensions is None:
        return 0
    tokens, step = calibration.samples * calibration.length, 1 + math.isqrt(model_layout.blocks - 1)
    states = -(-model_layout.blocks // step) + step + 1
    linears = [tensor.expert >= 0 for tensor in quantized_linears(tensors, model_layout).values()]
    experts = sum(linears)
    # With its weights lies the number of a token that is sent to an expert.
    sent = expert_share(model_layout, tensors) * experts * (strips + 1) if experts else 0.0
    width = strips * (len(linears) - experts) + states * model_layout.dimensions.hidden
    return FLOAT * math.ceil(tokens * (width + sent))


def guide_note(strips: int, calibration: CalibrationOptions, size: int) -> str:
    """Say what a guide takes; ``size`` is its `disk_bytes`."""
    tokens = calibration.samples * calibration.length
    return (
        f"guide: a backward pass over {tokens:,} tokens first, {strips} Hessian(s) for each matrix;"
        f" {size:,} bytes on the disk while it runs"
    )


def refuse_guide(
    strips: int,
    words: tuple[str, ...],
    tensors: Iterable[TensorPlan],
    model_layout: ModelLayout,
    option: str = "",
    hint: str = "leave --guide out",
    *,
    everyone: bool = False,
) -> None:
    """Refuse guided statistics where nothing takes them, or where gradients are not computed.

    Args:
        strips: of output rows.
        words: the transforms and the rounder.
        tensors: of the draft.
        model_layout: the model.
        option: what asks for it; ``--guide`` when left out.
        hint: what to type instead.
        everyone: whether every token passes every expert.

    Raises:
        UsageError: the method takes none, nothing of a block is quantized, a matrix has fewer rows than strips, or
            tokens pass experts that the router does not send them to.
        RefusedError: the model has experts that it does not compute in stacks.
    """
    said = option or f"--guide {strips}"
    if words[-1] != GPTQ:
        raise UsageError(
            f"{said}: --method {'+'.join(words)} does not take guided statistics",
            f"--method {GPTQ}, or {hint}",
        )
    linears = learnable(said, hint, tensors, model_layout)
    if everyone and any(tensor.expert >= 0 for tensor in linears.values()):
        raise UsageError(
            f"{said}: --experts all sends every token through every expert, and only those that the router"
            " sends have gradients",
            f"leave --experts out, or {hint}",
        )
    name = min(linears, key=lambda name: linears[name].matrix[0])
    least = linears[name].matrix[0]
    if strips > least:
        raise UsageError(f"--guide {strips}: {name} has {least} rows", f"--guide {least} at most")


def epoch_passes(model_layout: ModelLayout) -> int:
    """Return how many forward passes take as long as an epoch: blocks with experts run as far as these first."""
    return MIXED if any(kind.stacks for kind in model_layout.layers) else DENSE


def tune_note(epochs: int, calibration: CalibrationOptions, model_layout: ModelLayout) -> str:
    """Say what tuning takes."""
    tokens = calibration.samples * calibration.length
    many, each = ("1 epoch", "") if epochs == 1 else (f"{epochs} epochs", "each ")
    passes = f"{each}about as long as {epoch_passes(model_layout)} forward passes"
    whole = whole_model_epochs(epochs)
    then = (
        f"; then {whole} over the whole model, whose codes are in memory meanwhile" if whole else ""
    )
    codes = ", and six bytes more for each" if whole > 1 else ""
    return f"tune: {many} over {tokens:,} tokens, {passes}: one block after block{then}{codes}"


def refuse_tune(
    epochs: int,
    words: Sequence[str],
    key: str,
    tensors: Iterable[TensorPlan],
    model_layout: ModelLayout,
    rows: int,
) -> None:
    """Refuse tuning where nothing can be tuned, or where it is not known how.

    Args:
        epochs: that are asked for.
        words: the transforms and the rounder.
        key: of the format.
        tensors: of the draft.
        model_layout: the model.
        rows: of calibration text; one cannot be held out of itself.

    Raises:
        UsageError: the method or the format takes none, nothing of a block is quantized, or there is one row.
        RefusedError: the model has experts that it does not compute in stacks, or a scheme has neither scales nor codes
            that could be tuned.
    """
    said = f"--tune {epochs}"
    if (method := "+".join(words)) not in {GPTQ, AWQ_GPTQ}:
        raise UsageError(
            f"{said}: results of --method {method} are not tuned",
            f"--method {GPTQ}, or {HINT}",
        )
    if not load_format(key).INFO.scales_are_tunable:
        raise UsageError(
            f"{said}: the scales of {key} files are not tuned",
            f"--format {DEFAULT_FORMAT}, or {HINT}",
        )
    if rows == 1:
        raise UsageError(f"{said}: one calibration row", "--samples 8, or more")
    for name, tensor in learnable(said, HINT, tensors, model_layout).items():
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
