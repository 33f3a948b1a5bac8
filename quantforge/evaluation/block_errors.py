"""Error of each block by itself: how far a model's block is from the reference's when both read the same.

    error of block l = ||f'_l(h) - f_l(h)|| / ||f_l(h) - h||

with ``h`` the hidden states that the reference's block ``f_l`` reads, ``f'_l`` the same block of the model, and the
norm over all of the tokens. Quantization can harm what a block adds to its input, and the difference is measured by
that. Errors of earlier blocks do not come in: the largest figure is the block that lost most. It takes one forward of a
few tokens for each model; of the reference the states between its blocks are kept.
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
from quantforge.model.model_parts import base_model, blocks_of

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
    """Keep the states between the blocks of the reference; None where its blocks cannot be found.

    Args:
        model: the reference.
        window: token ids ``[length]``, of which the first `TOKENS` are taken.
    """
    ids = window[None, :TOKENS]
    before: list[Tensor] = []
    after: list[Tensor] = []

    def keep(_block: int, states: Tensor, output: Tensor) -> None:
        before.append(states.float().cpu())
        after.append(output.float().cpu())

    if not _run(model, ids, None, keep) or not before:
        return None
    return BlockStates(ids, tuple(before), tuple(after))


@torch.inference_mode()
def block_errors(
    model: PreTrainedModel, reference: BlockStates | None
) -> list[float | None] | None:
    """Return the error of each block of a model, or None where blocks do not correspond.

    It is None of a block that differs from one of the reference that adds nothing: there is nothing to compare with.
    """
    if reference is None:
        return None
    found: list[float | None] = []

    def compare(block: int, _states: Tensor, output: Tensor) -> None:
        before, after = reference.before[block], reference.after[block]
        error, added = (output.float().cpu() - after).norm(), (after - before).norm()
        value = float(error / added) if error else 0.0
        found.append(value if math.isfinite(value) else None)

    complete = _run(model, reference.ids, reference.before, compare)
    return found if complete and len(found) == len(reference.before) else None


def _run(
    model: PreTrainedModel,
    ids: Tensor,
    given: tuple[Tensor, ...] | None,
    report: Callable[[int, Tensor, Tensor], None],
) -> bool:
    """Run a model; call ``report`` with the input and output of each block. ``given`` replaces the inputs of blocks."""
    try:
        blocks: Any = model.get_submodule(blocks_of(model))
    except RefusedError:
        return False
    if given is not None and len(given) != len(blocks):
        return False
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.callback(_listen(block, index, given, report))
        try:
            base_model(model)(ids.to(model.device), use_cache=False)
        except _OtherShapeError:
            return False
    return True


class _OtherShapeError(Exception):
    """A block does not return states of the shape that it reads."""


def _listen(
    block: nn.Module,
    index: int,
    given: tuple[Tensor, ...] | None,
    report: Callable[[int, Tensor, Tensor], None],
) -> Callable[[], None]:
    """Hook one block, and replace its input where one is given; return a function that removes the hooks."""
    read: list[Tensor] = []

    def enter(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = args[0] if args else kwargs[STATES]
        if given is not None:
            states = given[index].to(states.device, states.dtype)
        read[:] = [states]
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, STATES: states})

    def leave(_block: nn.Module, _args: object, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if not isinstance(states, Tensor) or states.shape != read[0].shape:
            raise _OtherShapeError
        report(index, read[0], states)

    handles = (
        block.register_forward_pre_hook(enter, with_kwargs=True),
        block.register_forward_hook(leave),
    )

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
