"""Statistics of what single experts read: of their own tokens, shrunk toward what the layer knows.

A router sends some experts few tokens. A Hessian of few tokens has a rank of few: error feedback would be exact in
these directions, and do anything in all others. So the mean over the ``n`` tokens of an expert is mixed with a prior
that counts as ``m`` tokens, ``(n H + m H_0) / (n + m)``; an expert without tokens has the prior alone. Matrices that
read the input of the mixture have the mean over all tokens of the layer as their prior. Inside of an expert the
hidden units are its own, and have nothing in common with those of another; there the prior is what this expert makes
of a sample of all tokens of the layer. That is no large number of tokens, and the units of one expert have little to
do with each other, so that what lies off the diagonal is mostly noise: it is multiplied with ``t / (t + c)``, ``t``
being the number of tokens that would give a mean as exact as the mixed one, for each input feature.

Measured by the error under the Hessian of other tokens, on a small llama whose MLPs were made experts: 2 experts, int3,
relative to plain rounding, by the tokens of an expert for each input feature of the matrix.

    gate       own tokens alone   prior alone   mixed          down       own tokens alone   prior alone   mixed
    1/4                   0.84          0.34    0.33           1/4                   1.25          0.71    0.65
    1                     0.58          0.34    0.32           1                     1.33          0.72    0.63
    4                     0.33          0.34    0.30           4                     0.70          0.84    0.57
    16                    0.27          0.34    0.27
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.model.accumulator import Accumulator
from quantforge.model.experts import TOGETHER, TOKENS, Experts
from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.threads import one_thread, side_by_side

WEIGHT = 2.0  # of the prior, in tokens for each input feature: ``m``
SAMPLE = 8  # tokens for each input feature that the prior inside of an expert and the expert's own are together
LEAST = 1  # that the prior has
DIAGONAL = 2.0  # ``c``
PROBED = 8  # tokens by which it is seen which matrices read the input of the mixture itself


class ExpertStatistics:
    """Statistics of the experts of one block, one expert after the other.

    Args:
        experts: whose tokens have been collected.
        wanted: what is observed.
        everyone: every token passes every expert, and counts alike.
        seed: of the sample.
    """

    def __init__(
        self, experts: Experts, wanted: frozenset[Statistic], *, everyone: bool, seed: int
    ) -> None:
        assert experts.tokens is not None
        self._experts, self._tokens, self._wanted = experts, experts.tokens, wanted
        self._everyone = everyone
        self._all = torch.arange(self._tokens.count)
        self._shuffled = torch.randperm(
            self._tokens.count, generator=torch.Generator().manual_seed(seed)
        )
        self._outer: Statistics | None = None
        self._reads: frozenset[str] | None = None

    def of(self, number: int, *, add: bool) -> dict[str, Statistics]:
        """Return the statistics of what an expert reads, by the parameters that hold its matrices.

        ``add``: whether what it returns for its own tokens is added to the outputs of the mixture. Errors as
        `Experts.run`.
        """
        experts, (tokens, weights) = self._experts, self._tokens.of(number)
        names = experts.stacks if self._wanted else ()
        outer = self._outer_stacks(number) if names else frozenset()
        if self._everyone:
            if add:
                experts.run(number, tokens, weights, {}, add=True)
            totals = {name: Accumulator(self._wanted) for name in names if name not in outer}
            experts.run(number, self._all, None, totals)
            found = {name: total.result() for name, total in totals.items()}
            for name, one in found.items():
                _to_diagonal(one, one.tokens / experts.columns(number, name))
            return found | {name: self._of_input(number).copy() for name in outer}
        totals = {name: Accumulator(self._wanted) for name in names}
        experts.run(number, tokens, weights, totals, add=add)
        return {name: self._shrunk(number, name, total.result()) for name, total in totals.items()}

    def weighed(self, number: int, name: str, weights: Tensor | None) -> Statistics:
        """Return the statistics of what the matrix of an expert in ``name`` reads, of its own tokens and the prior.

        ``weights``: of all tokens, in the place of the router's squared ones; those with 0 are left out.
        """
        total = Accumulator(self._wanted)
        tokens, routed = self._tokens.of(number)
        if weights is not None:
            tokens = tokens[weights.flatten()[tokens] > 0]
            routed = weights.flatten()[tokens].sqrt()
        self._experts.run(number, tokens, routed, {name: total})
        return self._shrunk(number, name, total.result())

    def _shrunk(self, number: int, name: str, own: Statistics) -> Statistics:
        """Return statistics of own tokens, mixed with the prior."""
        width = self._experts.columns(number, name)
        if name in self._outer_stacks(number):
            return own.toward(self._of_input(number), WEIGHT * width)
        prior = self._inner(number, name, max(SAMPLE * width - own.tokens, LEAST * width))
        share = own.tokens / (own.tokens + WEIGHT * width)
        variance = share**2 / max(own.tokens, 1) + (1 - share) ** 2 / prior.tokens
        found = own.toward(prior, WEIGHT * width)
        _to_diagonal(found, 1 / variance / width)
        return found

    def _of_input(self, number: int) -> Statistics:
        """Return the statistics of the input of the mixture, of all tokens; they are where the expert's weights are."""
        if self._outer is None:
            total, device = Accumulator(self._wanted), self._experts.device(number)
            with one_thread():
                for part in torch.split(self._all, TOKENS * TOGETHER):
                    runs = torch.split(part, TOKENS)
                    states = [self._tokens.states(run).to(device) for run in runs]
                    side_by_side(lambda job: job(), total.adding(states))
            self._outer = total.result()
        return self._outer

    def _outer_stacks(self, number: int) -> frozenset[str]:
        """Return the parameters whose matrices read the input of the mixture itself."""
        if self._reads is None:
            probe = self._all[:PROBED]
            states = self._tokens.states(probe)
            seen = self._experts.inputs(number, probe)
            self._reads = frozenset(
                name for name, x in seen.items() if torch.equal(x.cpu(), states)
            )
        return self._reads

    def _inner(self, number: int, name: str, tokens: int) -> Statistics:
        """Return what a matrix inside of an expert reads of a sample of so many tokens."""
        total = Accumulator(self._wanted)
        self._experts.run(number, self._shuffled[:tokens].sort().values, None, {name: total})
        return total.result()


def _to_diagonal(statistics: Statistics, tokens: float) -> None:
    """Shrink what lies off the diagonal of a Hessian, in place; ``tokens``: for each input feature."""
    if statistics.hessian is not None:
        diagonal = statistics.hessian.diagonal().clone()
        statistics.hessian.mul_(tokens / (tokens + DIAGONAL)).diagonal().copy_(diagonal)
