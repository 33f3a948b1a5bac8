"""AWQ: scale the columns that matter before rounding, and let what produces them take the inverse.

For ``y = W x`` and any positive ``s``, ``y = (W diag(s)) (x / s)``: the model computes what it did, but rounding now
errs by ``Q(W s) / s - W``, so that a column with a larger ``s`` is rounded more finely and its neighbours in the group
more coarsely (Lin et al., arXiv 2306.00978, section 3.2). With ``a_j`` the root mean square of column ``j`` of the
activation and ``w_j`` that of the readers' columns, the factors searched are, for exponents ``p`` from 0 to 1,

    salience  s = a^p               p = 0 is the model as it is, and always a candidate
    duo       s = a^p / w^(1 - p)
    balance   s = b^p               b minimises a model of the rounding error, see `quantforge.quantizers.balance`

``duo`` and ``b`` do not depend on how outliers are shared out between producer and readers: a channel scaled by ``c``
whose readers are scaled by ``1 / c`` gets a factor ``c`` times as large. The root mean square stands where the paper
has the mean magnitude, because ``E x_j^2`` is what the rounding error of a column is multiplied by. On a small llama,
``b`` took another 8 % off the divergence, and the root mean square a few per cent off the errors.

Every point is judged by an estimate of the error at the output of the sub-block that reads the activation, with scales
that cover the range, over some rows of each matrix, spread evenly (`tried`); the best of each family by that error
itself, over all rows and with scales fitted as the rounder will (`quantforge.quantizers.output_error`).

What is stored unquantized takes its factor exactly (`quantforge.quantizers.pairs`). Rows of a quantized producer have
scales of their own, so that dividing them changes nothing about how they round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantforge.architectures import SharedInput
from quantforge.grids import ScaleType
from quantforge.model.block import BlockPart
from quantforge.model.statistics import Statistics
from quantforge.packers import packer_of
from quantforge.quantizers.balance import balanced
from quantforge.quantizers.methods import Transformed
from quantforge.quantizers.output_error import OutputError
from quantforge.quantizers.pairs import folded, powers_of_two, rescaled, storable, tied
from quantforge.quantizers.rtn import floored
from quantforge.recipe import Rounding
from quantforge.scheme import LayerScheme, Scheme

Curve = Callable[[float], Tensor]

POINTS = 20  # of the grid of exponents
WEIGHTS = 1 << 19  # of a matrix are tried under every point of the grid
ROWS = 128  # or so many rows, if they are more
FLOOR = 0.01  # of the median: a column that calibration hardly used keeps some precision


@torch.no_grad()
def apply(
    part: BlockPart,
    statistics: Mapping[str, Statistics],
    schemes: Mapping[str, Scheme],
    rounding: Rounding,
    layers: Mapping[str, LayerScheme] | None = None,
) -> Transformed:
    """Scale every declared pair of a block, in computing order; the block is changed in place.

    Args:
        part: the block.
        statistics: by `SharedInput.key`; the mean squares are needed of every input that is read quantized.
        schemes: of the linears that will be quantized.
        rounding: ``awq``, and ``scales`` as the rounder will choose them.
        layers: not looked at: inputs are taken as they are.

    Returns:
        The statistics of the changed block, by key; a ``pair-skipped`` event for every pair that could not be stored
        exactly; and per pair its ``family``, ``exponent`` and ``error`` (as a fraction of that without scaling).
    """
    del layers
    changed, events, figures = dict(statistics), [], {}
    moments: dict[str, Tensor] = {}
    for shared in part.inputs:
        if shared.absorber is None or not any(name in schemes for name in shared.linears):
            continue
        found = _Pair(part, shared, schemes, statistics[shared.key], rounding, moments).search()
        if found.family != "none":
            skipped = folded(part, shared, schemes, found.scale)
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
        part: BlockPart,
        shared: SharedInput,
        schemes: Mapping[str, Scheme],
        statistics: Statistics,
        rounding: Rounding,
        moments: dict[str, Tensor],
    ) -> None:
        if statistics.importance is None:
            raise ValueError(f"{part.name}.{shared.key}: awq needs the mean squares of its input")
        self._part, self._shared, self._rounding = part, shared, rounding
        self._schemes = {name: schemes[name] for name in shared.linears if name in schemes}
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
        self._powers_of_two = powers_of_two(part, shared, schemes)

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
            scheme = self._schemes[name].stored_as(ScaleType.F16)
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
