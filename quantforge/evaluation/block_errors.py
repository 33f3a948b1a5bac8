"""Error of each decoder block in isolation: output error of a model's block given the reference's block input.

    error of block l = ||f'_l(h) - f_l(h)|| / ||f_l(h) - h||

where ``h`` is the input of the reference's block ``f_l``, ``f'_l`` is the same block of the model, and the norm is over
all tokens. The error is relative to what the block adds to the residual stream. Errors of earlier blocks are excluded,
so the largest value shows the block that lost most. Each model needs one forward pass over a few tokens; the hidden
states between the reference's blocks are kept.
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

TOKENS = 128
DEFINITION = (
    f"||f'(h) - f(h)|| / ||f(h) - h|| of each block over the first {TOKENS} tokens of the first window, "
    "h being what the reference's block f reads; f' is the model's"
)
STATES = "hidden_states"


@dataclass(frozen=True, slots=True)
class BlockStates:
    """Inputs and outputs of every block of the reference for ``ids``, float32 ``[1, tokens, hidden]`` on the CPU."""

    ids: Tensor
    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]


@torch.inference_mode()
def block_states(model: PreTrainedModel, window: Tensor) -> BlockStates | None:
    """Record the hidden states between the blocks of the reference; None if its blocks cannot be found.

    Args:
        model: the reference.
        window: token ids ``[length]``, of which the first `TOKENS` are used.
    """
    ids = window[None, :TOKENS]
    before: list[Tensor] = []
    after: list[Tensor] = []

    def record(_block: int, states: Tensor, output: Tensor) -> None:
        before.append(states.float().cpu())
        after.append(output.float().cpu())

    if not _run_blocks(model, ids, None, record) or not before:
        return None
    return BlockStates(ids, tuple(before), tuple(after))


@torch.inference_mode()
def block_errors(
    model: PreTrainedModel, reference: BlockStates | None
) -> list[float | None] | None:
    """Return the error of each block of a model, or None if its blocks do not correspond to the reference's.

    The entry of a block is None if the reference's block adds nothing, so that the relative error is undefined.
    """
    if reference is None:
        return None
    errors: list[float | None] = []

    def compare(block: int, _states: Tensor, output: Tensor) -> None:
        before, after = reference.before[block], reference.after[block]
        error, update = (output.float().cpu() - after).norm(), (after - before).norm()
        value = float(error / update) if error else 0.0
        errors.append(value if math.isfinite(value) else None)

    complete = _run_blocks(model, reference.ids, reference.before, compare)
    return errors if complete and len(errors) == len(reference.before) else None


def _run_blocks(
    model: PreTrainedModel,
    ids: Tensor,
    inputs: tuple[Tensor, ...] | None,
    report: Callable[[int, Tensor, Tensor], None],
) -> bool:
    """Run a model; call ``report`` with input and output of each block. ``inputs``, if given, replace block inputs."""
    try:
        blocks: Any = model.get_submodule(block_list_name(model))
    except RefusedError:
        return False
    if inputs is not None and len(inputs) != len(blocks):
        return False
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.callback(_install_hooks(block, index, inputs, report))
        try:
            base_model(model)(ids.to(model.device), use_cache=False)
        except _OtherShapeError:
            return False
    return True


class _OtherShapeError(Exception):
    """A block returned states of another shape than its input."""


def _install_hooks(
    block: nn.Module,
    index: int,
    inputs: tuple[Tensor, ...] | None,
    report: Callable[[int, Tensor, Tensor], None],
) -> Callable[[], None]:
    """Install hooks on one block that report, and optionally replace, its input; return a function to remove them."""
    last_input: list[Tensor] = []

    def before_block(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = args[0] if args else kwargs[STATES]
        if inputs is not None:
            states = inputs[index].to(states.device, states.dtype)
        last_input[:] = [states]
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, STATES: states})

    def after_block(_block: nn.Module, _args: object, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if not isinstance(states, Tensor) or states.shape != last_input[0].shape:
            raise _OtherShapeError
        report(index, last_input[0], states)

    handles = (
        block.register_forward_pre_hook(before_block, with_kwargs=True),
        block.register_forward_hook(after_block),
    )

    def remove_hooks() -> None:
        for handle in handles:
            handle.remove()

    return remove_hooks
