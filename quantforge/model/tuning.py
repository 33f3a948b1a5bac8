"""Tuning of the whole model: scales of groups, gains of norms and codes learned on what it predicts.

It goes on with what was learned block after block (`quantforge.model.block_tuning`), in the same manner. The loss is
the divergence of the quantized model from its source at every position of some rows, in nats. Codes are learned from
two epochs on; in one there are too few steps to tell a gradient from its noise.

A step takes a few rows forward through all blocks and back again. Only what reaches each block is kept on the way
forward; on the way back a block is computed once more with gradients. The weights of linears exist in floating point in
one block at a time, and of its experts in one of them: of the others there are codes and scales. Nothing of an expert
moves in a step that has no token for it, nor what Adam remembers of its gradients.

Each row passes by itself, on a CPU on one thread, and gradients of rows are added in their order, so that the result
does not depend on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor

from quantforge.errors import InputError, without
from quantforge.model.block import BlockPart
from quantforge.model.block_rows import Batch
from quantforge.model.block_tuning import BlockTuningStream, Read, Snapshot, Tell
from quantforge.model.hidden_states import HiddenStates
from quantforge.model.tuned_block import Aim, TunedBlock
from quantforge.model.tuning_bounds import HELD, ROWS, rate_of
from quantforge.numerics.finite import finite
from quantforge.numerics.team import side_by_side
from quantforge.numerics.threads import one_thread

LOGITS = 1 << 26  # logits of the rows that pass the head at the same time


@dataclass(frozen=True, slots=True)
class Tuned:
    """Blocks as they were tuned, and the divergence on rows held out, in nats per token, before and after."""

    blocks: list[TunedBlock]
    before: float
    after: float


class TuningStream(BlockTuningStream):
    """A stream that goes forward and back through a quantized model, many times."""

    def tune(self, read: Read, epochs: int, seed: int, told: Tell) -> Tuned:
        """Learn scales and gains, and return them.

        Args:
            read: returns what was written of a block.
            epochs: times that the rows are gone through.
            seed: of the order of the rows.
            told: is told the share that is done, and the divergence on rows held out.

        Raises:
            InputError: a gradient is not finite. Others as `tune_blocks`.
        """
        count = len(self._rows)
        held = max(1, count // HELD)
        steps = epochs * -(-(count - held) // ROWS)
        rate = rate_of(steps) if epochs > 1 else 0.0
        with one_thread():
            start, targets = self._source()
            blocks = [
                TunedBlock.of(part := self.block(index), read(part), rate, self._device)
                for index in range(len(self._blocks))
            ]
            with self._filled_head():
                return self._learn(
                    blocks, (start, targets), range(count - held, count), epochs, seed, told
                )

    def _source(self) -> tuple[HiddenStates, HiddenStates]:
        """Return the states in front of the first block, and those behind the last one, of the source."""
        first: list[HiddenStates] = []
        for part in self:
            if not first:
                first.append(self._copy())
            self.pass_source(part)
        return first[0], self._states

    def _learn(
        self,
        blocks: list[TunedBlock],
        states: tuple[HiddenStates, HiddenStates],
        held: range,
        epochs: int,
        seed: int,
        told: Tell,
    ) -> Tuned:
        learned = [one for block in blocks for one in block.learned]
        before = best = self._divergence(blocks, states, held)
        kept = Snapshot(blocks)
        generator = torch.Generator().manual_seed(seed)
        steps, step = epochs * -(-held.start // ROWS), 0
        for _ in range(epochs):
            order = torch.randperm(held.start, generator=generator).tolist()
            for first in range(0, held.start, ROWS):
                share = 0.5 + 0.5 * cos(pi * step / steps)
                gradients = self._gradients(blocks, states, order[first : first + ROWS], share)
                for one, gradient in zip(learned, gradients, strict=True):
                    one.step(gradient, share)
                step += 1
                told(step / steps, f"divergence {best:.5f}")
            found = self._divergence(blocks, states, held)
            if found < best:
                best, kept = found, Snapshot(blocks)
            told(step / steps, f"divergence {best:.5f}")
        kept.restore()
        return Tuned(blocks, before, best)

    def _forward(
        self, blocks: list[TunedBlock], start: HiddenStates, rows: list[int]
    ) -> list[list[Tensor]]:
        """Return what reaches each block, and what leaves the last one, of single rows."""
        states = [start.read(row, row + 1).to(self._device) for row in rows]
        found = [states]
        for index, block in enumerate(blocks):
            states = block.forward(self._single(index, rows, states))
            found.append(states)
        return found

    def _single(self, index: int, rows: list[int], states: list[Tensor]) -> list[Batch]:
        passage = self._around.passage(index)
        return [Batch(row, state, passage) for row, state in zip(rows, states, strict=True)]

    def _divergence(
        self, blocks: list[TunedBlock], states: tuple[HiddenStates, HiddenStates], rows: range
    ) -> float:
        """Return the mean divergence over rows."""
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
        """Move codes, and return the gradients of all factors for the mean divergence over rows; see `TunedBlock`."""
        reached = self._forward(blocks, states[0], rows)
        behind = [gradient for _, gradient in self._behind(rows, reached.pop(), states[1])]
        scale = 1 / (len(rows) * self._rows.shape[1])
        found: list[list[Tensor | None]] = []
        for index in reversed(range(len(blocks))):
            block = blocks[index]
            batches = self._single(index, rows, reached.pop())
            behind, sums = block.backward(batches, _known(rows, behind), share)
            _check(block.part, behind, rows)
            found.append([one if one is None else one * scale for one in sums])
        return [gradient for own in reversed(found) for gradient in own]

    def _behind(
        self, rows: list[int], last: list[Tensor], targets: HiddenStates
    ) -> list[tuple[float, Tensor]]:
        """Return of each row the divergence, summed, and its gradient at the states behind the last block."""

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


def _known(rows: list[int], behind: list[Tensor]) -> Aim:
    """Return the gradients that are known already, by their rows."""
    found = dict(zip(rows, behind, strict=True))
    return lambda row, _: found[row]


def _check(part: BlockPart, gradients: list[Tensor], rows: list[int]) -> None:
    for row, gradient in zip(rows, gradients, strict=True):
        if not finite(gradient):
            raise InputError(
                f"{part.name}: the gradients of what reaches it are not finite in calibration row {row}",
                f"the model overflows on this text, or {without('--tune')}",
                tensor=part.name,
            )
