"""Options that need gradients (guided Hessians, tuning): when they are possible and what they cost.

The weights of all calibration tokens (`guidance.token_weights`) are stored in one file, in the order of the linears
that `quantized_linears` lists.
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

FLOAT_BYTES = 4
NO_TUNE_HINT = "leave --tune out"
# Forward passes that take as long as one epoch of tuning
DENSE_EPOCH_PASSES, EXPERT_EPOCH_PASSES = 5, 7


def quantized_linears(
    tensors: Iterable[TensorPlan], model_layout: ModelLayout
) -> Mapping[str, TensorPlan]:
    """Return the plans of the blocks' linears that are quantized, by canonical name, in the order of the blocks."""
    plans = {
        tensor.name: tensor for tensor in tensors if tensor.block >= 0 and tensor.scheme is not None
    }
    return {
        tensor.name.removesuffix(".weight"): plans[tensor.header.name]
        for tensor in model_layout.tensors
        if tensor.block >= 0 and tensor.header.name in plans
    }


def linears_with_gradients(
    option: str, hint: str, tensors: Iterable[TensorPlan], model_layout: ModelLayout
) -> Mapping[str, TensorPlan]:
    """Return the quantized linears of the blocks for an option that needs their gradients.

    Args:
        option: the option, for messages.
        hint: what to type instead.
        tensors: plans of all tensors.
        model_layout: the model.

    Raises:
        UsageError: no linear of a block is quantized.
        RefusedError: some are experts that the model does not compute as one stack.
    """
    linears = quantized_linears(tensors, model_layout)
    if not linears:
        raise UsageError("no matrix of a block is quantized", hint, subject=option)
    if any(
        tensor.expert >= 0 and not model_layout.layers[tensor.block].stacks
        for tensor in linears.values()
    ):
        raise RefusedError(
            "the model has experts, which it computes otherwise than as one stack",
            hint,
            subject=option,
        )
    return linears


