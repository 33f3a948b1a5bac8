"""Block-by-block backward pass: compute the gradients of the loss at the outputs of all linears.

The loss is the cross-entropy of one label per position, sampled from the model's own prediction there. The squares of
its gradients are the Fisher information: ``sum over tokens of (e x)^T diag(g^2) (e x) / 2`` is, to second order, the
divergence in nats that an error ``e`` of a weight causes at the output of the model (``x`` is the input of the linear,
``g`` the gradient of its output). Labels from a text would measure the model's surprise at the text instead.

Backpropagation needs the inputs of all blocks from last to first, but a stream computes them from first to last. The
forward pass saves the inputs of every n-th of n^2 blocks. The backward pass goes through these runs of blocks from last
to first: it recomputes the inputs of the blocks of a run, and then runs each block once more with gradients. That takes
about 2n copies of the hidden states instead of n^2, and three forward passes instead of one.

Memory: those copies and one of the gradients (in memory, or on disk), one block, the activations of one row per thread,
and for one micro-batch the inputs of the linears of the block and the gradients of their outputs. The head processes
only as many rows at a time as `MAX_LOGITS` allows.

On a CPU each row is computed separately on one thread, and nothing is summed over rows, so that gradients and labels
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
from quantforge.model.block import DecoderBlock, MicroBatch, refuse_experts
from quantforge.model.hidden_states import HiddenStates
from quantforge.model.stream import ModelStream
from quantforge.model.weight_loading import TensorSource
from quantforge.numerics.threads import one_thread, run_parallel
from quantforge.numerics.values import all_finite
from quantforge.quantizers.guidance.gradients import (
    MixtureGradients,
    OutputGradients,
    OutputRecorder,
    RowGradients,
)

if TYPE_CHECKING:
    from quantforge_calibration.sampler import Sample

MAX_LOGITS = 1 << 27  # number of logits computed at the same time
LABEL_CHUNK_LOGITS = 1 << 22  # logits converted to float64 at a time to sample labels


GradientCallback = Callable[[OutputGradients], None]


def backward(
    checkpoint: TensorSource,
    model_layout: ModelLayout,
    rows: Tensor | Sample,
    visit: GradientCallback,
    *,
    seed: int = 0,
    micro_batch: int = 8,
    device: str | torch.device = "cpu",
    activations: Path | None = None,
) -> Tensor:
    """Run a backward pass; call ``visit`` with the output gradients of each linear, from the head to the first block.

    Args:
        checkpoint: see `ModelStream`.
        model_layout: layout of the checkpoint.
        rows: see `ModelStream`.
        visit: called for each linear and micro-batch, on the calling thread, with torch on one thread.
        seed: seed of the labels, combined with the row number and the position.
        micro_batch: see `ModelStream`.
        device: see `ModelStream`.
        activations: see `ModelStream`.

    Returns:
        The sampled labels, int64 ``[rows, length]``.

    Raises:
        InputError: as `ModelStream`; logits or gradients are not finite.
        RefusedError: a block holds experts that are not a stack, or reads other outputs of earlier blocks than the last
            hidden states.
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
    """A model stream with a backward pass."""

    def run(self, visit: GradientCallback, seed: int) -> Tensor:
        """Run all blocks forward and backward; return the labels."""
        count = len(self._blocks)
        step = 1 + isqrt(count - 1)
        saved_inputs: list[HiddenStates] = []
        linears: list[tuple[str, ...]] = []
        for block in self:
            if block.index % step == 0:
                saved_inputs.append(self._copy_states())
            if block.experts is None:
                refuse_experts(block)
            linears.append(block.separate_linears)
            block.advance()
            if self._is_reread(block.index):  # its gradient would have another contribution
                raise RefusedError(
                    f"{block.name}: what it returns is read by more than the next block; gradients are not observed so",
                    "--method gptq, for instance, takes no gradients",
                    tensor=block.name,
                )
        gradients, labels = self._backward_head(visit, seed)
        self._states.close()
        for start in reversed(range(0, count, step)):
            run = range(start, min(start + step, count))
            inputs = self._recompute_inputs(run, saved_inputs.pop())
            for index in reversed(run):
                self._states = inputs.pop()
                self._backward_block(index, linears[index], gradients, visit)
                self._states.close()
        return labels

    def _recompute_inputs(self, run: range, first: HiddenStates) -> list[HiddenStates]:
        """Compute the inputs of all blocks of a run, given those of its first block."""
        inputs = [first]
        for index in run[:-1]:
            self._states = inputs[-1]
            self._states = self._copy_states()
            inputs.append(self._states)
            block = self.block(index)
            block.advance()
            block.release()
        return inputs

    def _backward_head(self, visit: GradientCallback, seed: int) -> tuple[HiddenStates, Tensor]:
        """Sample labels; return the gradients of the outputs of the last block, and the labels."""
        name = self._architecture.head
        gradients, labels = self._make_store(), torch.empty_like(self._rows)

        def gradients_of(row: MicroBatch, logits: Tensor) -> Tensor:
            _check_finite(logits, "the logits", row.start)
            drawn_labels = draw_labels(logits, seed, row.start)
            labels[row.start : row.start + len(drawn_labels)] = drawn_labels.to(labels.device)
            ones = torch.ones_like(logits[..., :1])
            return logits.float().softmax(-1).scatter_add_(-1, drawn_labels[..., None], -ones)

        with self._head_loaded(), ExitStack() as hooks:
            recorder = OutputRecorder(self._model, [name], hooks)

            def backward_row(row: MicroBatch) -> RowGradients:
                def run(states: Tensor) -> Tensor:
                    logits: Tensor = self._run_end(self._model, row.start, states).logits
                    return logits

                return recorder.backward(run, row.states, partial(gradients_of, row))

            for batch in self._micro_batches(len(self._blocks) - 1):
                rows = batch.split_into_rows()
                rows_at_once = max(1, MAX_LOGITS // (self._rows.shape[1] * self._dimensions.vocab))
                for first in range(0, len(rows), rows_at_once):
                    row_results = run_parallel(backward_row, rows[first : first + rows_at_once])
                    self._emit_gradients("", rows[first].start, row_results, gradients, visit)
        return gradients, labels

    def _backward_block(
        self, index: int, linears: Iterable[str], gradients: HiddenStates, visit: GradientCallback
    ) -> None:
        """Replace ``gradients`` of the outputs of a block by those of its inputs."""
        block = self.block(index)

        def output_gradients(row: MicroBatch) -> Tensor:
            return gradients.read(row.start, row.start + len(row.states)).to(self._device)

        with ExitStack() as hooks:
            if block.experts is not None:
                hooks.enter_context(self._backward_experts(block, output_gradients, visit))
            recorder = OutputRecorder(block.module, linears, hooks)

            def backward_row(row: MicroBatch) -> RowGradients:
                def run(states: Tensor) -> Tensor:
                    if block.experts is not None:
                        block.experts.set_row(row.start)
                    return row._replace(states=states).run(block.module, record=False)

                return recorder.backward(run, row.states, lambda _: output_gradients(row))

            for batch in self._micro_batches(index):
                row_results = run_parallel(backward_row, batch.split_into_rows())
                self._emit_gradients(f"{block.name}.", batch.start, row_results, gradients, visit)
        block.release()

    def _backward_experts(
        self,
        block: DecoderBlock,
        output_gradients: Callable[[MicroBatch], Tensor],
        visit: GradientCallback,
    ) -> AbstractContextManager[None]:
        """Call ``visit`` for the experts of a block; return a context for the block's backward pass without them."""
        assert block.experts is not None
        block.run_experts()
        mixture = MixtureGradients(block.experts)

        def record_gradients(row: MicroBatch) -> None:
            mixture.record_gradients(
                row.start, lambda: row.run(block.module, record=False), output_gradients(row)
            )

        with mixture.recording():
            for batch in self._micro_batches(block.index):
                run_parallel(record_gradients, batch.split_into_rows())
        mixture.backward(f"{block.name}.", visit)
        return mixture.replaying()

    @staticmethod
    def _emit_gradients(
        prefix: str,
        start: int,
        row_results: list[RowGradients],
        store: HiddenStates,
        visit: GradientCallback,
    ) -> None:
        """Call ``visit`` for each linear with the rows concatenated, and store the input gradients of the module.

        Raises:
            InputError: a gradient is not finite.
        """
        for key in row_results[0].linears:
            inputs, gradients = (
                torch.cat([row_gradients.linears[key][position] for row_gradients in row_results])
                for position in (0, 1)
            )
            name = f"{prefix}{key}"
            _check_finite(gradients, f"{name}: the gradients of its output", start)
            visit(OutputGradients(name, start, inputs, gradients))
        # After all calls: the store still holds the output gradients.
        store.write(start, torch.cat([row_gradients.gradients for row_gradients in row_results]))


def _check_finite(values: Tensor, label: str, start: int) -> None:
    """Raise InputError if values ``[rows, ...]`` are not finite; ``start`` is the number of the first row."""
    if not all_finite(values):
        nonfinite_row = int((~values.isfinite()).flatten(1).any(1).nonzero()[0])
        raise InputError(
            f"{label} are not finite in calibration row {start + nonfinite_row}",
            "the model overflows on this text, or a weight is damaged; `quantforge inspect` checks weights",
        )


def draw_labels(logits: Tensor, seed: int, first: int) -> Tensor:
    """Sample a label for each position from ``logits`` ``[rows, length, vocab]``; return int64 ``[rows, length]``.

    A label depends only on the seed, the number of the calibration row, the position and the logits there, not on which
    rows are computed together: a counter-based generator (Philox) uses the seed and the row as its key, and the
    position as its counter. ``first`` is the row number of ``logits[0]``.
    """
    step = max(1, LABEL_CHUNK_LOGITS // logits.shape[2])
    labels = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    for index, row in enumerate(logits):
        key = np.array([seed % 2**64, first + index], dtype=np.uint64)
        random_numbers = np.random.Generator(np.random.Philox(key=key)).random(len(row))
        uniform = torch.from_numpy(random_numbers).to(logits.device)
        for start in range(0, len(row), step):
            run = slice(start, start + step)
            cumulative = row[run].double().softmax(-1).cumsum(-1)
            quantiles = uniform[run, None] * cumulative[:, -1:]
            token_ids = torch.searchsorted(cumulative, quantiles, right=True)[:, 0]
            labels[index, run] = token_ids.clamp(max=logits.shape[2] - 1)
    return labels
