"""A backward pass, one block at a time: gradients of the loss at the outputs of all linears.

The loss is the cross-entropy of one label per position, drawn from the model's own prediction there. The squares of its
gradients are the Fisher information: ``sum over tokens of (e x)^T diag(g^2) (e x) / 2`` is, to second order, the
divergence in nats that an error ``e`` of a weight causes at the output of the model (``x`` is the input of the linear,
``g`` the gradient of its output). Labels from a text would measure instead how the text surprises the model.

Backpropagation needs the inputs of all blocks from last to first, and a stream computes them from first to last. The
forward pass keeps the inputs of every n-th of n^2 blocks. The backward pass goes through these runs of blocks from last
to first: it computes the inputs of the blocks of a run again, and then each block once more with gradients. That takes
about 2n copies of the hidden states instead of n^2, and three forward passes instead of one.

Memory: those copies and one of the gradients (in memory, or on disk), one block, the activations of one row per thread,
and for one micro-batch the inputs of the linears of the block and the gradients of their outputs. The head processes
only as many rows at a time as `LOGITS` allows.

On a CPU each row is computed by itself on one thread, and nothing is summed over rows, so that gradients and labels
depend neither on the number of threads nor on the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quantforge.architectures.match import ModelLayout
from quantforge.errors import InputError, RefusedError
from quantforge.model.block import Batch, DecoderBlock, refuse_experts
from quantforge.model.hidden_states import HiddenStates
from quantforge.model.stream import ModelStream
from quantforge.model.weight_loading import TensorSource
from quantforge.numerics.threads import one_thread, side_by_side
from quantforge.numerics.values import finite
from quantforge.quantizers.guidance.gradients import (
    MixtureGradients,
    OutputGradients,
    OutputListener,
    Passed,
)

if TYPE_CHECKING:
    from quantforge_calibration.sampler import Sample

LOGITS = 1 << 27  # of the rows whose logits are computed at the same time
DRAWN = 1 << 22  # logits from which labels are drawn at a time, in float64


Visit = Callable[[OutputGradients], None]


def backward(
    checkpoint: TensorSource,
    model_layout: ModelLayout,
    rows: Tensor | Sample,
    visit: Visit,
    *,
    seed: int = 0,
    micro_batch: int = 8,
    device: str | torch.device = "cpu",
    activations: Path | None = None,
) -> Tensor:
    """Call ``visit`` with the output gradients of each linear, from the head to the first block.

    Args:
        checkpoint: as of `ModelStream`.
        model_layout: of the same checkpoint.
        rows: as of `ModelStream`.
        visit: called for each linear and micro-batch, on the calling thread, with torch on one thread.
        seed: of the labels, with the number of the row and the position in it.
        micro_batch: as of `ModelStream`.
        device: likewise.
        activations: likewise.

    Returns:
        The labels that were drawn, int64 ``[rows, length]``.

    Raises:
        InputError: as `ModelStream`; logits or gradients are not finite.
        RefusedError: a block holds experts that are not a stack, or reads more of earlier blocks than the output of the
            last one.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        stream = _BackwardStream(
            checkpoint,
            model_layout,
            rows,
            micro_batch=micro_batch,
            device=device,
            activations=activations,
        )
        with stream, one_thread():
            return stream.run(visit, seed)


