"""AWQ: scale important columns up before rounding, and fold the inverse factors into the layer that produces them.

For ``y = W x`` and any positive ``s``, ``y = (W diag(s)) (x / s)``: the function is unchanged, but the rounding error
is now ``Q(W s) / s - W``, so that a column with a larger ``s`` is rounded more finely, and the other columns of its
group more coarsely (Lin et al., arXiv 2306.00978, section 3.2). With ``a_j`` the root mean square of column ``j`` of
the activation and ``w_j`` that of the readers' columns, the searched factors are, for exponents ``p`` from 0 to 1,

    salience  s = a^p               p = 0 is the unscaled model, always a candidate
    duo       s = a^p / w^(1 - p)
    balance   s = b^p               b minimizes a model of the rounding error, see `balance_factors`

``duo`` and ``b`` do not depend on how outliers are distributed between producer and readers: a channel scaled by ``c``
whose readers are scaled by ``1 / c`` gets a factor ``c`` times as large. The root mean square replaces the paper's
mean magnitude, because the rounding error of a column is multiplied by ``E x_j^2``. On a small llama, ``b`` reduced
the divergence by another 8 %, and the root mean square reduced the errors by a few per cent.

Every candidate is scored by an estimate of the error at the output of the sub-block that reads the activation, with
scales that cover the range, on a sample of evenly spaced rows of each matrix (`tried_row_count`). The best candidate
of each family is scored by the error itself, on all rows and with scales fitted as the rounder does
(`OutputErrorEstimator`).

Unquantized tensors take their factors exactly (`quantforge.quantizers.scale_pairs`). Rows of a quantized producer have
their own scales, so dividing a row by its factor does not change how it rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from quantforge.architectures import SharedInput
from quantforge.grids import ScaleType
from quantforge.model.accumulator import Accumulator
from quantforge.model.block import DecoderBlock
from quantforge.model.block_calls import Call
from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.products import matmul, tiled_products
from quantforge.numerics.values import total
from quantforge.packers import get_packer
from quantforge.quantizers import TransformResult
from quantforge.quantizers.rtn import floor_importance
from quantforge.quantizers.scale_pairs import (
    fold_if_storable,
    join_tied_columns,
    needs_powers_of_two,
    rescale_statistics,
    storable_factors,
)
from quantforge.recipe import Rounding
from quantforge.scheme import LayerScheme

FactorCurve = Callable[[float], Tensor]
Weights = Mapping[str, Tensor]

GRID_POINTS = 20  # intervals of the grid of exponents
TRIED_WEIGHTS = 1 << 19  # weights sampled from each matrix for the grid search
MIN_TRIED_ROWS = 128  # at least this many rows are sampled
IMPORTANCE_FLOOR = 0.01  # of the median: columns hardly active in calibration keep some precision
BALANCE_ITERATIONS = 24
MIN_SHARE = 1e-6  # smallest share of a column in its group
HESSIAN_PANEL = 256  # columns of a panel


@torch.no_grad()
def apply(
    block: DecoderBlock,
    statistics: Mapping[str, Statistics],
    layers: Mapping[str, LayerScheme],
    rounding: Rounding,
) -> TransformResult:
    """Scale each declared pair of a block, in order of computation, in place.

    Args:
        block: the block.
        statistics: statistics by `SharedInput.key`; mean squares are required for each input read by a quantized
            linear.
        layers: schemes of the linears that will be quantized.
        rounding: ``awq`` options, and ``scales`` as the rounder will choose them.

    Returns:
        The statistics of the changed block, by key; a ``scale-fold-skipped`` event for each pair whose factors
        cannot be stored exactly; and per pair its ``family``, ``exponent`` and ``error`` (relative to the error without
        scaling).
    """
    new_statistics, events, metrics = dict(statistics), [], {}
    moments: dict[str, Tensor] = {}
    for shared in block.inputs:
        if shared.scale_fold is None or not any(name in layers for name in shared.linears):
            continue
        search = _ScaleSearch(
            block, shared, layers, statistics[shared.key], rounding, moments
        ).search()
        if search.family != "none":
            fold_failure = fold_if_storable(block, shared, layers, search.scale)
            if fold_failure:
                events.append(fold_failure)
                continue
            new_statistics[shared.key] = rescale_statistics(statistics[shared.key], search.scale)
        metrics[shared.key] = {
            "family": search.family,
            "exponent": search.exponent,
            "error": search.error,
        }
    return TransformResult(new_statistics, tuple(events), metrics)


@dataclass(frozen=True, slots=True, eq=False)
class _ScaleCandidate:
    family: str
    exponent: float
    scale: Tensor
    error: float


class _ScaleSearch:
    """Search for the best factors of one activation with its producer and readers."""

    def __init__(
        self,
        block: DecoderBlock,
        shared: SharedInput,
        layers: Mapping[str, LayerScheme],
        statistics: Statistics,
        rounding: Rounding,
        moments: dict[str, Tensor],
    ) -> None:
        if statistics.importance is None:
            raise ValueError(f"{block.name}.{shared.key}: awq needs the mean squares of its input")
        self._block, self._shared, self._rounding = block, shared, rounding
        self._schemes = {name: layers[name].weight for name in shared.linears if name in layers}
        self._importance = _floor_squares(statistics.importance)
        self._activation = _floor_squares(self._sum_tied(statistics.importance)).log2() / 2
        self._error = OutputErrorEstimator(
            block, shared, statistics, rounding.awq.search_samples, moments
        )
        self._weights = {name: self._error.weights[name] for name in self._schemes}
        self._row_steps = {
            name: 1
            if self._schemes[name].rows_share_parameters
            else -(-len(weight) // tried_row_count(weight.shape[1]))
            for name, weight in self._weights.items()
        }
        self._sampled_rows = {
            name: weight[:: self._row_steps[name]].contiguous()
            for name, weight in self._weights.items()
        }
        squares = torch.cat(list(self._weights.values())).square().mean(0)
        self._columns = _floor_squares(self._sum_tied(squares)).log2() / 2
        self._powers_of_two = needs_powers_of_two(block, shared, layers)

    def search(self) -> _ScaleCandidate:
        """Return the best candidate; the unscaled model if none is better."""
        unscaled = _ScaleCandidate("none", 0.0, torch.ones_like(self._importance), 1.0)
        self._error.calibrate(self._rounded(unscaled.scale, self._weights, search=False))
        finalists = [unscaled]
        for candidate in map(self._best_candidate, self._families()):
            if not any(torch.equal(candidate.scale, other.scale) for other in finalists):
                finalists.append(candidate)
        search = self._rounding.scales == "search"
        errors = [
            self._error(self._rounded(candidate.scale, self._weights, search=search))
            for candidate in finalists
        ]
        best_index = min(range(len(errors)), key=errors.__getitem__)
        return replace(
            finalists[best_index], error=errors[best_index] / errors[0] if errors[0] else 1.0
        )

    def _best_candidate(self, family: tuple[str, FactorCurve]) -> _ScaleCandidate:
        """Return the candidate of a family with the smallest estimated error."""
        name, curve = family
        exponents = [i / GRID_POINTS for i in range(GRID_POINTS + 1)]
        grid = [_ScaleCandidate(name, p, self._storable_scale(curve(p)), 1.0) for p in exponents]

        def estimated(candidate: _ScaleCandidate) -> float:
            rounded_weights = self._rounded(candidate.scale, self._sampled_rows, search=False)
            return self._error.estimate(rounded_weights, self._row_steps)

        return min(grid, key=estimated)

    def _families(self) -> list[tuple[str, FactorCurve]]:
        """Return the families by name; each maps an exponent to binary logarithms of the factors ``[in]``."""
        balance = self._balance()
        return [
            ("salience", lambda p: p * self._activation),
            ("balance", lambda p: p * balance),
            ("duo", lambda p: p * self._activation - (1 - p) * self._columns),
        ]

    def _balance(self) -> Tensor:
        scheme = next(iter(self._schemes.values()))
        shares = self._error.shares
        rows = [weight * shares[name] ** 0.5 for name, weight in self._weights.items()]
        start = torch.exp2((self._activation - self._columns) / 2)
        weight = torch.cat(rows)
        group = scheme.group_size(weight.shape[1])
        return balance_factors(weight, self._importance, group, start, self._sum_tied).log2()

    def _storable_scale(self, logs: Tensor) -> Tensor:
        """Return factors ``[in]`` in their stored precision, with a geometric mean of about 1."""
        return storable_factors(self._block, self._shared, logs, self._powers_of_two)

    def _rounded(
        self, scale: Tensor, weights: Mapping[str, Tensor], *, search: bool
    ) -> dict[str, Tensor]:
        """Return the readers (or some of their rows) rounded under ``scale``, relative to the unscaled activation."""
        rounded_weights = {}
        for name, weight in weights.items():
            scheme = self._schemes[name].with_scale(ScaleType.F16)
            packer = get_packer(scheme)
            scaled = weight * scale
            parameters = packer.fit(
                scaled, scheme, floor_importance(self._importance / scale.square()), search=search
            )
            codes = packer.encode(scaled, parameters, scheme)
            rounded_weights[name] = packer.decode(codes, parameters, scheme) / scale
        return rounded_weights

    def _sum_tied(self, values: Tensor) -> Tensor:
        """Sum values ``[in]`` over the columns that share a factor, for each column."""
        return join_tied_columns(self._block, self._shared, values, lambda heads: heads.sum(1))


def tried_row_count(columns: int) -> int:
    """Return how many rows of a matrix are sampled; fewer are needed if rows are longer."""
    return max(MIN_TRIED_ROWS, TRIED_WEIGHTS // columns)


def _floor_squares(squares: Tensor) -> Tensor:
    """Return mean squares clamped to at least `IMPORTANCE_FLOOR` of their median, which is robust to outliers."""
    floor = IMPORTANCE_FLOOR * squares.median()
    return squares.clamp(min=floor) if bool(floor > 0) else floor_importance(squares)


def balance_factors(
    weight: Tensor,
    importance: Tensor,
    group: int,
    start: Tensor,
    tie: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """Return column factors ``[in]`` that minimize a model of the expected rounding error.

    Rounding ``W diag(s)`` with steps ``d`` set by the largest weight of each group gives an error of ``d^2 / 12`` per
    weight. Relative to the unscaled activation and weighted by ``h_j = E x_j^2``, this sums, over groups ``G`` and
    rows ``i``, to

        N_G * M_G,    N_G = sum_j h_j / s_j^2,    M_G = sum_i max_j (w_ij s_j)^2        (j in G)

    which is convex in ``log s`` (both are posynomials: a geometric program). At the minimum the share of a column in
    the noise ``N`` equals its share in setting the steps ``M``: a column that adds noise but is never the largest
    should be scaled up, one that is the largest but matters little should be scaled down. The iteration multiplies each
    factor by a power of the quotient of the two.

    A searched scale clips the largest weights, so that all large weights influence it: the maximum is softened to the
    norm of order 8. (Orders 4 and 16 gave larger errors in measurements at 4 bits.)

    The result does not depend on how scales were previously distributed between producer and readers.

    Args:
        weight: ``[out, in]``, each row multiplied by the square root of the weight of its squared error.
        importance: ``[in]``, positive: weight of the squared error of each column.
        group: number of columns that share a scale; divides ``in``.
        start: ``[in]``, positive: initial factors.
        tie: sums a value per column over the columns that must get the same factor, and assigns the sum to each of
            them; by default each column has its own factor.
    """
    squares = weight.square().view(len(weight), -1, group)
    scale = start.square().view(1, -1, group)
    importance = importance.view(1, -1, group)
    for step in range(BALANCE_ITERATIONS):
        noise = importance / scale
        total_noise = noise.sum(-1, keepdim=True)
        ranges = _range_shares(squares * scale)
        total_ranges = ranges.sum(-1, keepdim=True)
        min_range = MIN_SHARE * total_ranges * total_noise
        quotient = tie((noise * total_ranges + min_range).flatten()) / tie(
            (ranges * total_noise + min_range).flatten()
        )
        rate = 0.5 if step < BALANCE_ITERATIONS // 2 else 0.25
        scale = scale * quotient.pow(rate).clamp(1 / 4, 4).view_as(scale)
    return scale.sqrt().flatten()


def _range_shares(squares: Tensor) -> Tensor:
    """Split the soft maximum of ``squares`` ``[out, groups, group]`` among its columns; sum over rows."""
    largest = squares.amax(-1, keepdim=True).clamp_(min=torch.finfo(squares.dtype).tiny)
    # Terms of the fourth order in squares, the eighth in weights
    powers = squares.div_(largest).square_().square_()
    sums = powers.sum(-1, keepdim=True)
    return powers.mul_(largest * sums.pow(0.25) / sums).sum(0, keepdim=True)


class OutputErrorEstimator:
    """Squared error at the output of a sub-block that changed weights of the readers of its activation cause.

    If the sub-block is the only linear layer that reads an activation, the error of ``E = W' - W`` is ``tr(E H E^T)``
    with ``H`` the mean of ``x x^T``, and no forward pass is needed. Otherwise (attention, a gated MLP) the sub-block is
    run again on captured inputs, and its output is compared with that of the original weights. The block is not
    changed.

    Such a run costs as much as rounding the weights thirty times, so there is also an estimate: errors of different
    readers are independent, so their effects on the output add up, and to first order each is a fixed share of the
    reader's own ``tr(E H E^T)``. This share is measured once, by changing one reader alone.

    Attributes:
        weights: copies of the readers' weights, by name.
        shares: see `calibrate`.

    Args:
        block: the block, with the original weights.
        shared: the activation.
        statistics: its Hessian is used if it was observed.
        rows: number of calibration rows to run a sub-block on.
        moments: means of ``x x^T`` over these rows, by `SharedInput.key`; those of linears inside this sub-block are
            added for later estimators whose input no other pair changes.
    """

    def __init__(
        self,
        block: DecoderBlock,
        shared: SharedInput,
        statistics: Statistics,
        rows: int,
        moments: dict[str, Tensor],
    ) -> None:
        self._block = block
        self._module = block.module.get_submodule(shared.compared_module)
        is_expert_linear = shared.expert >= 0 and len(shared.linears) == 1
        self._is_single_linear = is_expert_linear or shared.linears == (shared.compared_module,)
        self.weights = {name: block.weight(name).clone() for name in shared.linears}
        self.shares = dict.fromkeys(shared.linears, 1.0)
        self._calls: Sequence[Call] = ()
        self._outputs: list[Tensor] = []
        hessian = moments.pop(shared.key, None) if self._is_single_linear else None
        if self._is_single_linear and statistics.hessian is not None:
            hessian = statistics.hessian
        if hessian is None:
            calls = block.capture_calls(shared.compared_module, rows)
            recorded_inputs = {shared.key, *_single_linear_inputs(block, shared.compared_module)}
            with _InputMoments(
                block.module, recorded_inputs if statistics.hessian is None else set()
            ) as recorder:
                outputs = [self._run(call) for call in calls]
            moments.update(recorder.means())
            hessian = statistics.hessian
            if hessian is None:
                hessian = moments.pop(shared.key)
            if not self._is_single_linear:
                self._calls, self._outputs = calls, outputs
        self._quadratic_form = QuadraticForm(hessian)

    def calibrate(self, weights: Weights) -> None:
        """Measure what share of each reader's own error reaches the output, using the changed ``weights``."""
        if self._is_single_linear:
            return
        for name, weight in weights.items():
            input_error = self._input_error(name, weight)
            self.shares[name] = (
                self._forward_error({name: weight}, 1) / input_error if input_error else 0.0
            )

    def estimate(self, weights: Weights, steps: Mapping[str, int] | None = None) -> float:
        """Return the estimated squared error at the output: the sum over readers of share times own error.

        Args:
            weights: matrices, or every n-th of their rows.
            steps: n for each name; default 1.
        """
        steps = steps or {}
        return sum(
            self.shares[name] * self._input_error(name, weight, steps.get(name, 1))
            for name, weight in weights.items()
        )

    def __call__(self, weights: Weights) -> float:
        """Return the squared error at the output, up to a factor that is the same for all weights."""
        return (
            self.estimate(weights)
            if self._is_single_linear
            else self._forward_error(weights, len(self._calls))
        )

    def _input_error(self, name: str, weight: Tensor, step: int = 1) -> float:
        return step * self._quadratic_form(weight - self.weights[name][::step])

    def _forward_error(self, weights: Weights, calls: int) -> float:
        try:
            for name, weight in weights.items():
                self._block.set_weight(name, weight)
            pairs = list(zip(self._calls, self._outputs, strict=True))[:calls]
            return sum(total((self._run(call) - output).square_()) for call, output in pairs)
        finally:
            for name in weights:
                self._block.set_weight(name, self.weights[name])

    def _run(self, call: Call) -> Tensor:
        with tiled_products():
            output = self._module(*call.args, **call.kwargs)
        output_states: Tensor = output[0] if isinstance(output, tuple) else output
        return output_states


