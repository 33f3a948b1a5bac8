"""Linears and experts of one block, rounded under each candidate scheme for `candidate_errors`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.execution.progress import tell
from quantforge.model.block import Weighed
from quantforge.model.expert_statistics import ExpertStatistics
from quantforge.model.observe import Accumulator
from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.allocator import trim
from quantforge.planning.run_work import OUTPUT_ROWS

if TYPE_CHECKING:
    from quantforge.architectures import SharedInput
    from quantforge.model.block import BlockPart
    from quantforge.quantizers.methods import Rounder
    from quantforge.recipe import Recipe
    from quantforge.scheme import Scheme

HESSIAN = frozenset({Statistic.HESSIAN})


@dataclass(frozen=True, slots=True)
class LinearErrors:
    """Errors of the linears of blocks under candidates.

    Attributes:
        masses: returns the weights of all tokens for a linear, ``[rows, length]``; 0 for rows without gradients.
        tokens: how many have gradients.
        rounder: that of the run.
        recipe: of the candidates.
    """

    masses: Callable[[str], Tensor]
    tokens: int
    rounder: Rounder
    recipe: Recipe

    def of(
        self, part: BlockPart, schemes: Sequence[Mapping[str, Scheme]]
    ) -> dict[str, list[float]]:
        """Return the errors of one block under the schemes of each candidate, and advance it."""
        found: dict[str, list[float]] = {}
        asked = [(shared, _asked(shared, part, schemes)) for shared in part.inputs]
        inputs = [(shared, linears) for shared, linears in asked if linears and shared.expert < 0]
        passing = part.experts is None
        for index, (shared, linears) in enumerate(inputs):
            where = f"{part.name}: {', '.join(linears)}"
            tell(f"{where}: observing", share=0.5 * index / len(inputs))
            masses = {one: self.masses(f"{part.name}.{one}") for one in linears}
            plain, *own = part.observe_weighed(
                [
                    Weighed(shared.key, HESSIAN),
                    *(Weighed(shared.key, HESSIAN, masses[one]) for one in linears),
                ],
                advance=passing and index == len(inputs) - 1,
            )
            trim()
            tell(f"{where}: rounding", share=0.5 * (index + 0.5) / len(inputs))
            found |= self._rounded(part, plain, dict(zip(linears, own, strict=True)), schemes)
            trim()
        if part.experts is not None:
            if part.experts.tokens is None:
                part.observe({})
            found |= self._experts(part, schemes)
            part.advance_seen()
        elif not inputs:
            part.advance()
        return found

    def _experts(
        self, part: BlockPart, schemes: Sequence[Mapping[str, Scheme]]
    ) -> dict[str, list[float]]:
        """Return likewise the errors of the experts of a block whose tokens are collected."""
        found: dict[str, list[float]] = {}
        experts, options = part.experts, self.recipe.calibration
        assert experts is not None
        assert experts.tokens is not None
        inputs = {
            shared: linears
            for shared in part.inputs
            if shared.expert >= 0 and (linears := _asked(shared, part, schemes))
        }
        if not inputs:
            return found
        statistics = ExpertStatistics(
            experts, HESSIAN, everyone=options.experts == "all", seed=options.seed
        )
        for place, number in enumerate(experts.numbers):
            tell(f"{part.name}: expert {number}", share=0.5 + 0.5 * place / len(experts.numbers))
            tokens, _ = experts.tokens.of(number)
            plain = statistics.of(number, add=False)
            for shared, linears in inputs.items():
                if shared.expert != number:
                    continue
                own = {}
                for one in linears:
                    mass, total = self.masses(f"{part.name}.{one}").flatten(), Accumulator(HESSIAN)
                    some = tokens[mass[tokens] > 0]
                    experts.run(number, some, mass[some].sqrt(), {part.stack_of(one): total})
                    own[one] = total.result()
                found |= self._rounded(part, plain[part.stack_of(shared.key)], own, schemes)
            experts.release(number)
            trim()
        return found

    def _rounded(
        self,
        part: BlockPart,
        plain: Statistics,
        own: Mapping[str, Statistics],
        schemes: Sequence[Mapping[str, Scheme]],
    ) -> dict[str, list[float]]:
        """Round the linears of one input under every candidate; return the errors.

        Args:
            part: the block.
            plain: the statistics under which they are rounded.
            own: of each linear, those in which tokens count with its weights.
            schemes: of each candidate.
        """
        # One name for each linear and candidate, so that one factorization serves all.
        asked = {
            f"{one} {place}": (one, scheme[f"{part.name}.{one}"])
            for place, scheme in enumerate(schemes)
            for one in own
        }
        apart = not any(scheme.whole for _, scheme in asked.values())
        some = {one: _some_rows(part.weight(one)) if apart else part.weight(one) for one in own}
        rounded = self.rounder.round_shared(
            {key: some[one] for key, (one, _) in asked.items()},
            plain,
            {key: scheme for key, (_, scheme) in asked.items()},
            self.recipe.rounding,
        )
        found = {}
        for one, statistics in own.items():
            name = f"{part.name}.{one}"
            mean = float(self.masses(name).sum(dtype=torch.float64)) / self.tokens
            scale = 0.5 * mean * len(part.weight(one)) / len(some[one])
            found[name] = [
                scale * _error(some[one], rounded[f"{one} {place}"].tensor.decode(), statistics)
                for place in range(len(schemes))
            ]
        return found


def _asked(
    shared: SharedInput, part: BlockPart, schemes: Sequence[Mapping[str, Scheme]]
) -> list[str]:
    """Return the linears of an input that are rounded."""
    return [one for one in shared.linears if f"{part.name}.{one}" in schemes[0]]


def _some_rows(weight: Tensor) -> Tensor:
    """Return rows that stand for all of them, where no row of a candidate sees another."""
    return weight[:: max(1, len(weight) // OUTPUT_ROWS)].contiguous()


def _error(weight: Tensor, rounded: Tensor, statistics: Statistics) -> float:
    """Return ``tr(E H E^T)``, 0 where no gradient reaches the linear."""
    if statistics.hessian is None:
        return 0.0
    error = weight.float() - rounded.to(weight.device)
    return float(((error @ statistics.hessian) * error).sum(dtype=torch.float64))
