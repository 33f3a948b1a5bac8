"""Fine-tune a rounded model on calibration rows: one block at a time, then the whole model.

Every scale and gain is multiplied by a factor that Adam fits; the product is rounded to the stored type before it is
used, and its gradient is computed as if it were not (straight-through). `tuned_matrix` says how codes are learned.
Held-out rows decide which epoch is kept, or whether the model stays as it was.

*One block at a time.* The input of a block is the output of the tuned blocks before it. Its target is the output of the
source's block in the source model, so that it compensates for what was lost before it. Codes are always learned with
the scales. The loss is the squared error, equal for all tokens. A step runs one row through the block forward and
backward. One block is in memory at a time, with two sets of hidden states of all rows: outputs of the source's block,
and inputs of the result's block.

*The whole model.* The loss is the divergence of the result from its source at every position of some rows, in nats.
Here codes are learned only if two epochs or more train the whole model; in one there are too few steps to tell a
gradient from its noise. A step runs a few rows forward through all blocks and back again. The forward pass keeps only
the inputs of each block; the backward pass computes each block once more with gradients. The weights of linears are in
floating point in one block at a time; the other blocks hold codes and scales.

One expert of a block is in floating point at a time. A step without tokens for an expert changes neither the expert nor
Adam's moments for it.

Each row is computed by itself, on a CPU on one thread except for the products of linears, which are cut into tiles, and
gradients of rows are added in order. So the result does not depend on the number of threads. Runs of rows of matrices
are updated in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import cos, pi

import torch
from torch import Tensor

from quantforge.errors import InputError, RefusedError, without
from quantforge.model.block import Batch, DecoderBlock, refuse_experts
from quantforge.model.hidden_states import HiddenStates
from quantforge.model.stream import ModelStream
from quantforge.numerics.threads import one_thread, side_by_side
from quantforge.numerics.values import finite
from quantforge.quantizers.tuning import HELD, ROWS, rate_of
from quantforge.quantizers.tuning.tuned_block import TunedBlock, Written

LOGITS = 1 << 26  # of the rows whose logits are computed at the same time

Read = Callable[[DecoderBlock], Written]
Tell = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Tuned:
    """Tuned blocks, and the loss on held-out rows before and after.

    The loss of one block is its squared error relative to the squares of the source's output; the loss of all blocks is
    the divergence in nats per token.
    """

    blocks: list[TunedBlock]
    before: float
    after: float


class TuningStream(ModelStream):
    """A stream with the hidden states of the result too, and with backward passes through the result."""

    _ahead: HiddenStates | None = None  # of the result

    def tune_blocks(
        self, read: Read, has: Callable[[int], bool], seed: int, told: Tell
    ) -> Iterator[Tuned]:
        """Tune one block after the other in one epoch, and yield each.

        Args:
            read: returns a block as it was written.
            has: returns whether a block is tuned already; then rows only pass through it as it was written.
            seed: of the order of the rows.
            told: called with the share that is done, and with a message.

        Raises:
            InputError: an output or a gradient is not finite, or there is one row only.
            RefusedError: a block holds experts that are not a stack, or reads more of earlier blocks than the output of
                the last one.
        """
        blocks = len(self._blocks)
        for part in self:
            self.begin_result()
            self.pass_source(part)
            index = part.index
            if not has(index):

                def tell(share: float, what: str, index: int = index) -> None:
                    told((index + share) / blocks, what)

                yield self.tune_block(part, read, seed, tell)
            self.pass_result(part, read)

    def begin_result(self) -> None:
        """Copy the inputs of the first block as the first hidden states of the result."""
        if self._ahead is None:
            self._ahead = self._copy()

    def tune_block(self, part: DecoderBlock, read: Read, seed: int, told: Tell) -> Tuned:
        """Tune one block, once the source's rows have passed it; arguments and errors as `tune_blocks`."""
        self._refuse_memory(part)
        count = len(self._rows)
        learned = count - max(1, count // HELD)
        if not learned:
            raise InputError("tuning: one calibration row", "--samples 8, or more")
        with one_thread():
            block = TunedBlock.of(part, read(part), rate_of(learned), self._device)
            held = [range(*span) for span in self._spans(first=learned)]
            passing = self._passing(part.index)
            size = sum(
                float(self._states.read(row, row + 1).square().sum())
                for row in range(learned, count)
            )
            shown = 1 / (size or 1.0)
            before = self._error(block, passing, held)
            norm = (count - learned) / before if before else 0.0

            def gradients(rows: list[int], share: float) -> list[Tensor | None]:
                def aim(row: int, outputs: Tensor) -> Tensor:
                    return self._distance(part, row, outputs) * (2 * norm)

                return block.backward([*map(passing, rows)], aim, share)[1]

            after = descend(
                [block],
                (learned, 1),
                1 if before else 0,
                seed,
                before,
                gradients=gradients,
                loss=lambda: self._error(block, passing, held),
                told=lambda share, best: told(
                    share, f"block {part.index}, error {best * shown:.5f}"
                ),
            )
        return Tuned([block], before * shown, after * shown)

    def _error(
        self, block: TunedBlock, passing: Callable[[int], Batch], held: Sequence[range]
    ) -> float:
        """Return the squared error on the held-out rows ``held``, which are spans of rows that pass together."""
        total = 0.0
        for span in held:
            passed = block.forward([*map(passing, span)])
            for row, outputs in zip(span, passed, strict=True):
                total += float(self._distance(block.part, row, outputs).square().sum())
        return total

    def _distance(self, part: DecoderBlock, row: int, outputs: Tensor) -> Tensor:
        """Return the output of a block for a row minus that of the source's block."""
        if not finite(outputs):
            raise InputError(
                f"{part.name}: what it returns with learned scales is not finite in calibration row {row}",
                f"the model overflows on this text, or {without('--tune')}",
                tensor=part.name,
            )
        return outputs - self._states.read(row, row + 1).to(outputs)

    def pass_result(self, part: DecoderBlock, read: Read) -> None:
        """Move the hidden states of the result through a block as it was written; do nothing for the last block."""
        if part.index + 1 == len(self._blocks):
            return
        assert self._ahead is not None
        passing = self._passing(part.index)
        with one_thread():
            block = TunedBlock.of(part, read(part), 0.0, self._device)
            for start, stop in self._spans():
                some = block.forward([passing(row) for row in range(start, stop)])
                self._ahead.write(start, torch.cat(some))

    def pass_source(self, part: DecoderBlock) -> None:
        """Move all rows through a block of the source; errors as `tune_blocks`."""
        if part.experts is None:
            refuse_experts(part)
        part.advance()
        if part.experts is not None:
            part.experts.forget_tokens()
        self._refuse_memory(part)

    def _refuse_memory(self, part: DecoderBlock) -> None:
        if self._is_read_later(part.index):
            raise RefusedError(
                f"{part.name}: what it returns is read by more than the next block; tuning does not follow that",
                without("--tune"),
                tensor=part.name,
            )

    def _passing(self, index: int) -> Callable[[int], Batch]:
        """Return a function that returns the input of a block for a row of the result."""
        passage, ahead = self._passage(index), self._ahead
        assert ahead is not None
        return lambda row: Batch(row, ahead.read(row, row + 1).to(self._device), passage)

    def tune(self, read: Read, epochs: int, seed: int, told: Tell) -> Tuned:
        """Tune the whole model.

        Args:
            read: returns a block as it was written.
            epochs: number of passes over the rows.
            seed: of the order of the rows.
            told: called with the share that is done, and the divergence on held-out rows.

        Raises:
            InputError: a gradient is not finite. Others as `tune_blocks`.
        """
        count = len(self._rows)
        held = range(count - max(1, count // HELD), count)
        steps = epochs * -(-held.start // ROWS)
        rate = rate_of(steps) if epochs > 1 else 0.0
        with one_thread():
            states = self._source()
            blocks = [
                TunedBlock.of(part := self.block(index), read(part), rate, self._device)
                for index in range(len(self._blocks))
            ]
            with self._filled_head():
                before = self._divergence(blocks, states, held)
                after = descend(
                    blocks,
                    (held.start, ROWS),
                    epochs,
                    seed,
                    before,
                    gradients=lambda rows, share: self._gradients(blocks, states, rows, share),
                    loss=lambda: self._divergence(blocks, states, held),
                    told=lambda share, best: told(share, f"divergence {best:.5f}"),
                )
        return Tuned(blocks, before, after)

    def _source(self) -> tuple[HiddenStates, HiddenStates]:
        """Return the inputs of the first block and the outputs of the last block, of the source."""
        first: list[HiddenStates] = []
        for part in self:
            if not first:
                first.append(self._copy())
            self.pass_source(part)
        return first[0], self._states

    def _forward(
        self, blocks: list[TunedBlock], start: HiddenStates, rows: list[int]
    ) -> list[list[Tensor]]:
        """Return the inputs of each block and the outputs of the last one, of single rows."""
        states = [start.read(row, row + 1).to(self._device) for row in rows]
        found = [states]
        for index, block in enumerate(blocks):
            states = block.forward(self._single(index, rows, states))
            found.append(states)
        return found

    def _single(self, index: int, rows: list[int], states: list[Tensor]) -> list[Batch]:
        passage = self._passage(index)
        return [Batch(row, state, passage) for row, state in zip(rows, states, strict=True)]

    def _divergence(
        self, blocks: list[TunedBlock], states: tuple[HiddenStates, HiddenStates], rows: range
    ) -> float:
        """Return the mean divergence per token of rows."""
        start, targets = states
        total = 0.0
        for first in range(rows.start, rows.stop, ROWS):
            some = [*range(first, min(first + ROWS, rows.stop))]
            last = self._forward(blocks, start, some)[-1]
            total += sum(value for value, _ in self._behind(some, last, targets))
        return total / (len(rows) * self._rows.shape[1])

    def _gradients(
        self,
        blocks: list[TunedBlock],
        states: tuple[HiddenStates, HiddenStates],
        rows: list[int],
        share: float,
    ) -> list[Tensor | None]:
        """Update codes, and return the gradients of the mean divergence by all factors; see `TunedBlock.backward`."""
        reached = self._forward(blocks, states[0], rows)
        behind = [gradient for _, gradient in self._behind(rows, reached.pop(), states[1])]
        scale = 1 / (len(rows) * self._rows.shape[1])
        found: list[list[Tensor | None]] = []
        for index in reversed(range(len(blocks))):
            block = blocks[index]
            batches = self._single(index, rows, reached.pop())
            known = dict(zip(rows, behind, strict=True))
            behind, sums = block.backward(batches, partial(_of_row, known), share)
            _check(block.part, behind, rows)
            found.append([one if one is None else one * scale for one in sums])
        return [gradient for own in reversed(found) for gradient in own]

    def _behind(
        self, rows: list[int], last: list[Tensor], targets: HiddenStates
    ) -> list[tuple[float, Tensor]]:
        """Return for each row the summed divergence, and its gradient with respect to the output of the last block."""

        def one(pair: tuple[int, Tensor]) -> tuple[float, Tensor]:
            row, states = pair
            wanted = targets.read(row, row + 1).to(self._device)
            with one_thread(), torch.no_grad():
                source = self._finish(self._model, row, wanted).logits.float().log_softmax(-1)
            with one_thread(), torch.enable_grad():
                states = states.detach().requires_grad_()
                logits = self._finish(self._model, row, states).logits
                with torch.no_grad():
                    own = logits.detach().float().log_softmax(-1)
                    likely = source.exp()
                    value = float((likely * (source - own)).sum(dtype=torch.float64))
                    gradients = own.exp_().sub_(likely).to(logits.dtype)
                (found,) = torch.autograd.grad(logits, [states], gradients)
            return value, found

        together = max(1, LOGITS // (self._rows.shape[1] * self._dimensions.vocab))
        pairs = [*zip(rows, last, strict=True)]
        found: list[tuple[float, Tensor]] = []
        for first in range(0, len(pairs), together):
            found += side_by_side(one, pairs[first : first + together])
        return found


def descend(
    blocks: Sequence[TunedBlock],
    rows: tuple[int, int],
    epochs: int,
    seed: int,
    before: float,
    *,
    gradients: Callable[[list[int], float], Sequence[Tensor | None]],
    loss: Callable[[], float],
    told: Callable[[float, float], None],
) -> float:
    """Optimize blocks, and keep the epoch with the least loss on held-out rows; return that loss.

    Args:
        blocks: to optimize.
        rows: number of training rows, and number of rows in a step.
        epochs: number of passes over the training rows.
        seed: of their order.
        before: the loss at the start.
        gradients: updates codes, and returns the gradients of all factors, given rows and the share of the initial
            learning rate.
        loss: returns the loss on held-out rows.
        told: called with the share that is done, and the least loss so far.
    """
    learned = [one for block in blocks for one in block.learned]
    best, restore = before, _snapshot(blocks)
    count, each = rows
    generator = torch.Generator().manual_seed(seed)
    steps, step = epochs * -(-count // each), 0
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator).tolist()
        for first in range(0, count, each):
            share = 0.5 + 0.5 * cos(pi * step / steps)
            found = gradients(order[first : first + each], share)
            for one, gradient in zip(learned, found, strict=True):
                one.step(gradient, share)
            step += 1
            told(step / steps, best)
        after = loss()
        if after < best:
            best, restore = after, _snapshot(blocks)
        told(step / steps, best)
    restore()
    return best


def _snapshot(blocks: Sequence[TunedBlock]) -> Callable[[], None]:
    """Copy everything that is learned of blocks; return a function that restores it."""
    factors = [(one, one.factor.clone()) for block in blocks for one in block.learned]
    codes = [(one, one.snapshot()) for block in blocks for one in block.codes]

    def restore() -> None:
        for learned, factor in factors:
            learned.factor.copy_(factor)
        for learned_codes, steps in codes:
            learned_codes.restore(steps)

    return restore


def _of_row(gradients: Mapping[int, Tensor], row: int, _: Tensor) -> Tensor:
    return gradients[row]


def _check(part: DecoderBlock, gradients: list[Tensor], rows: list[int]) -> None:
    for row, gradient in zip(rows, gradients, strict=True):
        if not finite(gradient):
            raise InputError(
                f"{part.name}: the gradients of what reaches it are not finite in calibration row {row}",
                f"the model overflows on this text, or {without('--tune')}",
                tensor=part.name,
            )
