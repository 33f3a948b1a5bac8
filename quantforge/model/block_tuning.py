"""Tuning block after block: scales of groups, gains of norms and codes learned on what each block returns.

A block of the result reads what the blocks before it make of the calibration rows, as they are after their own tuning.
It learns to return what the source's block returns in the source, so that it makes up for what was lost before it. The
loss is the squared distance, all tokens alike. Every scale and gain is multiplied with a factor that Adam fits; the
product is rounded to the stored type before it is used, and its gradient taken as if it were not (straight through).
Codes are learned as `quantforge.model.learned_codes` says. Rows that nothing is learned on decide which epoch is kept,
the start among them.

A step takes one row through the block and back. One block is in memory at a time, with the states of all rows twice:
what leaves the source's block, and what reaches the result's. Of its experts one is in floating point; of the others
there are codes and scales. Nothing of an expert moves in a step that has no token for it.

A row goes forward and back on one thread but for the products of its linears, which are cut into tiles, so that the
result does not depend on the number of threads. Runs of rows of the matrices are learned side by side, and so pass the
rows that nothing is learned on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor

from quantforge.errors import InputError, RefusedError, without
from quantforge.model.block import BlockPart, refuse_experts
from quantforge.model.block_rows import Batch
from quantforge.model.hidden_states import HiddenStates
from quantforge.model.stream import ModelStream
from quantforge.model.tuned_block import TunedBlock, Written
from quantforge.model.tuning_bounds import HELD, rate_of
from quantforge.numerics.finite import finite
from quantforge.numerics.threads import one_thread

Read = Callable[[BlockPart], Written]
Tell = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class BlockTuned:
    """A block as it was tuned, and its error on rows held out, of the square of what it returns, before and after."""

    block: TunedBlock
    before: float
    after: float


class BlockTuningStream(ModelStream):
    """A stream that carries the states of the result beside those of the source."""

    _ahead: HiddenStates | None = None  # of the result

    def tune_blocks(
        self, read: Read, has: Callable[[int], bool], epochs: int, seed: int, told: Tell
    ) -> Iterator[BlockTuned]:
        """Learn block after block, and yield each.

        Args:
            read: returns what was written of a block.
            has: returns whether a block is tuned already, so that rows only pass what was written of it.
            epochs: times that the rows are gone through.
            seed: of the order of the rows.
            told: is told the share that is done, and what is going on.

        Raises:
            InputError: an output or a gradient is not finite, or there is one row only.
            RefusedError: a block holds experts that are no stack, or reads of earlier blocks more than the states
                behind the last.
        """
        blocks = len(self._blocks)
        for part in self:
            self.begin_result()
            self.pass_source(part)
            index = part.index
            if not has(index):

                def tell(share: float, what: str, index: int = index) -> None:
                    told((index + share) / blocks, what)

                yield self.tune_block(part, read, epochs, seed, tell)
            self.pass_result(part, read)

    def begin_result(self) -> None:
        """Keep the states in front of the first block, from which those of the result go on."""
        if self._ahead is None:
            self._ahead = self._copy()

    def tune_block(
        self, part: BlockPart, read: Read, epochs: int, seed: int, told: Tell
    ) -> BlockTuned:
        """Learn a block of which the states behind it are the source's; arguments and errors as of `tune_blocks`."""
        self._refuse_memory(part)
        count = len(self._rows)
        held = max(1, count // HELD)
        if count <= held:
            raise InputError("tuning: one calibration row", "--samples 8, or more")
        with one_thread():
            rate = rate_of(epochs * (count - held))
            block = TunedBlock.of(part, read(part), rate, self._device)
            spans = [range(*span) for span in self._spans(first=count - held)]
            passing = self._passing(part.index)
            learning = Learning(block, passing, self._states, count - held, spans)
            return learning.learn(
                epochs,
                seed,
                lambda share, error: told(share, f"block {part.index}, error {error:.5f}"),
            )

    def pass_result(self, part: BlockPart, read: Read) -> None:
        """Let the states of the result pass a block as it was written, whenever that was; nothing behind the last."""
        if part.index + 1 == len(self._blocks):
            return
        assert self._ahead is not None
        passing = self._passing(part.index)
        with one_thread():
            block = TunedBlock.of(part, read(part), 0.0, self._device)
            for start, stop in self._spans():
                some = block.forward([passing(row) for row in range(start, stop)])
                self._ahead.write(start, torch.cat(some))

    def pass_source(self, part: BlockPart) -> None:
        """Let all rows pass a block of the source; errors as `tune_blocks`."""
        if part.experts is None:
            refuse_experts(part)
        part.advance()
        if part.experts is not None:
            part.experts.forget_tokens()
        self._refuse_memory(part)

    def _refuse_memory(self, part: BlockPart) -> None:
        replay = self._around.replay
        if replay is not None and replay.at(part.index + 1).remembers:
            raise RefusedError(
                f"{part.name}: what it returns is read by more than the next block; tuning does not follow that",
                without("--tune"),
                tensor=part.name,
            )

    def _passing(self, index: int) -> Callable[[int], Batch]:
        """Return what gives a single row of the result on its way into a block."""
        passage, ahead = self._around.passage(index), self._ahead
        assert ahead is not None
        return lambda row: Batch(row, ahead.read(row, row + 1).to(self._device), passage)


class Learning:
    """One block that learns."""

    def __init__(
        self,
        block: TunedBlock,
        passing: Callable[[int], Batch],
        targets: HiddenStates,
        count: int,
        held: Sequence[range],
    ) -> None:
        """Learn on the first ``count`` rows, while others are ``held`` out, of which some pass together."""
        self._block, self._passing, self._targets = block, passing, targets
        self._rows, self._spans = range(count), held
        self._held = [row for span in held for row in span]
        self._norm = 1.0

    def learn(self, epochs: int, seed: int, told: Callable[[float, float], None]) -> BlockTuned:
        """Go through the rows, and leave the block as it was best."""
        block = self._block
        learned = block.learned
        before = best = self._error()
        whole = sum(float(self._targets.read(row, row + 1).square().sum()) for row in self._held)
        shown = 1 / (whole or 1.0)
        kept = Snapshot([block])
        generator = torch.Generator().manual_seed(seed)
        steps, step = epochs * len(self._rows), 0
        self._norm = len(self._held) / before if before else 0.0
        for _ in range(epochs if before else 0):
            for row in torch.randperm(len(self._rows), generator=generator).tolist():
                share = 0.5 + 0.5 * cos(pi * step / steps)
                _, found = block.backward([self._passing(row)], self._gradient, share)
                for one, gradient in zip(learned, found, strict=True):
                    one.step(gradient, share)
                step += 1
                told(step / steps, best * shown)
            error = self._error()
            if error < best:
                best, kept = error, Snapshot([block])
        kept.restore()
        return BlockTuned(block, before * shown, best * shown)

    def _distance(self, row: int, outputs: Tensor) -> Tensor:
        return outputs - self._targets.read(row, row + 1).to(outputs)

    def _error(self) -> float:
        """Return the squared distance over the rows held out."""
        total = 0.0
        for span in self._spans:
            passed = self._block.forward([self._passing(row) for row in span])
            for row, outputs in zip(span, passed, strict=True):
                self._check(row, outputs)
                total += float(self._distance(row, outputs).square().sum())
        return total

    def _gradient(self, row: int, outputs: Tensor) -> Tensor:
        """Return the gradient of the loss at what the block makes of a row."""
        self._check(row, outputs)
        return self._distance(row, outputs) * (2 * self._norm)

    def _check(self, row: int, outputs: Tensor) -> None:
        if not finite(outputs):
            part = self._block.part
            raise InputError(
                f"{part.name}: what it returns with learned scales is not finite in calibration row {row}",
                f"the model overflows on this text, or {without('--tune')}",
                tensor=part.name,
            )


class Snapshot:
    """Everything that is learned of blocks, as it is at one time."""

    def __init__(self, blocks: Sequence[TunedBlock]) -> None:
        """Take it."""
        self._learned = [(one, one.factor.clone()) for block in blocks for one in block.learned]
        self._codes = [(one, one.snapshot()) for block in blocks for one in block.steps]

    def restore(self) -> None:
        """Go back to it."""
        for one, factor in self._learned:
            one.factor.copy_(factor)
        for own, steps in self._codes:
            own.restore(steps)
