"""Samples of a block for methods that learn: what reaches it, what it is to return, and gradients in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quantforge.errors import RefusedError

if TYPE_CHECKING:
    from quantforge.model.block import BlockPart
    from quantforge.model.block_rows import Batch
    from quantforge.model.hidden_states import HiddenStates


class BlockSample(NamedTuple):
    """One micro-batch: what reaches the block, and ``[rows, length, width]`` that it is to return."""

    batch: Batch
    targets: Tensor


class BlockSamples:
    """All calibration rows on their way through one block, in micro-batches."""

    def __init__(
        self, part: BlockPart, batches: Callable[[], Iterator[Batch]], targets: HiddenStates
    ) -> None:
        self._part, self._batches, self._targets = part, batches, targets

    def __iter__(self) -> Iterator[BlockSample]:
        """Yield all micro-batches, in their order, every time anew."""
        for batch in (each for many in self._batches() for each in many.apart()):
            targets = self._targets.read(batch.start, batch.start + len(batch.states))
            yield BlockSample(batch, targets.to(batch.states.device))

    def run(
        self,
        batch: Batch,
        weights: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return what the block computes with other values; gradients pass to them.

        Args:
            batch: a micro-batch.
            weights: ``[out_features, in_features]`` by linear, relative to the block.
            parameters: others by their names, e.g. ``input_layernorm.weight``.
        """
        turned = self._part.architecture.transposed
        values = {f"{name}.weight": w.T if turned else w for name, w in weights.items()}
        values |= parameters or {}

        def changed(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self._part.module, values, args, kwargs)

        return batch.run(changed, note=False)

    def close(self) -> None:
        """Release the targets."""
        self._targets.close()


def refuse_experts(part: BlockPart) -> None:
    """Refuse a block with experts: the running model holds several of them in one parameter.

    Raises:
        RefusedError: naming the block.
    """
    if any(shared.expert >= 0 for shared in part.inputs):
        raise RefusedError(
            f"{part.name}: no gradients of single experts are observed",
            "methods that use gradients take dense models; --method gptq for instance",
            tensor=part.name,
        )
