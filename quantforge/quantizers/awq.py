"""AWQ: scale the columns that matter before rounding, and let what produces them take the inverse.

For ``y = W x`` and any positive ``s``, ``y = (W diag(s)) (x / s)``: the model computes what it did, but rounding now
errs by ``Q(W s) / s - W``, so that a column with a larger ``s`` is rounded more finely and its neighbours in the group
more coarsely (Lin et al., arXiv 2306.00978, section 3.2). With ``a_j`` the root mean square of column ``j`` of the
activation and ``w_j`` that of the readers' columns, the factors searched are, for exponents ``p`` from 0 to 1,

    salience  s = a^p               p = 0 is the model as it is, and always a candidate
    duo       s = a^p / w^(1 - p)
    balance   s = b^p               b minimises a model of the rounding error, see `balanced`

``duo`` and ``b`` do not depend on how outliers are shared out between producer and readers: a channel scaled by ``c``
whose readers are scaled by ``1 / c`` gets a factor ``c`` times as large. The root mean square stands where the paper
has the mean magnitude, because ``E x_j^2`` is what the rounding error of a column is multiplied by. On a small llama,
``b`` took another 8 % off the divergence, and the root mean square a few per cent off the errors.

Every point is judged by an estimate of the error at the output of the sub-block that reads the activation, with scales
that cover the range, over some rows of each matrix, spread evenly (`tried`); the best of each family by that error
itself, over all rows and with scales fitted as the rounder will (`OutputError`).

What is stored unquantized takes its factor exactly (`quantforge.quantizers.scale_pairs`). Rows of a quantized producer
have scales of their own, so that dividing them changes nothing about how they round.
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
from quantforge.model.block_inputs import Call
from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.products import cutting, matmul
from quantforge.numerics.values import total
from quantforge.packers import packer_of
from quantforge.quantizers import Transformed
from quantforge.quantizers.rtn import floored
from quantforge.quantizers.scale_pairs import folded, powers_of_two, rescaled, storable, tied
from quantforge.recipe import Rounding
from quantforge.scheme import LayerScheme

Curve = Callable[[float], Tensor]
Weights = Mapping[str, Tensor]

POINTS = 20  # of the grid of exponents
WEIGHTS = 1 << 19  # of a matrix are tried under every point of the grid
ROWS = 128  # or so many rows, if they are more
FLOOR = 0.01  # of the median: a column that calibration hardly used keeps some precision
ROUNDS = 24  # of `balanced`
LEAST_SHARE = 1e-6  # of a group: shares below it count as that
PANEL = 256  # columns of a Hessian


@torch.no_grad()
def apply(
    part: DecoderBlock,
    statistics: Mapping[str, Statistics],
    layers: Mapping[str, LayerScheme],
    rounding: Rounding,
) -> Transformed:
    """Scale every declared pair of a block, in computing order; the block is changed in place.

    Args:
        part: the block.
        statistics: by `SharedInput.key`; the mean squares are needed of every input that is read quantized.
        layers: the linears that will be quantized; their inputs are taken as they are.
        rounding: ``awq``, and ``scales`` as the rounder will choose them.

    Returns:
        The statistics of the changed block, by key; a ``pair-skipped`` event for every pair that could not be stored
        exactly; and per pair its ``family``, ``exponent`` and ``error`` (as a fraction of that without scaling).
    """
    changed, events, figures = dict(statistics), [], {}
    moments: dict[str, Tensor] = {}
    for shared in part.inputs:
        if shared.scale_fold is None or not any(name in layers for name in shared.linears):
            continue
        found = _Pair(part, shared, layers, statistics[shared.key], rounding, moments).search()
        if found.family != "none":
            skipped = folded(part, shared, layers, found.scale)
            if skipped:
                events.append(skipped)
                continue
            changed[shared.key] = rescaled(statistics[shared.key], found.scale)
        figures[shared.key] = {
            "family": found.family,
            "exponent": found.exponent,
            "error": found.error,
        }
    return Transformed(changed, tuple(events), figures)


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    family: str
    exponent: float
    scale: Tensor
    error: float


class _Pair:
    """An activation with its producer and readers, ready to try factors on."""

    def __init__(
        self,
        part: DecoderBlock,
        shared: SharedInput,
        layers: Mapping[str, LayerScheme],
        statistics: Statistics,
        rounding: Rounding,
        moments: dict[str, Tensor],
    ) -> None:
        if statistics.importance is None:
            raise ValueError(f"{part.name}.{shared.key}: awq needs the mean squares of its input")
        self._part, self._shared, self._rounding = part, shared, rounding
        self._schemes = {name: layers[name].weight for name in shared.linears if name in layers}
        self._importance = _raised(statistics.importance)
        self._activation = _raised(self._tie(statistics.importance)).log2() / 2
        self._error = OutputError(part, shared, statistics, rounding.awq.rows, moments)
        self._weights = {name: self._error.weights[name] for name in self._schemes}
        self._steps = {
            name: 1 if self._schemes[name].whole else -(-len(weight) // tried(weight.shape[1]))
            for name, weight in self._weights.items()
        }
        self._some = {
            name: weight[:: self._steps[name]].contiguous()
            for name, weight in self._weights.items()
        }
        squares = torch.cat(list(self._weights.values())).square().mean(0)
        self._columns = _raised(self._tie(squares)).log2() / 2
        self._powers_of_two = powers_of_two(part, shared, layers)

    def search(self) -> _Found:
        """Return the best point of the grid; the model as it is where none is better."""
        plain = _Found("none", 0.0, torch.ones_like(self._importance), 1.0)
        self._error.calibrate(self._rounded(plain.scale, self._weights, search=False))
        finalists = [plain]
        for found in map(self._best_of, self._families()):
            if not any(torch.equal(found.scale, other.scale) for other in finalists):
                finalists.append(found)
        search = self._rounding.scales == "search"
        errors = [
            self._error(self._rounded(found.scale, self._weights, search=search))
            for found in finalists
        ]
        least = min(range(len(errors)), key=errors.__getitem__)
        return replace(finalists[least], error=errors[least] / errors[0] if errors[0] else 1.0)

    def _best_of(self, family: tuple[str, Curve]) -> _Found:
        """Return the point of a family with the least estimated error."""
        name, curve = family
        exponents = [i / POINTS for i in range(POINTS + 1)]
        grid = [_Found(name, p, self._stored(curve(p)), 1.0) for p in exponents]

        def estimated(found: _Found) -> float:
            rounded = self._rounded(found.scale, self._some, search=False)
            return self._error.estimate(rounded, self._steps)

        return min(grid, key=estimated)

    def _families(self) -> list[tuple[str, Curve]]:
        """List the families by name; each maps an exponent to binary logarithms of the factors ``[in]``."""
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
        return balanced(weight, self._importance, group, start, self._tie).log2()

    def _stored(self, logs: Tensor) -> Tensor:
        """Return factors ``[in]`` as they will be stored, of a geometric mean of about 1."""
        return storable(self._part, self._shared, logs, self._powers_of_two)

    def _rounded(
        self, scale: Tensor, weights: Mapping[str, Tensor], *, search: bool
    ) -> dict[str, Tensor]:
        """Return readers, or rows of them, as they would round under ``scale``, for the activation as it is."""
        rounded = {}
        for name, weight in weights.items():
            scheme = self._schemes[name].with_scale(ScaleType.F16)
            packer = packer_of(scheme)
            scaled = weight * scale
            parameters = packer.fit(
                scaled, scheme, floored(self._importance / scale.square()), search=search
            )
            codes = packer.encode(scaled, parameters, scheme)
            rounded[name] = packer.decode(codes, parameters, scheme) / scale
        return rounded

    def _tie(self, values: Tensor) -> Tensor:
        """Sum values ``[in]`` over the columns that share a factor, for each of them."""
        return tied(self._part, self._shared, values, lambda heads: heads.sum(1))


def tried(columns: int) -> int:
    """Return how many rows of a matrix are tried: its errors are alike over rows, the more so the longer these are."""
    return max(ROWS, WEIGHTS // columns)


def _raised(squares: Tensor) -> Tensor:
    """Return mean squares, at least `FLOOR` of their median: outliers do not move it as they move the mean."""
    least = FLOOR * squares.median()
    return squares.clamp(min=least) if bool(least > 0) else floored(squares)


def balanced(
    weight: Tensor,
    importance: Tensor,
    group: int,
    start: Tensor,
    tie: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """Return column factors ``[in]`` that minimise the expected rounding error, under a model of it.

    Rounding ``W diag(s)`` to steps ``d`` that the largest weight of each group sets gives an error of ``d^2 / 12`` in
    every weight; brought back to the activation and weighted by ``h_j = E x_j^2`` this adds up, over groups ``G`` and
    rows ``i``, to

        N_G * M_G,    N_G = sum_j h_j / s_j^2,    M_G = sum_i max_j (w_ij s_j)^2        (j in G)

    which is convex in ``log s`` (both are posynomials: a geometric program). At its minimum the share of a column in
    the noise ``N`` is its share in setting the steps ``M``: a column that makes noise without ever being the largest
    should be scaled up, one that is the largest but hardly matters scaled down. The iteration multiplies each factor by
    a power of the quotient of the two.

    A searched scale clips the largest weights, so that all large ones have a say: the maximum is softened to the norm
    of order 8. (Orders 4 and 16 left larger errors in measurements at 4 bits.)

    The result does not depend on how scales were shared out between producer and readers before.

    Args:
        weight: ``[out, in]``, each row times the square root of what its squared error counts.
        importance: ``[in]``, positive: what the squared error of each column counts.
        group: columns that share a scale; divides ``in``.
        start: ``[in]``, positive: where the iteration begins.
        tie: sums a value per column over the columns that must get the same factor, and spreads the sum to all of
            them; by default each column has its own.
    """
    squares = weight.square().view(len(weight), -1, group)
    scale = start.square().view(1, -1, group)
    importance = importance.view(1, -1, group)
    for step in range(ROUNDS):
        noise = importance / scale
        total = noise.sum(-1, keepdim=True)
        ranges = _share_of_ranges(squares * scale)
        whole = ranges.sum(-1, keepdim=True)
        least = LEAST_SHARE * whole * total
        quotient = tie((noise * whole + least).flatten()) / tie((ranges * total + least).flatten())
        rate = 0.5 if step < ROUNDS // 2 else 0.25
        scale = scale * quotient.pow(rate).clamp(1 / 4, 4).view_as(scale)
    return scale.sqrt().flatten()


def _share_of_ranges(squares: Tensor) -> Tensor:
    """Split the soft maximum of ``squares`` ``[out, groups, group]`` among its columns; sum over rows."""
    largest = squares.amax(-1, keepdim=True).clamp_(min=torch.finfo(squares.dtype).tiny)
    powers = (
        squares.div_(largest).square_().square_()
    )  # of the fourth order in squares, the eighth in weights
    sums = powers.sum(-1, keepdim=True)
    return powers.mul_(largest * sums.pow(0.25) / sums).sum(0, keepdim=True)


class OutputError:
    """Squared error that changed weights of the readers of one activation cause in the output of their sub-block.

    Where the sub-block is the one linear layer that reads an activation, the error of ``E = W' - W`` is ``tr(E H E^T)``
    with ``H`` the mean of ``x x^T``, and no forward is needed. Everywhere else (attention, a gated MLP) the sub-block
    is run again on inputs that were captured, and its output compared with that of the unchanged weights. The block is
    left as it is.

    A run costs as much as rounding the weights thirty times, so that there is an estimate as well: errors of different
    readers are independent, so that what each does to the output adds up, and to first order it is a share of its own
    ``tr(E H E^T)``. That share is measured once, by changing one reader alone.

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
        part: DecoderBlock,
        shared: SharedInput,
        statistics: Statistics,
        rows: int,
        moments: dict[str, Tensor],
    ) -> None:
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


def _linears_in(part: DecoderBlock, module: str) -> Iterator[str]:
    """Yield the inputs whose errors need no forward, of linears that a module runs."""
    for shared in part.inputs:
        inside = shared.key.startswith(f"{module}.")
        if inside and shared.scale_fold is not None and shared.linears == (shared.within,):
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
