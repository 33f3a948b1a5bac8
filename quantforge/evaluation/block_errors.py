"""Error of each decoder block in isolation: its output error when given the reference's block input.

    error of block l = ||f'_l(h) - f_l(h)|| / ||f_l(h) - h||

where ``h`` is the input of block ``f_l`` of the reference, ``f'_l`` is the same block of the compared model, and the
norm is over all tokens. The error is relative to what the block adds to the residual stream. Errors of earlier blocks
do not count, so the largest value identifies the block that was damaged most. Each model needs one forward pass over a
few tokens; the hidden states between the reference's blocks are kept in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantforge.errors import RefusedError
from quantforge.model.model_parts import base_model, block_list_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_TOKENS = 128
DEFINITION = (
    f"||f'(h) - f(h)|| / ||f(h) - h|| of each block over the first {MAX_TOKENS} tokens of the first window, "
    "h being what the reference's block f reads; f' is the model's"
)
HIDDEN_STATES = "hidden_states"


@dataclass(frozen=True, slots=True)
class BlockStates:
    """Inputs and outputs of the reference's blocks for token ``ids``: float32 ``[1, tokens, hidden]`` on the CPU."""

    ids: Tensor
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@torch.inference_mode()
def block_states(model: PreTrainedModel, window: Tensor) -> BlockStates | None:
    """Record the input and output of every block of the reference; return None if its blocks cannot be found.

    Args:
        model: the reference.
        window: token ids ``[length]``, of which the first `MAX_TOKENS` are used.
    """
    ids = window[None, :MAX_TOKENS]
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def record(_index: int, block_input: Tensor, block_output: Tensor) -> None:
        inputs.append(block_input.float().cpu())
        outputs.append(block_output.float().cpu())

    if not _run_blocks(model, ids, None, record) or not inputs:
        return None
    return BlockStates(ids, tuple(inputs), tuple(outputs))


@torch.inference_mode()
def block_errors(
    model: PreTrainedModel, reference: BlockStates | None
) -> list[float | None] | None:
    """Return the error of each block of a model, or None if its blocks do not correspond to the reference's.

    The entry of a block is None if the reference's block adds nothing to the residual stream, so that the relative
    error is undefined.
    """
    if reference is None:
        return None
    errors: list[float | None] = []

    def compare(index: int, _input: Tensor, output: Tensor) -> None:
        block_input, reference_output = reference.inputs[index], reference.outputs[index]
        error = (output.float().cpu() - reference_output).norm()
        residual_update = (reference_output - block_input).norm()
        relative_error = float(error / residual_update) if error else 0.0
        errors.append(relative_error if math.isfinite(relative_error) else None)

    is_complete = _run_blocks(model, reference.ids, reference.inputs, compare)
    return errors if is_complete and len(errors) == len(reference.inputs) else None


def _run_blocks(
    model: PreTrainedModel,
    ids: Tensor,
    inputs: tuple[Tensor, ...] | None,
    on_block: Callable[[int, Tensor, Tensor], None],
) -> bool:
    """Run a model and call a function with the index, input and output of each block.

    Args:
        model: the model.
        ids: token ids ``[1, tokens]``.
        inputs: block inputs that replace those of the model's own forward pass, or None.
        on_block: called after each block.

    Returns:
        Whether the model has blocks that could be run in this way.
    """
    try:
        blocks: Any = model.get_submodule(block_list_name(model))
    except RefusedError:
        return False
    if inputs is not None and len(inputs) != len(blocks):
        return False
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.callback(_install_hooks(block, index, inputs, on_block))
        try:
            base_model(model)(ids.to(model.device), use_cache=False)
        except _ShapeMismatchError:
            return False
    return True


class _ShapeMismatchError(Exception):
    """Raised when a block returns hidden states of a shape other than its input."""


def _install_hooks(
    block: nn.Module,
    index: int,
    inputs: tuple[Tensor, ...] | None,
    on_block: Callable[[int, Tensor, Tensor], None],
) -> Callable[[], None]:
    """Install hooks that report, and optionally replace, the input of a block; return a function that removes them."""
    last_input: list[Tensor] = []

    def before_block(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs[HIDDEN_STATES]
        if inputs is not None:
            hidden = inputs[index].to(hidden.device, hidden.dtype)
        last_input[:] = [hidden]
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, HIDDEN_STATES: hidden})

    def after_block(_block: nn.Module, _args: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, Tensor) or hidden.shape != last_input[0].shape:
            raise _ShapeMismatchError
        on_block(index, last_input[0], hidden)

    handles = (
        block.register_forward_pre_hook(before_block, with_kwargs=True),
        block.register_forward_hook(after_block),
    )

    def remove_hooks() -> None:
        for handle in handles:
            handle.remove()

    return remove_hooks
