"""One decoder block that rows pass: as a micro-batch is run, row by row, on the threads of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantforge.architectures.match import Matched
from quantforge.errors import InputError
from quantforge.model.block_weights import Block
from quantforge.model.experts import Experts
from quantforge.model.hidden_states import TokenStates
from quantforge.model.loading import empty
from quantforge.model.passage import Passage
from quantforge.model.seen_inputs import EnoughError, SeenInputs
from quantforge.model.standins import states_of
from quantforge.numerics.finite import finite
from quantforge.numerics.products import cutting
from quantforge.numerics.team import side_by_side
from quantforge.numerics.threads import one_thread
from quantforge.plans import StoredTensor


class Batch(NamedTuple):
    """One micro-batch on its way through a block: its first row, packed hidden states, and how it gets there."""

    start: int
    states: Tensor
    passage: Passage

    def rows(self) -> list[Batch]:
        """Return one batch for every row; on a GPU, which fills itself, one batch of all rows."""
        return self.apart(self.states.device.type == "cpu")

    def apart(self, each: bool = False) -> list[Batch]:
        """Return the batches that pass a block at once: this one, or one for ``each`` row or where rows are alone."""
        if not each and not self.passage.alone:
            return [self]
        return [
            Batch(self.start + i, self.states[i : i + 1], self.passage)
            for i in range(len(self.states))
        ]

    def run(self, module: Callable[..., Any], *, note: bool = True) -> Tensor:
        """Return the packed states that a module makes of the rows; ``note`` what it returns beside them."""
        reached = self.passage.reach(self.start, self.states)
        returned = module(reached.states, *reached.call.args, **reached.call.kwargs)
        if note:
            self.passage.left(reached, returned)
        return self.passage.layout.packed(states_of(returned))


class BlockRows(Block):
    """A block with the rows that pass it."""

    def __init__(
        self,
        block: tuple[int, nn.Module, Matched, Mapping[str, StoredTensor], Experts | None],
        batches: Callable[[], Iterator[Batch]],
        write: Callable[[int, Tensor], None],
        store: Callable[..., TokenStates],
        shape: tuple[int, int],
        *,
        refill: Callable[[], object] = lambda: None,
        bfloat16: bool = False,
    ) -> None:
        """Hold a block with its rows.

        Args:
            block: what `Block` takes.
            batches: the rows in micro-batches.
            write: overwrites the states of rows.
            store: makes room for states of all rows, as wide as the hidden ones or as it is told.
            shape: how many rows there are, and how long they are.
            refill: reads the weights of the block, without those of experts, anew.
            bfloat16: matrix products of observing and advancing take their operands in that type.
        """
        super().__init__(*block)
        self._shape, self._refill = shape, refill
        self._bfloat16 = bfloat16
        self._batches = batches
        self._write = write
        self._store = store

    def restore(self) -> None:
        """Read the source's weights anew, those of experts left out."""
        empty(self.module)
        self._refill()

    def _pass_all(self, write: Callable[[int, Tensor], None]) -> None:
        with one_thread():
            for batch in self._batches():
                passed = side_by_side(partial(self._pass, SeenInputs(None)), batch.rows())
                write(batch.start, torch.cat([outputs for outputs, _ in passed]))

    def _pass(self, seen: SeenInputs, row: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Run one row; return its output, and what the linears that are listened to have read."""
        if self.experts is not None:
            self.experts.at(row.start)
        with self._products(row):
            outputs, found = seen.during(lambda: self._run(row))
        for key, x in found.items():
            self._check(key, x, row)
        return row.states if outputs is None else outputs, found

    def _products(self, batch: Batch) -> AbstractContextManager[Any]:
        return torch.autocast(batch.states.device.type, torch.bfloat16, enabled=self._bfloat16)

    def _run(self, batch: Batch) -> Tensor | None:
        """Run a micro-batch; None when a hook had seen enough."""
        try:
            with cutting():
                return batch.run(self.module)
        except EnoughError:
            return None

    def _check(self, key: str, x: Tensor, batch: Batch) -> None:
        if not finite(x):
            bad = (~x.isfinite()).view(len(batch.states), -1).any(1)
            row = batch.start + int(bad.nonzero()[0])
            raise InputError(
                f"{self.name}.{key}: its input is not finite in calibration row {row}",
                "the model overflows on this text, or a norm weight is damaged; `quantforge inspect` checks weights",
                tensor=f"{self.name}.{key}",
            )
