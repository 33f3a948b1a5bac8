"""Tune a rounded model on calibration rows: first one block at a time, then the whole model.

Every scale and gain is multiplied by a factor optimized by Adam; the product is rounded to the stored type before use,
and its gradient is computed as if it were not (straight-through). `tuned_matrix` explains how codes are tuned. Held-out
rows decide which epoch is kept, or whether the model stays unchanged.

*One block at a time.* The input of a block is the output of the tuned blocks before it. Its target is the output of the
source's block in the source model, so that it compensates for earlier errors. Codes are always tuned with the scales.
The loss is the squared error, equally weighted over tokens. A step runs one row through the block forward and backward.
One block is in memory at a time, with two sets of hidden states of all rows: outputs of the source's block, and inputs
of the quantized model's block.

*The whole model.* The loss is the divergence of the quantized model from its source at every position of some rows, in
nats. Codes are tuned only if at least two epochs train the whole model; one epoch has too few steps to separate
gradients from noise. A step runs a few rows forward through all blocks and back again. The forward pass keeps only the
inputs of each block; the backward pass runs each block once more with gradients. The weights of linears are in floating
point in one block at a time; the other blocks hold codes and scales.

One expert of a block is in floating point at a time. A step without tokens for an expert changes neither the expert nor
Adam's moments for it.

Each row is computed separately, on a CPU on one thread except for the products of linears, which are cut into tiles,
and gradients of rows are added in order. So the result does not depend on the number of threads. Strips of rows of
matrices are updated in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import cos, pi

import torch
from torch import Tensor

from quantforge.errors import InputError, RefusedError, off_option
from quantforge.model.block import DecoderBlock, MicroBatch, refuse_experts
from quantforge.model.hidden_states import HiddenStates
from quantforge.model.stream import ModelStream
from quantforge.numerics.threads import one_thread, run_parallel
from quantforge.numerics.values import all_finite
from quantforge.quantizers.tuning import HOLDOUT_INTERVAL, ROWS_PER_STEP, code_learning_rate
from quantforge.quantizers.tuning.tuned_block import TunedBlock, WrittenBlock

MAX_LOGITS = 1 << 26  # number of logits computed at the same time

Read = Callable[[DecoderBlock], WrittenBlock]
ReportShare = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class TuningResult:
    """Tuned blocks, and the loss on held-out rows before and after tuning.

    The loss of one block is its squared error relative to the squared norm of the source's output; the loss of all
    blocks is the divergence in nats per token.
    """

    blocks: list[TunedBlock]
    before: float
    after: float


class TuningStream(ModelStream):
    """A model stream that also carries hidden states of the quantized model, with backward passes through it."""

    _result_states: HiddenStates | None = None  # of the quantized model

    def tune_blocks(
        self, read_result: Read, is_tuned: Callable[[int], bool], seed: int, report: ReportShare
    ) -> Iterator[TuningResult]:
        """Tune one block after the other for one epoch; yield each result.

        Args:
            read_result: returns a block as it was written.
            is_tuned: returns whether a block is already tuned; then rows only pass through the written block.
            seed: seed of the order of the rows.
            report: called with the share of the work done, and a message.

        Raises:
            InputError: an output or a gradient is not finite, or there is only one row.
            RefusedError: a block holds experts that are not a stack, or reads other outputs of earlier blocks than the
                last hidden states.
        """
        blocks = len(self._blocks)
        for decoder_block in self:
            self.begin_result()
            self.pass_source(decoder_block)
            index = decoder_block.index
            if not is_tuned(index):

                def tell(finished_share: float, step: str, index: int = index) -> None:
                    report((index + finished_share) / blocks, step)

                yield self.tune_block(decoder_block, read_result, seed, tell)
            self.pass_result(decoder_block, read_result)

    def begin_result(self) -> None:
        """Copy the inputs of the first block as the first hidden states of the quantized model."""
        if self._result_states is None:
            self._result_states = self._copy_states()

    def tune_block(
        self, decoder_block: DecoderBlock, read_result: Read, seed: int, report: ReportShare
    ) -> TuningResult:
        """Tune one block after the source's rows have passed it; arguments and errors as `tune_blocks`."""
        self._refuse_side_outputs(decoder_block)
        count = len(self._rows)
        learned = count - max(1, count // HOLDOUT_INTERVAL)
        if not learned:
            raise InputError("tuning: one calibration row", "--samples 8, or more")
        with one_thread():
            block = TunedBlock.of(
                decoder_block, read_result(decoder_block), code_learning_rate(learned), self._device
            )
            holdout_spans = [range(*span) for span in self._row_spans(first=learned)]
            input_of = self._result_input(decoder_block.index)
            size = sum(
                float(self._states.read(row, row + 1).square().sum())
                for row in range(learned, count)
            )
            normalization = 1 / (size or 1.0)
            error_before = self._error(block, input_of, holdout_spans)
            norm = (count - learned) / error_before if error_before else 0.0

            def gradients(rows: list[int], rate_share: float) -> list[Tensor | None]:
                def output_gradient(row: int, outputs: Tensor) -> Tensor:
                    return self._output_difference(decoder_block, row, outputs) * (2 * norm)

                return block.backward([*map(input_of, rows)], output_gradient, rate_share)[1]

            error_after = optimize_blocks(
                [block],
                (learned, 1),
                1 if error_before else 0,
                seed,
                error_before,
                gradients=gradients,
                loss=lambda: self._error(block, input_of, holdout_spans),
                report=lambda share, best: report(
                    share, f"block {decoder_block.index}, error {best * normalization:.5f}"
                ),
            )
        return TuningResult([block], error_before * normalization, error_after * normalization)

    def _error(
        self,
        block: TunedBlock,
        input_of: Callable[[int], MicroBatch],
        holdout_spans: Sequence[range],
    ) -> float:
        """Return the squared error on held-out rows, given as spans of rows that run together."""
        total = 0.0
        for span in holdout_spans:
            row_outputs = block.forward([*map(input_of, span)])
            for row, outputs in zip(span, row_outputs, strict=True):
                total += float(
                    self._output_difference(block.decoder_block, row, outputs).square().sum()
                )
        return total

    def _output_difference(self, decoder_block: DecoderBlock, row: int, outputs: Tensor) -> Tensor:
        """Return the output of a block for a row minus that of the source's block."""
        if not all_finite(outputs):
            raise InputError(
                f"{decoder_block.name}: what it returns with learned scales is not finite in calibration row {row}",
                f"the model overflows on this text, or {off_option('--tune')}",
                tensor=decoder_block.name,
            )
        return outputs - self._states.read(row, row + 1).to(outputs)

    def pass_result(self, decoder_block: DecoderBlock, read_result: Read) -> None:
        """Run the quantized model's rows through a block as it was written; do nothing for the last block."""
        if decoder_block.index + 1 == len(self._blocks):
            return
        assert self._result_states is not None
        input_of = self._result_input(decoder_block.index)
        with one_thread():
            block = TunedBlock.of(decoder_block, read_result(decoder_block), 0.0, self._device)
            for start, stop in self._row_spans():
                row_outputs = block.forward([input_of(row) for row in range(start, stop)])
                self._result_states.write(start, torch.cat(row_outputs))

    def pass_source(self, decoder_block: DecoderBlock) -> None:
        """Run all rows through a block of the source; errors as `tune_blocks`."""
        if decoder_block.experts is None:
            refuse_experts(decoder_block)
        decoder_block.advance()
        if decoder_block.experts is not None:
            decoder_block.experts.release_tokens()
        self._refuse_side_outputs(decoder_block)

    def _refuse_side_outputs(self, decoder_block: DecoderBlock) -> None:
        if self._is_reread(decoder_block.index):
            raise RefusedError(
                f"{decoder_block.name}: what it returns is read by more than the next block;"
                " tuning does not follow that",
                off_option("--tune"),
                tensor=decoder_block.name,
            )

    def _result_input(self, index: int) -> Callable[[int], MicroBatch]:
        """Return a function that returns the quantized model's input of a block for a row."""
        passage, result_states = self._block_inputs(index), self._result_states
        assert result_states is not None
        return lambda row: MicroBatch(
            row, result_states.read(row, row + 1).to(self._device), passage
        )

    def tune(self, read_result: Read, epochs: int, seed: int, report: ReportShare) -> TuningResult:
        """Tune the whole model.

        Args:
            read_result: returns a block as it was written.
            epochs: number of passes over the rows.
            seed: seed of the order of the rows.
            report: called with the share of the work done, and a message with the divergence on held-out rows.

        Raises:
            InputError: a gradient is not finite. Others as `tune_blocks`.
        """
        count = len(self._rows)
        holdout_rows = range(count - max(1, count // HOLDOUT_INTERVAL), count)
        steps = epochs * -(-holdout_rows.start // ROWS_PER_STEP)
        rate = code_learning_rate(steps) if epochs > 1 else 0.0
        with one_thread():
            states = self._source()
            blocks = [
                TunedBlock.of(
                    decoder_block := self.block(index),
                    read_result(decoder_block),
                    rate,
                    self._device,
                )
                for index in range(len(self._blocks))
            ]
            with self._head_loaded():
                divergence_before = self._divergence(blocks, states, holdout_rows)
                divergence_after = optimize_blocks(
                    blocks,
                    (holdout_rows.start, ROWS_PER_STEP),
                    epochs,
                    seed,
                    divergence_before,
                    gradients=lambda rows, share: self._gradients(blocks, states, rows, share),
                    loss=lambda: self._divergence(blocks, states, holdout_rows),
                    report=lambda share, best: report(share, f"divergence {best:.5f}"),
                )
        return TuningResult(blocks, divergence_before, divergence_after)

    def _source(self) -> tuple[HiddenStates, HiddenStates]:
        """Return the source's inputs of the first block and outputs of the last block."""
        first: list[HiddenStates] = []
        for decoder_block in self:
            if not first:
                first.append(self._copy_states())
            self.pass_source(decoder_block)
        return first[0], self._states

    def _forward(
        self, blocks: list[TunedBlock], start: HiddenStates, rows: list[int]
    ) -> list[list[Tensor]]:
        """Return the inputs of each block and the outputs of the last one, for single rows."""
        states = [start.read(row, row + 1).to(self._device) for row in rows]
        block_states = [states]
        for index, block in enumerate(blocks):
            states = block.forward(self._single(index, rows, states))
            block_states.append(states)
        return block_states

    def _single(self, index: int, rows: list[int], states: list[Tensor]) -> list[MicroBatch]:
        passage = self._block_inputs(index)
        return [MicroBatch(row, state, passage) for row, state in zip(rows, states, strict=True)]

    def _divergence(
        self, blocks: list[TunedBlock], states: tuple[HiddenStates, HiddenStates], rows: range
    ) -> float:
        """Return the mean divergence per token of some rows."""
        start, targets = states
        total = 0.0
        for first in range(rows.start, rows.stop, ROWS_PER_STEP):
            row_numbers = [*range(first, min(first + ROWS_PER_STEP, rows.stop))]
            last = self._forward(blocks, start, row_numbers)[-1]
            total += sum(
                value for value, _ in self._divergence_gradients(row_numbers, last, targets)
            )
        return total / (len(rows) * self._rows.shape[1])

    def _gradients(
        self,
        blocks: list[TunedBlock],
        states: tuple[HiddenStates, HiddenStates],
        rows: list[int],
        rate_share: float,
    ) -> list[Tensor | None]:
        """Update codes; return the gradients of the mean divergence with respect to all factors.

        See `TunedBlock.backward`.
        """
        states_by_block = self._forward(blocks, states[0], rows)
        row_gradients = [
            gradient
            for _, gradient in self._divergence_gradients(rows, states_by_block.pop(), states[1])
        ]
        scale = 1 / (len(rows) * self._rows.shape[1])
        sums_by_block: list[list[Tensor | None]] = []
        for index in reversed(range(len(blocks))):
            block = blocks[index]
            batches = self._single(index, rows, states_by_block.pop())
            gradient_of_row = dict(zip(rows, row_gradients, strict=True))
            row_gradients, sums = block.backward(
                batches, partial(_of_row, gradient_of_row), rate_share
            )
            _check_finite(block.decoder_block, row_gradients, rows)
            sums_by_block.append([total if total is None else total * scale for total in sums])
        return [gradient for block_sums in reversed(sums_by_block) for gradient in block_sums]

    def _divergence_gradients(
        self, rows: list[int], last: list[Tensor], targets: HiddenStates
    ) -> list[tuple[float, Tensor]]:
        """Return, for each row, the summed divergence and its gradient with respect to the output of the last block."""

        def one(pair: tuple[int, Tensor]) -> tuple[float, Tensor]:
            row, states = pair
            reference_states = targets.read(row, row + 1).to(self._device)
            with one_thread(), torch.no_grad():
                source_log_probs = (
                    self._run_end(self._model, row, reference_states).logits.float().log_softmax(-1)
                )
            with one_thread(), torch.enable_grad():
                states = states.detach().requires_grad_()
                logits = self._run_end(self._model, row, states).logits
                with torch.no_grad():
                    log_probs = logits.detach().float().log_softmax(-1)
                    source_probs = source_log_probs.exp()
                    value = float(
                        (source_probs * (source_log_probs - log_probs)).sum(dtype=torch.float64)
                    )
                    gradients = log_probs.exp_().sub_(source_probs).to(logits.dtype)
                (gradient,) = torch.autograd.grad(logits, [states], gradients)
            return value, gradient

        rows_at_once = max(1, MAX_LOGITS // (self._rows.shape[1] * self._dimensions.vocab))
        pairs = [*zip(rows, last, strict=True)]
        row_results: list[tuple[float, Tensor]] = []
        for first in range(0, len(pairs), rows_at_once):
            row_results += run_parallel(one, pairs[first : first + rows_at_once])
        return row_results


def optimize_blocks(
    blocks: Sequence[TunedBlock],
    rows: tuple[int, int],
    epochs: int,
    seed: int,
    before: float,
    *,
    gradients: Callable[[list[int], float], Sequence[Tensor | None]],
    loss: Callable[[], float],
    report: Callable[[float, float], None],
) -> float:
    """Optimize blocks, and keep the epoch with the smallest loss on held-out rows; return that loss.

    Args:
        blocks: blocks to optimize.
        rows: number of training rows, and number of rows in a step.
        epochs: number of passes over the training rows.
        seed: seed of their order.
        before: loss before tuning.
        gradients: updates codes and returns the gradients of all factors, given rows and the share of the initial
            learning rate.
        loss: returns the loss on held-out rows.
        report: called with the share of the work done, and the smallest loss so far.
    """
    learned = [item for block in blocks for item in block.learned]
    best, restore = before, _snapshot(blocks)
    count, rows_per_step = rows
    generator = torch.Generator().manual_seed(seed)
    steps, step = epochs * -(-count // rows_per_step), 0
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator).tolist()
        for first in range(0, count, rows_per_step):
            rate_share = 0.5 + 0.5 * cos(pi * step / steps)
            step_gradients = gradients(order[first : first + rows_per_step], rate_share)
            for item, gradient in zip(learned, step_gradients, strict=True):
                item.step(gradient, rate_share)
            step += 1
            report(step / steps, best)
        new_loss = loss()
        if new_loss < best:
            best, restore = new_loss, _snapshot(blocks)
        report(step / steps, best)
    restore()
    return best


def _snapshot(blocks: Sequence[TunedBlock]) -> Callable[[], None]:
    """Copy all tuned values of blocks; return a function that restores them."""
    factors = [
        (parameter, parameter.factor.clone()) for block in blocks for parameter in block.learned
    ]
    codes = [(parameter, parameter.snapshot()) for block in blocks for parameter in block.codes]

    def restore() -> None:
        for learned, factor in factors:
            learned.factor.copy_(factor)
        for learned_codes, steps in codes:
            learned_codes.restore(steps)

    return restore


def _of_row(gradients: Mapping[int, Tensor], row: int, _: Tensor) -> Tensor:
    return gradients[row]


def _check_finite(decoder_block: DecoderBlock, gradients: list[Tensor], rows: list[int]) -> None:
    for row, gradient in zip(rows, gradients, strict=True):
        if not all_finite(gradient):
            raise InputError(
                f"{decoder_block.name}: the gradients of what reaches it are not finite in calibration row {row}",
                f"the model overflows on this text, or {off_option('--tune')}",
                tensor=decoder_block.name,
            )
