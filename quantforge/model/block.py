"""One decoder block with weights and the activations that reach it: observed, captured, advanced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from quantforge.architectures.match import Matched
from quantforge.errors import InputError, RefusedError
from quantforge.model.block_samples import BlockSamples, refuse_experts
from quantforge.model.block_weights import Block
from quantforge.model.hidden_states import HiddenStates
from quantforge.model.observe import Accumulator
from quantforge.model.seen_inputs import EnoughError, SeenInputs
from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.finite import finite
from quantforge.numerics.products import cutting
from quantforge.numerics.team import side_by_side
from quantforge.numerics.threads import one_thread
from quantforge.plans import StoredTensor

Result = TypeVar("Result")


class Call(NamedTuple):
    """The arguments of one forward of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Batch(NamedTuple):
    """One micro-batch on its way through a block: its first row, hidden states, and what else the block takes.

    ``each`` is what it takes beside a single row.
    """

    start: int
    states: Tensor
    call: Call
    each: Call

    def rows(self) -> list[Batch]:
        """Return one batch for every row; on a GPU, which fills itself, one batch of all rows."""
        if self.states.device.type != "cpu":
            return [self]
        return [
            Batch(self.start + i, self.states[i : i + 1], self.each, self.each)
            for i in range(len(self.states))
        ]


class BlockPart(Block):
    """A block with the activations that reach it; see `quantforge.model.stream.ModelStream`."""

    def __init__(
        self,
        block: tuple[int, nn.Module, Matched, Mapping[str, StoredTensor]],
        batches: Callable[[], Iterator[Batch]],
        write: Callable[[int, Tensor], None],
        store: Callable[[], HiddenStates],
        *,
        bfloat16: bool = False,
    ) -> None:
        """Hold a block, which is what `Block` takes, and its batches; ``store`` makes room for states of all rows.

        With ``bfloat16``, matrix products of observing and advancing take their operands in that type.
        """
        super().__init__(*block)
        self._bfloat16 = bfloat16
        self._batches = batches
        self._write = write
        self._store = store
        self._kept: list[Batch] = []
        self.advanced = False

    def observe(
        self,
        needs: Mapping[str, frozenset[Statistic]],
        *,
        advance: bool = False,
        keep: int = 0,
        whole: bool = False,
    ) -> dict[str, Statistics]:
        """Run all rows through the block as it is and summarise its shared inputs.

        Args:
            needs: what is wanted, by `SharedInput.key`; inputs of which nothing is wanted are left out.
            advance: replace the hidden states by the block's outputs in the same pass; see `advance`.
            keep: then keep the states of so many rows as they were, for `capture`.
            whole: run the block to its end, because something else listens too.

        Raises:
            InputError: an activation is not finite; the module and the calibration row are named.
            RefusedError: something is wanted of what an expert reads.
        """
        self._refuse_experts(needs)
        wanted = [shared.key for shared in self.inputs if needs.get(shared.key)]
        sums = {key: Accumulator(needs[key]) for key in wanted}
        if not wanted and not whole:
            return {}
        enough = None if advance or whole else wanted[-1]
        with one_thread(), ExitStack() as hooks:
            seen = SeenInputs(enough)
            for key in wanted:
                hooks.enter_context(seen.listening(self.module, key))
            for batch in self._batches():
                if advance and batch.start < keep:
                    self._kept.append(batch._replace(states=batch.states.clone()))
                self._observe_batch(batch, seen, sums, advance=advance)
        self.advanced = advance
        return {key: total.result() for key, total in sums.items()}

    def _refuse_experts(self, needs: Mapping[str, frozenset[Statistic]]) -> None:
        for shared in self.inputs:
            if shared.expert >= 0 and needs.get(shared.key):
                raise RefusedError(
                    f"{self.name}.{shared.key}: inputs of single experts are not observed",
                    "--method rtn without calibration, or --ignore '*experts*'",
                    tensor=f"{self.name}.{shared.key}",
                )

    def capture(self, submodule: str, rows: int) -> list[Call]:
        """Return the inputs of a sub-module for the micro-batches that hold the first ``rows`` rows.

        The search of a transform runs the sub-module again on them, with changed weights. Whole micro-batches are
        returned, so that they may cover a few rows more.
        """
        module = self.module.get_submodule(submodule)
        calls: list[Call] = []

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(Call(args, dict(kwargs)))
            raise EnoughError

        handle = module.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            for batch in self._kept or self._batches():
                if batch.start >= rows:
                    break
                self._run(batch)  # float32: small differences of outputs are to be compared
        finally:
            handle.remove()
        return calls

    def round_inputs(self, linear: str, rounded: Callable[[Tensor], Tensor]) -> None:
        """Round what a linear reads, from now on: its input is quantized at run time."""

        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = args[0]
            return rounded(x.reshape(-1, x.shape[-1])).view_as(x).to(x.dtype), *args[1:]

        self.module.get_submodule(linear).register_forward_pre_hook(hook)

    def advance(self) -> None:
        """Replace the hidden states of all rows by the output of the block as it is now."""
        self._pass_all(self._write)
        self.advanced = True

    def samples(self) -> BlockSamples:
        """Return the hidden states with the output of the block as it is now, for methods that learn.

        Raises:
            RefusedError: the block holds experts.
        """
        refuse_experts(self)
        targets = self._store()
        self._pass_all(targets.write)
        return BlockSamples(self, self._batches, targets)

    def advance_to(self, samples: BlockSamples) -> None:
        """Replace the hidden states of all rows by the targets of samples."""
        for batch, targets in samples:
            self._write(batch.start, targets)
        self.advanced = True

    def _pass_all(self, write: Callable[[int, Tensor], None]) -> None:
        with one_thread():
            for batch in self._batches():
                passed = side_by_side(partial(self._pass, SeenInputs(None)), batch.rows())
                write(batch.start, torch.cat([outputs for outputs, _ in passed]))

    def _observe_batch(
        self, batch: Batch, seen: SeenInputs, sums: Mapping[str, Accumulator], *, advance: bool
    ) -> None:
        passed = side_by_side(partial(self._pass, seen), batch.rows())
        jobs = [
            job
            for key, total in sums.items()
            for job in total.adding([inputs[key] for _, inputs in passed])
        ]
        side_by_side(lambda job: job(), jobs)
        if advance:
            self._write(batch.start, torch.cat([outputs for outputs, _ in passed]))

    def _pass(self, seen: SeenInputs, row: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Run one row; return its output, and what the linears that are listened to have read."""
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
                outputs: Tensor = self.module(batch.states, *batch.call.args, **batch.call.kwargs)
        except EnoughError:
            return None
        return outputs

    def _check(self, key: str, x: Tensor, batch: Batch) -> None:
        if not finite(x):
            bad = (~x.isfinite()).view(len(batch.states), -1).any(1)
            row = batch.start + int(bad.nonzero()[0])
            raise InputError(
                f"{self.name}.{key}: its input is not finite in calibration row {row}",
                "the model overflows on this text, or a norm weight is damaged; `quantforge inspect` checks weights",
                tensor=f"{self.name}.{key}",
            )
