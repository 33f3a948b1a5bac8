"""One decoder block with weights and the activations that reach it: observed, captured, advanced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from quantforge.errors import RefusedError
from quantforge.model.block_rows import Batch, BlockRows
from quantforge.model.loading import empty
from quantforge.model.observe import Accumulator
from quantforge.model.routed_tokens import RoutedTokens
from quantforge.model.seen_inputs import EnoughError, SeenInputs
from quantforge.model.standins import Call
from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.team import side_by_side
from quantforge.numerics.threads import one_thread

Result = TypeVar("Result")


class Weighed(NamedTuple):
    """Shared input whose statistics are wanted, with what each token counts: ``[rows, length]``, none for all alike."""

    key: str
    statistics: frozenset[Statistic]
    weights: Tensor | None = None


class BlockPart(BlockRows):
    """A block with the activations that reach it; see `quantforge.model.stream.ModelStream`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Hold a block with its rows; arguments as of `BlockRows`."""
        super().__init__(*args, **options)
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

        Of a block with experts the first call keeps the tokens that reach them, in ``experts``. Their own inputs are
        not summarised, and the block does not advance.

        Returns:
            The statistics that are wanted, by `SharedInput.key`.

        Raises:
            InputError: an activation is not finite; the module and the calibration row are named.
        """
        wanted = [item.key for item in self.inputs if needs.get(item.key) and item.expert < 0]
        advance = advance and self.experts is None
        if not wanted and not whole and self.experts is None:
            return {}
        asked = [Weighed(key, needs[key]) for key in wanted]
        found = self.observe_weighed(asked, advance=advance, keep=keep, whole=whole)
        return dict(zip(wanted, found, strict=True))

    def observe_weighed(
        self,
        wanted: Sequence[Weighed],
        *,
        advance: bool = False,
        keep: int = 0,
        whole: bool = False,
    ) -> list[Statistics]:
        """Run all rows through the block as it is and summarise inputs, each as often as it is wanted.

        Args:
            wanted: inputs, with the weights of the tokens; not those of experts.
            advance: as of `observe`, like the others.
            keep: likewise.
            whole: likewise.

        Returns:
            The statistics of each, empty ones where all weights are 0. Errors as of `observe`.
        """
        keys = [item.key for item in self.inputs if item.key in {one.key for one in wanted}]
        sums = [(item, Accumulator(item.statistics)) for item in wanted]
        enough = None if advance or whole or self.experts else keys[-1]
        with one_thread(), ExitStack() as hooks:
            seen = SeenInputs(enough)
            for key in keys:
                hooks.enter_context(seen.listening(self.module, key))
            if self.experts is not None:
                tokens = RoutedTokens(self._shape, self._store)
                known = self.experts.tokens is not None
                hooks.enter_context(
                    self.experts.absent() if known else self.experts.collecting(tokens)
                )
            for batch in self._batches():
                if advance and batch.start < keep:
                    self._kept.append(batch._replace(states=batch.states.clone()))
                self._observe_batch(batch, seen, sums, advance=advance)
        self.advanced = advance
        return [total.result() for _, total in sums]

    def capture(self, submodule: str, rows: int) -> list[Call]:
        """Return the inputs of a sub-module for the micro-batches that hold the first ``rows`` rows.

        Of an expert, it is the input of the first tokens sent to it, as many as these rows have.

        A transform runs the sub-module again on them. Micro-batches are whole, and may cover a few rows more.
        """
        if submodule in self._places and self.experts is not None:
            return [Call((self.experts.sample(self._places[submodule], rows),), {})]
        module = self.module.get_submodule(submodule)
        calls: list[Call] = []

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(Call(args, dict(kwargs)))
            raise EnoughError

        handle = module.register_forward_pre_hook(keep, with_kwargs=True)
        absent = self.experts.absent() if self.experts is not None else nullcontext()
        try:
            with absent:
                for batch in self._kept or self._batches():
                    if batch.start >= rows:
                        break
                    for each in batch.apart():  # in float32: small differences are compared
                        self._run(each)
        finally:
            handle.remove()
        return calls

    def advance(self) -> list[float]:
        """Replace the hidden states of all rows by the output of the block as it is now.

        Returns what `Experts.run_all` does; an empty list for a block without experts.
        """
        norms = self.run_experts()
        self._advance()
        return norms

    def run_experts(self) -> list[float]:
        """Collect the tokens of the experts, and add up what these return; returns what `Experts.run_all` does."""
        if self.experts is None:
            return []
        self.experts.forget_tokens()
        self.observe({})
        return self.experts.run_all()

    def advance_source(self) -> None:
        """Replace the hidden states of all rows by what the block returns with the source's weights.

        They are read anew, because a transform keeps what a block computes, but not to the last bit. The outputs of its
        experts have to be added up already.
        """
        self.restore()
        self._advance()

    def advance_seen(self) -> None:
        """Replace the hidden states of all rows by the output of a block whose experts' tokens are collected."""
        assert self.experts is not None
        self.experts.run_all()
        self._advance()

    def _advance(self) -> None:
        with self.experts.returning() if self.experts is not None else nullcontext():
            self._pass_all(self._write)
        self.advanced = True

    def close(self) -> None:
        """Let go of the weights, and of what reached the experts."""
        if self.experts is not None:
            self.experts.close()
        empty(self.module)

    def _observe_batch(
        self,
        batch: Batch,
        seen: SeenInputs,
        sums: Sequence[tuple[Weighed, Accumulator]],
        *,
        advance: bool,
    ) -> None:
        rows = batch.rows()
        passed = side_by_side(partial(self._pass, seen), rows)
        jobs = [
            job
            for item, total in sums
            for job in total.adding([inputs[item.key] for _, inputs in passed], _roots(item, rows))
        ]
        side_by_side(lambda job: job(), jobs)
        if advance:
            self._write(batch.start, torch.cat([outputs for outputs, _ in passed]))


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


def _roots(item: Weighed, rows: Sequence[Batch]) -> list[Tensor] | None:
    """Return the square roots of the weights of the tokens of rows: an accumulator squares them again."""
    if item.weights is None:
        return None
    return [
        item.weights[row.start : row.start + len(row.states)].flatten().sqrt().to(row.states.device)
        for row in rows
    ]
