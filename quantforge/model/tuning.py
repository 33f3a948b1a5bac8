"""Tuning: scales of groups, gains of norms and codes learned on what the whole model predicts.

The loss is the divergence of the quantized model from its source at every position of some rows, in nats. Every scale
and gain is multiplied with a factor that Adam fits; the product is rounded to the stored type before it is used, and
its gradient taken as if it were not (straight through). From two epochs on codes are learned as well
(`quantforge.model.learned_codes`); in one there are too few steps to tell a gradient from its noise. Rows that nothing
is learned on decide which epoch is kept, the start among them.

A step takes a few rows forward through all blocks and back again. Only what reaches each block is kept on the way
forward; on the way back a block is computed once more with gradients. The weights of linears exist in floating point in
one block at a time: of the others there are codes and scales.

Each row passes by itself, on a CPU on one thread, and gradients of rows are added in their order, so that the result
does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor

from quantforge.errors import InputError, RefusedError, without
from quantforge.model.block import BlockPart
from quantforge.model.block_rows import Batch
from quantforge.model.block_samples import refuse_experts
from quantforge.model.hidden_states import HiddenStates
from quantforge.model.stream import ModelStream
from quantforge.model.tuned_block import TunedBlock, Written
from quantforge.model.tuning_bounds import MOST, ROWS, learns_codes
from quantforge.numerics.finite import finite
from quantforge.numerics.team import side_by_side
from quantforge.numerics.threads import one_thread

HELD = 8  # one row of so many decides which epoch is kept, and nothing is learned on it
BETAS = (0.9, 0.99)
RATE = 0.035  # of the codes' offsets, at most
REACH = 1.4  # steps of its grid that a code goes in all epochs where every gradient agrees
LOGITS = 1 << 26  # logits of the rows that pass the head at the same time

Read = Callable[[BlockPart], Written]
Tell = Callable[[float, float], None]


@dataclass(frozen=True, slots=True)
class Tuned:
    """Blocks as they were tuned, and the divergence on rows held out, in nats per token, before and after."""

    blocks: list[TunedBlock]
    before: float
    after: float


class TuningStream(ModelStream):
    """A stream that goes forward and back through a quantized model, many times."""

    def tune(self, read: Read, epochs: int, seed: int, told: Tell) -> Tuned:
        """Learn scales and gains, and return them.

        Args:
            read: returns what was written of a block.
            epochs: times that the rows are gone through.
            seed: of the order of the rows.
            told: is told the share that is done, and the divergence on rows held out, after each epoch.

        Raises:
            InputError: a gradient is not finite, or there is one row only.
            RefusedError: a block holds experts that are no stack, or reads of earlier blocks more than the states
                behind the last.
        """
        count = len(self._rows)
        held = max(1, count // HELD)
        if count <= held:
            raise InputError("tuning: one calibration row", "--samples 8, or more")
        steps = epochs * -(-(count - held) // ROWS)
        rate = min(RATE, 2 * REACH / steps) if learns_codes(epochs) else 0.0
        with one_thread():
            start, targets = self._source()
            blocks = [
                TunedBlock.of(part := self.block(index), read(part), rate)
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
            if part.experts is None:
                refuse_experts(part)
            part.advance()
            replay = self._around.replay
            if replay is not None and replay.at(part.index + 1).remembers:
                raise RefusedError(
                    f"{part.name}: what it returns is read by more than the next block; tuning does not follow that",
                    without("--tune"),
                    tensor=part.name,
                )
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
        optimizer = torch.optim.Adam([{"params": [one.factor]} for one in learned], betas=BETAS)
        before = best = self._divergence(blocks, states, held)
        kept = _Snapshot(blocks)
        generator = torch.Generator().manual_seed(seed)
        steps, step = epochs * -(-held.start // ROWS), 0
        for _ in range(epochs):
            order = torch.randperm(held.start, generator=generator).tolist()
            for first in range(0, held.start, ROWS):
                share = 0.5 + 0.5 * cos(pi * step / steps)
                for group, one in zip(optimizer.param_groups, learned, strict=True):
                    group["lr"] = one.rate * share
                gradients = self._gradients(blocks, states, order[first : first + ROWS], share)
                for one, gradient in zip(learned, gradients, strict=True):
                    one.factor.grad = gradient
                optimizer.step()
                for one in learned:
                    one.factor.data.clamp_(-MOST, MOST)
                step += 1
                told(step / steps, best)
            found = self._divergence(blocks, states, held)
            if found < best:
                best, kept = found, _Snapshot(blocks)
            told(step / steps, best)
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
            behind, sums = block.backward(batches, behind, share)
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


class _Snapshot:
    """Factors and codes of blocks at one moment."""

    def __init__(self, blocks: list[TunedBlock]) -> None:
        """Take it."""
        self._blocks = blocks
        self._factors = [one.factor.detach().clone() for block in blocks for one in block.learned]
        self._codes = [one.snapshot() for block in blocks for one in block.steps]

    def restore(self) -> None:
        """Go back to it."""
        learned = [one for block in self._blocks for one in block.learned]
        for one, factor in zip(learned, self._factors, strict=True):
            one.factor.data.copy_(factor)
        codes = [one for block in self._blocks for one in block.steps]
        for own, steps in zip(codes, self._codes, strict=True):
            own.restore(steps)


def _check(part: BlockPart, gradients: list[Tensor], rows: list[int]) -> None:
    for row, gradient in zip(rows, gradients, strict=True):
        if not finite(gradient):
            raise InputError(
                f"{part.name}: the gradients of what reaches it are not finite in calibration row {row}",
                f"the model overflows on this text, or {without('--tune')}",
                tensor=part.name,
            )
