"""The experts of one block: their weights come and go one expert at a time, and what each reads is observed.

A layer may have hundreds of experts; all of them in float32 would be the largest thing of a run. So a block passes its
rows in three steps. It runs as far as the experts, whose input is kept with its routing (`RoutedTokens`); the experts
are filled from the checkpoint one after the other, each runs its own tokens, and adds what it returns to the outputs;
then the block runs once more, with these outputs in the place of the experts. transformers' own code computes an
expert: the module is given the weights of one, and tokens that are all sent to it. What the matrices read is seen by
`StackInputs`, so that no family needs code here.

The Hessian of an expert is the mean over its tokens, each weighted by the square of its router weight, because that is
what an error of the expert's output is multiplied with.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quantforge.architectures import LayerKind, Place
from quantforge.errors import InputError, RefusedError
from quantforge.model.expert_calls import arguments_of_one
from quantforge.model.expert_routing import RoutedExperts
from quantforge.model.expert_weights import Load
from quantforge.model.observe import Accumulator
from quantforge.model.skeleton import as_refusals
from quantforge.model.stack_inputs import StackInputs
from quantforge.model.statistics import EXPERT_TOKENS
from quantforge.numerics.finite import finite
from quantforge.numerics.products import cutting
from quantforge.numerics.team import side_by_side
from quantforge.numerics.threads import one_thread

TOKENS = 256  # that one thread runs at a time
TOGETHER = (
    EXPERT_TOKENS // TOKENS
)  # such runs, whatever the number of threads: sums are made in their order


class ExpertPass(NamedTuple):
    """Outputs ``[tokens, hidden]`` of an expert, and inputs ``[tokens, in_features]`` of its stacks, by name."""

    outputs: Tensor
    inputs: Mapping[str, Tensor]


class Experts(RoutedExperts):
    """The experts of one block.

    Args:
        name, block, kind, load: as of `ExpertWeights`.
        bfloat16: matrix products take their operands in that type.
    """

    def __init__(
        self, name: str, block: nn.Module, kind: LayerKind, load: Load, *, bfloat16: bool = False
    ) -> None:
        super().__init__(name, block, kind, load)
        self._bfloat16 = bfloat16

    def run(
        self,
        number: int,
        tokens: Tensor,
        weights: Tensor | None,
        totals: Mapping[str, Accumulator],
        *,
        add: bool = False,
    ) -> float:
        """Run tokens through one expert.

        Args:
            number: of the expert.
            tokens: ascending numbers of tokens, see `RoutedTokens`.
            weights: ``[tokens]``, of the router; None counts all of them alike, and adds no outputs.
            totals: sums of what its stacks read, by parameter; they are added to.
            add: whether to add what it returns, times the weights, to the outputs.

        Returns:
            The sum over the tokens of the norm of what is added to the outputs; 0 where nothing is.

        Raises:
            InputError: what one of its matrices reads is not finite.
            RefusedError: a matrix is in none of the products that `StackInputs` watches, or the module does not run.
        """
        assert self.tokens is not None
        norms = 0.0
        if not len(tokens):
            return norms
        with one_thread(), self.filled(number):
            for start in range(0, len(tokens), TOKENS * TOGETHER):
                parts = torch.split(tokens[start : start + TOKENS * TOGETHER], TOKENS)
                passed = side_by_side(partial(self._pass, number), parts)
                mine = None
                if weights is not None:
                    mine = torch.split(weights[start : start + TOKENS * TOGETHER], TOKENS)
                jobs = []
                for parameter_name, total in totals.items():
                    seen = [one.inputs[parameter_name] for one in passed]
                    near = None if mine is None else [one.to(seen[0].device) for one in mine]
                    jobs += total.adding(seen, near)
                side_by_side(lambda job: job(), jobs)
                if add:
                    assert mine is not None
                    for part, one, weight in zip(parts, passed, mine, strict=True):
                        outputs = one.outputs.cpu() * weight[:, None]
                        norms += float(torch.linalg.vector_norm(outputs, dim=1).double().sum())
                        self.tokens.add(part, outputs)
        return norms

    def inputs(self, number: int, tokens: Tensor) -> Mapping[str, Tensor]:
        """Return what the stacks of an expert read of a few tokens, ``[tokens, in_features]``; errors as `run`."""
        with self.filled(number):
            return self._pass(number, tokens).inputs

    def sample(self, place: Place, rows: int) -> Tensor:
        """Return the input ``[tokens, in_features]`` of an expert's matrix for its first tokens.

        These are as many as ``rows`` calibration rows have; an expert without tokens takes those of all rows.
        """
        assert self.tokens is not None
        tokens, _ = self.tokens.of(place.expert)
        if not len(tokens):
            tokens = torch.arange(self.tokens.count)
        return self.inputs(place.expert, tokens[: self.tokens.in_rows(rows)])[place.stack.parameter]

    def run_all(self) -> list[float]:
        """Let every expert run its own tokens, and add up what they return.

        Returns, for each expert in order, the mean norm of what it adds for a token of its own; 0 without tokens.
        """
        assert self.tokens is not None
        self.tokens.begin_outputs()
        norms = []
        for number in self.numbers:
            held = self.holds(number)
            tokens, weights = self.tokens.of(number)
            norms.append(self.run(number, tokens, weights, {}, add=True) / max(len(tokens), 1))
            if not held:
                self.release(number)
        return norms

    def watched(self, number: int, states: Tensor) -> tuple[Tensor, StackInputs]:
        """Run hidden states ``[tokens, width]`` through an expert that is filled; errors as `run`.

        Returns its outputs ``[tokens, width]``, and the inputs and products of its stacks.
        """
        stacks = self._held[number]
        watcher = StackInputs(
            {
                place.stack.parameter: stacks[place.stack.parameter]
                for place in self._places[number].values()
            }
        )
        autocast = torch.autocast(states.device.type, torch.bfloat16, enabled=self._bfloat16)
        with autocast, watcher, as_refusals("an expert"):
            outputs: Tensor = self._module(*arguments_of_one(self._module, states))
        for place in self._places[number].values():
            name = place.stack.parameter
            if name not in watcher.found:
                raise RefusedError(
                    f"{self.name}: what {name} reads of expert {number} is not seen in the products that it computes",
                    "--method rtn --calibration none, or --ignore '*experts*'",
                    tensor=self.name,
                )
            if not finite(watcher.found[name]):
                raise InputError(
                    f"{self.name}.{number}: what {name} reads is not finite",
                    "the expert overflows on this text; `quantforge inspect` checks weights",
                    tensor=f"{self.name}.{number}",
                )
        return outputs, watcher

    def _pass(self, number: int, tokens: Tensor) -> ExpertPass:
        assert self.tokens is not None
        states = self.tokens.states(tokens).to(self.device(number))
        with cutting():
            outputs, watcher = self.watched(number, states)
        return ExpertPass(outputs.float(), watcher.found)