def _single_linear_inputs(block: DecoderBlock, module: str) -> Iterator[str]:
    """Yield the keys of inputs in a module that are read by a single linear, whose errors need no forward pass."""
    for shared in block.inputs:
        is_in_module = shared.key.startswith(f"{module}.")
        if (
            is_in_module
            and shared.scale_fold is not None
            and shared.linears == (shared.compared_module,)
        ):
            yield shared.key


class _InputMoments:
    """Context manager that accumulates means of ``x x^T`` over the inputs ``x`` of linear layers of a block."""

    def __init__(self, block: nn.Module, linears: Iterable[str]) -> None:
        self._block = block
        self._sums = {name: Accumulator({Statistic.HESSIAN}) for name in linears}

    def __enter__(self) -> Self:
        self._handles = [
            self._block.get_submodule(name).register_forward_pre_hook(
                partial(self._accumulate, accumulator)
            )
            for name, accumulator in self._sums.items()
        ]
        return self

    def _accumulate(self, accumulator: Accumulator, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        accumulator.add(args[0].reshape(-1, args[0].shape[-1]))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def means(self) -> dict[str, Tensor]:
        """Return the means of the linears that were run, by name; the sums are consumed."""
        means = {name: accumulator.result().hessian for name, accumulator in self._sums.items()}
        return {name: mean for name, mean in means.items() if mean is not None}


class QuadraticForm:
    """The sum ``sum_i e_i H e_i^T`` for a symmetric ``hessian`` ``[in, in]``.

    Products below the diagonal equal those above it, so only half of ``H`` is kept, as panels of columns.
    """

    def __init__(self, hessian: Tensor) -> None:
        self._panels: list[Tensor] = []
        for start in range(0, len(hessian), HESSIAN_PANEL):
            panel = hessian[start:, start : start + HESSIAN_PANEL].clone()
            panel[: panel.shape[1]] *= 0.5  # diagonal blocks are stored in full
            self._panels.append(panel)

    def __call__(self, error: Tensor) -> float:
        """Return the sum over the rows of ``error`` ``[out, in]``."""
        form_sum, start = 0.0, 0
        for panel in self._panels:
            error_panel = error[:, start:].contiguous()
            width = panel.shape[1]
            form_sum += total(matmul(error_panel, panel).mul_(error_panel[:, :width]))
            start += width
        return 2 * form_sum
