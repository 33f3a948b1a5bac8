"""Squared error that changed weights cause in the output of the sub-block that holds them.

Where the sub-block is the one linear layer that reads an activation, the error of ``E = W' - W`` is ``tr(E H E^T)``
with ``H`` the mean of ``x x^T``, and no forward is needed. Everywhere else (attention, a gated MLP) the sub-block is
run again on inputs that were captured, and its output compared with that of the unchanged weights.

A run costs as much as rounding the weights thirty times, so that there is an estimate as well: errors of different
readers are independent, so that what each does to the output adds up, and to first order it is a share of its own
``tr(E H E^T)``. That share is measured once, by changing one reader alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Self

from torch import Tensor, nn

from quantforge.architectures import SharedInput
from quantforge.model.block import BlockPart
from quantforge.model.observe import Accumulator
from quantforge.model.passage import Call
from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.products import cutting, matmul
from quantforge.numerics.values import total

PANEL = 256  # columns of a Hessian

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
        moments: means of ``x x^T`` over these rows, by `SharedInput.key`; those of linears that this sub-block runs are
            added for judges that come later, whose input no other pair changes.
    """

    def __init__(
        self,
        part: BlockPart,
        shared: SharedInput,
        statistics: Statistics,
        rows: int,
        moments: dict[str, Tensor] | None = None,
    ) -> None:
        moments = {} if moments is None else moments
        self._part = part
        self._module = part.module.get_submodule(shared.within)
        alone = shared.expert >= 0 and len(shared.linears) == 1
        self._linear = alone or shared.linears == (shared.within,)
        self.weights = {name: part.weight(name).clone() for name in shared.linears}
        self.shares = dict.fromkeys(shared.linears, 1.0)
        self._calls: Sequence[Call] = ()
        self._outputs: list[Tensor] = []
        hessian = moments.pop(shared.key, None) if self._linear else None
        if self._linear and statistics.hessian is not None:
            hessian = statistics.hessian
        if hessian is None:
            calls = part.capture(shared.within, rows)
            wanted = {shared.key, *_linears_in(part, shared.within)}
            with _Moments(part.module, wanted if statistics.hessian is None else set()) as seen:
                outputs = [self._run(call) for call in calls]
            moments.update(seen.found())
            hessian = statistics.hessian
            if hessian is None:
                hessian = moments.pop(shared.key)
            if not self._linear:
                self._calls, self._outputs = calls, outputs
        self._form = QuadraticForm(hessian)

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


def _linears_in(part: BlockPart, module: str) -> Iterator[str]:
    """Yield the inputs whose errors need no forward, of linears that a module runs."""
    for shared in part.inputs:
        inside = shared.key.startswith(f"{module}.")
        if inside and shared.absorber is not None and shared.linears == (shared.within,):
            yield shared.key


class _Moments:
    """Means of ``x x^T`` over the inputs ``x`` of linear layers of a block, while it is entered."""

    def __init__(self, block: nn.Module, linears: Iterable[str]) -> None:
        self._block = block
        self._sums = {name: Accumulator({Statistic.HESSIAN}) for name in linears}

    def __enter__(self) -> Self:
        self._handles = [
            self._block.get_submodule(name).register_forward_pre_hook(partial(self._see, total))
            for name, total in self._sums.items()
        ]
        return self

    def _see(self, total: Accumulator, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        total.add(args[0].reshape(-1, args[0].shape[-1]))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def found(self) -> dict[str, Tensor]:
        """Return them by linear, of those that were run; the sums are consumed."""
        means = {name: total.result().hessian for name, total in self._sums.items()}
        return {name: mean for name, mean in means.items() if mean is not None}


class QuadraticForm:
    """The sum ``sum_i e_i H e_i^T`` under a symmetric ``hessian`` ``[in, in]``.

    Products with what is left of the diagonal equal those with what is right of it: half of ``H``, kept as panels of
    its columns, does all of the work.
    """

    def __init__(self, hessian: Tensor) -> None:
        self._panels: list[Tensor] = []
        for start in range(0, len(hessian), PANEL):
            panel = hessian[start:, start : start + PANEL].clone()
            panel[: panel.shape[1]] *= 0.5  # both halves of the square on the diagonal are there
            self._panels.append(panel)

    def __call__(self, error: Tensor) -> float:
        """Return the sum over the rows of ``error`` ``[out, in]``."""
        found, start = 0.0, 0
        for panel in self._panels:
            left = error[:, start:].contiguous()
            width = panel.shape[1]
            found += total(matmul(left, panel).mul_(left[:, :width]))
            start += width
        return 2 * found
