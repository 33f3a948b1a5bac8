"""Squared error that changed weights cause in the output of the sub-block that holds them.

Where the sub-block is the one linear layer that reads an activation, the error of ``E = W' - W`` is ``tr(E H E^T)``
with ``H`` the mean of ``x x^T``, and no forward is needed. Everywhere else (attention, a gated MLP) the sub-block is
run again on inputs that were captured, and its output compared with that of the unchanged weights.

A run costs as much as rounding the weights thirty times, so that there is an estimate as well: errors of different
readers are independent, so that what each does to the output adds up, and to first order it is a share of its own
``tr(E H E^T)``. That share is measured once, by changing one reader alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from quantforge.architectures import SharedInput
from quantforge.model.block import BlockPart
from quantforge.model.standins import Call
from quantforge.model.statistics import Statistics
from quantforge.numerics.products import cutting, matmul
from quantforge.numerics.quadratic_form import QuadraticForm
from quantforge.numerics.threads import total

Weights = Mapping[str, Tensor]


class OutputError:
    """Judge of weights ``{linear: [out, in]}`` of the readers of one activation; the block is left as it is.

    Attributes:
        weights: copies of the readers' weights, by name.
        shares: see `calibrate`.

    Args:
        part: the block, with the weights to compare with.
        shared: the activation.
        statistics: its Hessian is used where it was observed.
        rows: calibration rows to run a sub-block on.
    """

    def __init__(
        self, part: BlockPart, shared: SharedInput, statistics: Statistics, rows: int
    ) -> None:
        self._part = part
        self._module = part.module.get_submodule(shared.within)
        alone = shared.expert >= 0 and len(shared.linears) == 1
        self._linear = alone or shared.linears == (shared.within,)
        self.weights = {name: part.weight(name).clone() for name in shared.linears}
        self.shares = dict.fromkeys(shared.linears, 1.0)
        self._calls: Sequence[Call] = ()
        self._outputs: list[Tensor] = []
        if self._linear and statistics.hessian is not None:
            self._form = QuadraticForm(statistics.hessian)
            return
        calls = part.capture(shared.within, rows)
        with _Moment(part.module.get_submodule(shared.key)) as moment:
            outputs = [self._run(call) for call in calls]
        self._form = QuadraticForm(
            moment.total if statistics.hessian is None else statistics.hessian
        )
        if not self._linear:
            self._calls, self._outputs = calls, outputs

    def calibrate(self, weights: Weights) -> None:
        """Measure what share of each reader's own error reaches the output when it has its matrix of ``weights``."""
        if self._linear:
            return
        for name, weight in weights.items():
            own = self._own(name, weight)
            self.shares[name] = self._rerun({name: weight}, 1) / own if own else 0.0

    def estimate(self, weights: Weights, steps: Mapping[str, int] | None = None) -> float:
        """Return the estimated squared error at the output: the sum over readers of share times own error.

        Args:
            weights: matrices, or every so many-th of their rows.
            steps: how many that is, by name; 1 where it says nothing.
        """
        steps = steps or {}
        return sum(
            self.shares[name] * self._own(name, weight, steps.get(name, 1))
            for name, weight in weights.items()
        )

    def __call__(self, weights: Weights) -> float:
        """Return the squared error at the output, up to a factor that is the same for all weights."""
        return self.estimate(weights) if self._linear else self._rerun(weights, len(self._calls))

    def _own(self, name: str, weight: Tensor, step: int = 1) -> float:
        return step * self._form(weight - self.weights[name][::step])

    def _rerun(self, weights: Weights, calls: int) -> float:
        try:
            for name, weight in weights.items():
                self._part.set_weight(name, weight)
            pairs = list(zip(self._calls, self._outputs, strict=True))[:calls]
            return sum(total((self._run(call) - output).square_()) for call, output in pairs)
        finally:
            for name in weights:
                self._part.set_weight(name, self.weights[name])

    def _run(self, call: Call) -> Tensor:
        with cutting():
            output = self._module(*call.args, **call.kwargs)
        found: Tensor = output[0] if isinstance(output, tuple) else output
        return found


class _Moment:
    """Sum of ``x^T x`` over the inputs ``x`` of a linear layer, while it is entered."""

    def __init__(self, linear: nn.Module) -> None:
        self._linear = linear
        self.total = torch.zeros(())

    def __enter__(self) -> Self:
        def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            self.total = self.total.to(x) + matmul(x.T, x)

        self._handle = self._linear.register_forward_pre_hook(before)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