def guide_disk_bytes(
    strips: int,
    tensors: Sequence[TensorPlan],
    model_layout: ModelLayout,
    calibration: CalibrationOptions,
) -> int:
    """Return the disk space in bytes that the backward pass of a guide takes.

    It stores the file of token weights, the hidden states before some of the blocks (`guidance.backward`) and within
    one run of blocks between two of these, and the gradients.
    """
    if model_layout.dimensions is None:
        return 0
    tokens, interval = (
        calibration.samples * calibration.length,
        1 + math.isqrt(model_layout.blocks - 1),
    )
    stored_states = -(-model_layout.blocks // interval) + interval + 1
    linears = [tensor.expert >= 0 for tensor in quantized_linears(tensors, model_layout).values()]
    experts = sum(linears)
    # Experts store the index of each token that is sent to them along with its weights.
    routed_width = expert_share(model_layout, tensors) * experts * (strips + 1) if experts else 0.0
    width = strips * (len(linears) - experts) + stored_states * model_layout.dimensions.hidden
    return FLOAT_BYTES * math.ceil(tokens * (width + routed_width))


def guide_note(strips: int, calibration: CalibrationOptions, disk_bytes: int) -> str:
    """Return a note on the cost of a guide, given the disk space that it takes (`guide_disk_bytes`)."""
    tokens = calibration.samples * calibration.length
    return (
        f"guide: a backward pass over {tokens:,} tokens first, {strips} Hessian(s) for each matrix;"
        f" {disk_bytes:,} bytes on the disk while it runs"
    )


def refuse_guide(
    strips: int,
    method_words: tuple[str, ...],
    tensors: Iterable[TensorPlan],
    model_layout: ModelLayout,
    option: str = "",
    hint: str = "leave --guided-hessians out",
    *,
    every_expert: bool = False,
) -> None:
    """Refuse guided statistics if the method does not use them or their gradients cannot be computed.

    Args:
        strips: number of strips of output rows with a Hessian of their own.
        method_words: names of the transforms and of the rounder, in order.
        tensors: plans of all tensors.
        model_layout: the model.
        option: the option that needs it, for messages; ``--guided-hessians`` if empty.
        hint: what to type instead.
        every_expert: whether every token passes through every expert.

    Raises:
        UsageError: the method does not use them, no matrix of a block is quantized, a matrix has fewer rows than
            strips, or tokens pass through experts that the router does not choose.
        RefusedError: the model has experts that it does not compute as one stack.
    """
    label = option or f"--guided-hessians {strips}"
    if method_words[-1] != GPTQ:
        raise UsageError(
            f"--method {'+'.join(method_words)} does not take guided statistics",
            f"--method {GPTQ}, or {hint}",
            subject=label,
        )
    linears = linears_with_gradients(label, hint, tensors, model_layout)
    if every_expert and any(tensor.expert >= 0 for tensor in linears.values()):
        raise UsageError(
            "--expert-tokens all sends every token through every expert, and only those that the router"
            " sends have gradients",
            f"leave --expert-tokens out, or {hint}",
            subject=label,
        )
    name = min(linears, key=lambda name: linears[name].matrix[0])
    fewest_rows = linears[name].matrix[0]
    if strips > fewest_rows:
        raise UsageError(
            f"{name} has {fewest_rows} rows",
            f"--guided-hessians {fewest_rows} at most",
            subject=f"--guided-hessians {strips}",
        )


def epoch_passes(model_layout: ModelLayout) -> int:
    """Return how many forward passes take as long as one epoch of tuning (more for models with experts)."""
    return (
        EXPERT_EPOCH_PASSES
        if any(kind.stacks for kind in model_layout.layers)
        else DENSE_EPOCH_PASSES
    )


def tune_note(epochs: int, calibration: CalibrationOptions, model_layout: ModelLayout) -> str:
    """Return a note on the cost of tuning."""
    tokens = calibration.samples * calibration.length
    epoch_count, each_word = ("1 epoch", "") if epochs == 1 else (f"{epochs} epochs", "each ")
    passes = f"{each_word}about as long as {epoch_passes(model_layout)} forward passes"
    joint_epochs = whole_model_epochs(epochs)
    whole_model_note = (
        f"; then {joint_epochs} over the whole model, whose codes are in memory meanwhile"
        if joint_epochs
        else ""
    )
    memory_note = ", and six bytes more for each" if joint_epochs > 1 else ""
    return f"tune: {epoch_count} over {tokens:,} tokens, {passes}: one block after block{whole_model_note}{memory_note}"


def refuse_tune(
    epochs: int,
    method_words: Sequence[str],
    key: str,
    tensors: Iterable[TensorPlan],
    model_layout: ModelLayout,
    rows: int,
) -> None:
    """Refuse tuning if there is nothing to tune, or no known way to do it.

    Args:
        epochs: requested number of epochs.
        method_words: names of the transforms and of the rounder, in order.
        key: key of the format.
        tensors: plans of all tensors.
        model_layout: the model.
        rows: number of calibration rows, of which at least one is held out.

    Raises:
        UsageError: the method or the format does not support it, no matrix of a block is quantized, or there is one
            row.
        RefusedError: the model has experts that it does not compute as one stack, or a scheme has neither scales nor
            codes that can be learned.
    """
    option = f"--tune {epochs}"
    if (method := "+".join(method_words)) not in {GPTQ, AWQ_GPTQ}:
        raise UsageError(
            f"results of --method {method} are not tuned",
            f"--method {GPTQ}, or {NO_TUNE_HINT}",
            subject=option,
        )
    if not load_format(key).INFO.scales_are_tunable:
        raise UsageError(
            f"the scales of {key} files are not tuned",
            f"--format {DEFAULT_FORMAT}, or {NO_TUNE_HINT}",
            subject=option,
        )
    if rows == 1:
        raise UsageError("one calibration row", "--samples 8, or more", subject=option)
    for name, tensor in linears_with_gradients(option, NO_TUNE_HINT, tensors, model_layout).items():
        assert tensor.scheme is not None
        scheme = tensor.scheme.weight
        if tensor.scheme.input is not None:
            raise RefusedError(
                f"{name} reads rounded inputs ({tensor.scheme})", NO_TUNE_HINT, subject=option
            )
        if scheme.has_learnable_scales or scheme.code_values:
            continue
        if scheme.has_power_of_two_scales:
            raise RefusedError(
                f"the scales of {name} are powers of two, its codes floats ({scheme})",
                NO_TUNE_HINT,
                subject=option,
            )
        raise RefusedError(
            f"{name} has no scale for each group or row ({scheme})",
            f"--scheme int4:g128:sym for instance, or {NO_TUNE_HINT}",
            subject=option,
        )