class _BackwardStream(ModelStream):
    """A stream with a backward pass."""

    def run(self, visit: Visit, seed: int) -> Tensor:
        """Run all blocks forward and backward; return the labels."""
        count = len(self._blocks)
        step = 1 + isqrt(count - 1)
        kept: list[HiddenStates] = []
        linears: list[tuple[str, ...]] = []
        for part in self:
            if part.index % step == 0:
                kept.append(self._copy())
            if part.experts is None:
                refuse_experts(part)
            linears.append(part.own_linears)
            part.advance()
            if self._is_read_later(part.index):  # gradients would come from there too
                raise RefusedError(
                    f"{part.name}: what it returns is read by more than the next block; gradients are not observed so",
                    "--method gptq, for instance, takes no gradients",
                    tensor=part.name,
                )
        gradients, labels = self._back_through_head(visit, seed)
        self._states.close()
        for start in reversed(range(0, count, step)):
            run = range(start, min(start + step, count))
            inputs = self._inputs(run, kept.pop())
            for index in reversed(run):
                self._states = inputs.pop()
                self._back_through(index, linears[index], gradients, visit)
                self._states.close()
        return labels

    def _inputs(self, run: range, first: HiddenStates) -> list[HiddenStates]:
        """Compute the inputs of every block of a run, given those of its first block."""
        inputs = [first]
        for index in run[:-1]:
            self._states = inputs[-1]
            self._states = self._copy()
            inputs.append(self._states)
            part = self.block(index)
            part.advance()
            part.close()
        return inputs

    def _back_through_head(self, visit: Visit, seed: int) -> tuple[HiddenStates, Tensor]:
        """Draw labels; return the gradients of the outputs of the last block, and the labels."""
        name = self._architecture.head
        gradients, labels = self._store(), torch.empty_like(self._rows)

        def gradients_of(row: Batch, logits: Tensor) -> Tensor:
            _check(logits, "the logits", row.start)
            drawn = draw_labels(logits, seed, row.start)
            labels[row.start : row.start + len(drawn)] = drawn.to(labels.device)
            ones = torch.ones_like(logits[..., :1])
            return logits.float().softmax(-1).scatter_add_(-1, drawn[..., None], -ones)

        with self._filled_head(), ExitStack() as hooks:
            listener = OutputListener(self._model, [name], hooks)

            def back(row: Batch) -> Passed:
                def run(states: Tensor) -> Tensor:
                    logits: Tensor = self._finish(self._model, row.start, states).logits
                    return logits

                return listener.back(run, row.states, partial(gradients_of, row))

            for batch in self._batches(len(self._blocks) - 1):
                rows = batch.rows()
                together = max(1, LOGITS // (self._rows.shape[1] * self._dimensions.vocab))
                for first in range(0, len(rows), together):
                    passed = side_by_side(back, rows[first : first + together])
                    self._hand_over("", rows[first].start, passed, gradients, visit)
        return gradients, labels

    def _back_through(
        self, index: int, linears: Iterable[str], gradients: HiddenStates, visit: Visit
    ) -> None:
        """Replace ``gradients`` of the outputs of a block by those of its inputs."""
        part = self.block(index)

        def behind(row: Batch) -> Tensor:
            return gradients.read(row.start, row.start + len(row.states)).to(self._device)

        with ExitStack() as hooks:
            if part.experts is not None:
                hooks.enter_context(self._back_through_experts(part, behind, visit))
            listener = OutputListener(part.module, linears, hooks)

            def back(row: Batch) -> Passed:
                def run(states: Tensor) -> Tensor:
                    if part.experts is not None:
                        part.experts.at(row.start)
                    return row._replace(states=states).run(part.module, note=False)

                return listener.back(run, row.states, lambda _: behind(row))

            for batch in self._batches(index):
                passed = side_by_side(back, batch.rows())
                self._hand_over(f"{part.name}.", batch.start, passed, gradients, visit)
        part.close()

    def _back_through_experts(
        self, part: DecoderBlock, behind: Callable[[Batch], Tensor], visit: Visit
    ) -> AbstractContextManager[None]:
        """Call ``visit`` for the experts of a block; return a context for the block's backward pass without them."""
        assert part.experts is not None
        part.run_experts()
        mixture = MixtureGradients(part.experts)

        def meet(row: Batch) -> None:
            mixture.meet(row.start, lambda: row.run(part.module, note=False), behind(row))

        with mixture.listening():
            for batch in self._batches(part.index):
                side_by_side(meet, batch.rows())
        mixture.back(f"{part.name}.", visit)
        return mixture.known()

    @staticmethod
    def _hand_over(
        prefix: str, start: int, passed: list[Passed], store: HiddenStates, visit: Visit
    ) -> None:
        """Call ``visit`` for every linear with the rows joined, and store the gradients of the inputs of the module.

        Raises:
            InputError: a gradient is not finite.
        """
        for key in passed[0].linears:
            inputs, gradients = (
                torch.cat([each.linears[key][which] for each in passed]) for which in (0, 1)
            )
            name = f"{prefix}{key}"
            _check(gradients, f"{name}: the gradients of its output", start)
            visit(OutputGradients(name, start, inputs, gradients))
        # Only now: those of the last linears are what the store has had.
        store.write(start, torch.cat([each.gradients for each in passed]))


def _check(values: Tensor, what: str, start: int) -> None:
    """Raise InputError if values ``[rows, ...]`` are not finite; ``start`` is the number of the first row."""
    if not finite(values):
        bad = int((~values.isfinite()).flatten(1).any(1).nonzero()[0])
        raise InputError(
            f"{what} are not finite in calibration row {start + bad}",
            "the model overflows on this text, or a weight is damaged; `quantforge inspect` checks weights",
        )


def draw_labels(logits: Tensor, seed: int, first: int) -> Tensor:
    """Draw a label for each position from ``logits`` ``[rows, length, vocab]``: int64 ``[rows, length]``.

    A draw is decided by the seed, the number of the calibration row, the position and the logits there, never by which
    rows are computed together: a counter-based generator (Philox) has the seed and the row for its key, and the
    position for its counter. ``first`` is the number of the row of ``logits[0]``.
    """
    step = max(1, DRAWN // logits.shape[2])
    labels = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    for index, row in enumerate(logits):
        key = np.array([seed % 2**64, first + index], dtype=np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=key)).random(len(row))
        uniform = torch.from_numpy(drawn).to(logits.device)
        for start in range(0, len(row), step):
            run = slice(start, start + step)
            chances = row[run].double().softmax(-1).cumsum(-1)
            wanted = uniform[run, None] * chances[:, -1:]
            found = torch.searchsorted(chances, wanted, right=True)[:, 0]
            labels[index, run] = found.clamp(max=logits.shape[2] - 1)
    return labels
