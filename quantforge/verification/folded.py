"""Factors that were folded into a quantized weight: ``W_q ~ diag(r) W diag(c)`` with known or fitted ``r`` and ``c``.

Transforms such as AWQ and SmoothQuant move a factor per channel between a producer and its readers; the model computes
what it did, and every weight has changed. Nothing in the files says which factors these were.

* Where a norm absorbed them, ``c`` is the quotient of the two norms' gains, exactly.
* Where a linear absorbed them (v for o, up for down), both sides are fitted by least squares: the rows of the producer
  ``r_i = <w_i, q_i> / <w_i, w_i>`` and the columns of the reader likewise. They are taken for a fold when the two vary
  against each other, ``log r ~ -log c``; a channel in which they do not cancel is a finding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantforge.architectures import Absorbs, Architecture, SharedInput
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.match import Matched, declared
from quantforge.model.fold import expand_heads
from quantforge.verification.limits import correlation
from quantforge.verification.tuned_gains import within

VARIES = 0.02  # standard deviation of log factors from which they are taken for more than noise
ALONE = 4 * VARIES  # the same where only one side can be fitted
AGAINST = -0.5  # correlation of the two sides of a fold
CANCELS = 0.1  # log of a product of two factors that is more than a scale's own rounding,
SPREADS = 8.0  # than so many robust standard deviations of all channels,
NOISE = 5.0  # and than so many times the noise over the signal of both sides
SAME = 2.0**-7  # norms that differ by no more were not folded
EXACT = 1e-6  # noise over signal below which neither side is better than the other
FITS = 0.5  # cosine of a row or column below which its fitted factor means nothing

Weight = Callable[[str], Tensor | None]  # canonical name to float32 values


@dataclass(slots=True)
class Factors:
    """Factors of the linears of one block by canonical module name.

    Attributes:
        rows, columns: ``[out]`` and ``[in]``, where they are not all one.
        norms: what the gain and bias of a norm are multiplied with; exact, as are the columns of its readers.
        fitted: linears whose factors are fitted.
        problems: module, and what is wrong.
        slack: part of themselves by which gains and scales were changed at most after the fold; 0: by nothing.
    """

    rows: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    fitted: set[str] = field(default_factory=set)
    problems: list[tuple[str, str]] = field(default_factory=list)
    slack: float = 0.0

    def applied(self, module: str, weight: Tensor) -> Tensor:
        """Return the source's weight times its factors, as it was before it was rounded."""
        if module in self.columns:
            weight = weight * self.columns[module]
        return weight * self.rows[module][:, None] if module in self.rows else weight

    def removed(self, module: str, weight: Tensor) -> Tensor:
        """Undo `applied`."""
        if module in self.columns:
            weight = weight / self.columns[module]
        return weight / self.rows[module][:, None] if module in self.rows else weight

    def add(self, other: Factors) -> None:
        """Take in the factors of another block."""
        self.rows |= other.rows
        self.columns |= other.columns
        self.norms |= other.norms
        self.fitted |= other.fitted
        self.problems += other.problems

    def touches(self, module: str) -> bool:
        """Return whether a module has any factor other than one."""
        return module in self.rows or module in self.columns


def factors_of(
    matched: Matched, index: int, source: Weight, found: Weight, slack: float = 0.0
) -> Factors:
    """Find the factors of one block.

    Args:
        matched: says which linears read what, and what absorbs a factor.
        index: of the block.
        source: weights of the source by canonical name.
        found: weights of the artifact, decoded.
        slack: as of `Factors`; the columns of the readers of a norm then tell the factor.
    """
    architecture, dimensions = declared(matched)
    block, inputs = matched.block_name(index), matched.layers[index].inputs
    factors = Factors(slack=slack)
    for shared in inputs:
        if shared.absorber is not None and shared.absorber.kind is not Absorbs.ROWS:
            _by_norm(factors, shared, block, source, found)
    for shared in inputs:
        if shared.absorber is not None and shared.absorber.kind is Absorbs.ROWS:
            _by_rows(factors, architecture, dimensions, shared, block, source, found)
    return factors


def _by_norm(
    factors: Factors, shared: SharedInput, block: str, source: Weight, found: Weight
) -> None:
    assert shared.absorber is not None
    name = f"{block}.{shared.absorber.module}"
    before, after = source(f"{name}.weight"), found(f"{name}.weight")
    if before is None or after is None or before.shape != after.shape:
        return
    offset = 1.0 if shared.absorber.kind is Absorbs.NORM_PLUS_ONE else 0.0
    before, after = before + offset, after + offset
    columns = torch.where((before != 0) & (after != 0), before / after, 1.0)
    if bool(torch.isclose(before, after, rtol=SAME, atol=1e-30).all()):
        return
    factors.norms[name] = 1 / columns
    if bool((columns <= 0).any()):
        factors.problems.append((name, "the gain has changed its sign"))
    linears = [f"{block}.{linear}" for linear in shared.readers]
    pairs = [(source(f"{linear}.weight"), found(f"{linear}.weight")) for linear in linears]
    known = [(a, b) for a, b in pairs if a is not None and b is not None and a.shape == b.shape]
    factors.columns.update(dict.fromkeys(linears, columns))
    if not known:
        return
    own = _fitted(torch.cat([a for a, _ in known]), torch.cat([b for _, b in known]), dim=0)
    silent = (before == 0) & (after == 0) & (own.cosine >= FITS)  # any factor cancels
    columns = own.factor.where(silent, columns)
    factors.columns.update(dict.fromkeys(linears, columns))
    product = (own.factor / columns.abs().clamp(min=1e-6)).log()
    if factors.slack:
        product -= product.clamp(math.log(1 - factors.slack), math.log(1 + factors.slack))
        near = within(own.factor, columns, factors.slack)
        factors.columns.update(dict.fromkeys(linears, near.where(own.cosine >= FITS, columns)))
    channel = _not_cancelling(product, own.noise, own.cosine < FITS)
    if channel is not None:
        text = (f"channel {channel}: gain divided by {float(columns[channel]):.3g}, the columns of "
                f"its readers times {float(own.factor[channel]):.3g}")  # fmt: skip
        factors.problems.append((name, text))


def _by_rows(
    factors: Factors,
    architecture: Architecture,
    dimensions: Dimensions,
    shared: SharedInput,
    block: str,
    source: Weight,
    found: Weight,
) -> None:
    """Fit both sides of a fold from a linear into its reader, and note the factor."""
    assert shared.absorber is not None
    producer, reader = f"{block}.{shared.absorber.module}", f"{block}.{shared.key}"
    made, made_found = source(f"{producer}.weight"), found(f"{producer}.weight")
    if made is None:
        return
    rows = architecture.rows(dimensions, shared.absorber.module, shared.absorber.rows)
    own = other = None
    if made_found is not None and made_found.shape == made.shape:
        own = _fitted(factors.applied(producer, made)[rows], made_found[rows], dim=1)
    read, read_found = source(f"{reader}.weight"), found(f"{reader}.weight")
    if read is not None and read_found is not None and read_found.shape == read.shape:
        other = _fitted(read, read_found, dim=0)
        if shared.heads:
            other = other.by_value_head(dimensions)
    scale = _consensus(own, other)
    if scale is None:
        return
    whole = torch.ones(len(made))
    whole[rows] = 1 / scale
    factors.rows[producer] = whole
    factors.fitted |= {producer, reader}
    factors.columns[reader] = expand_heads(dimensions, scale) if shared.heads else scale
    if own is None or other is None:
        return
    poor = (own.cosine < FITS) | (other.cosine < FITS)
    channel = _not_cancelling(own.log + other.log, own.noise + other.noise, poor)
    if channel is not None:
        text = (f"channel {channel}: rows times {float(own.factor[channel]):.3g}, columns of "
                f"{shared.key} times {float(other.factor[channel]):.3g}, which do not cancel")  # fmt: skip
        factors.problems.append((producer, text))


def _not_cancelling(product: Tensor, noise: Tensor, poor: Tensor) -> int | None:
    """Return the channel whose log product is too far from the median, or None; ``poor`` ones do not count."""
    distance = (product - product.median()).abs()
    limit = (NOISE * noise).clamp(min=max(CANCELS, SPREADS * 1.4826 * float(distance.median())))
    beyond = (distance - limit).masked_fill(poor, -1)
    return int(beyond.argmax()) if float(beyond.max()) > 0 else None


def _consensus(own: _Fit | None, other: _Fit | None) -> Tensor | None:
    """Return the factor of each channel, as both sides tell it, or None where nothing was folded.

    The side with less noise has the say: a column that was made small beside the others of its row has lost its
    factor, and the row that was made large has it exactly. Where one side cannot be read or is another tensor
    altogether, the other one still tells.
    """
    usable = [fit for fit in (own, other) if fit is not None and float(fit.cosine.median()) > FITS]
    if own is not None and other is not None and len(usable) == 2:
        if min(float(own.log.std()), float(other.log.std())) < VARIES:
            return None
        first, second = 1 / own.noise.clamp(min=EXACT), 1 / other.noise.clamp(min=EXACT)
        both = torch.stack((own.log, other.log))
        weights = torch.minimum(first, second)
        agreement = correlation(both, weights.clamp(max=float(weights.median())))
        mean = (second * other.log - first * own.log) / (first + second)
        return mean.exp() if agreement < AGAINST else None
    if not usable or float(usable[0].log.std()) < ALONE:
        return None
    return (-usable[0].log if usable[0] is own else usable[0].log).exp()


@dataclass(frozen=True, slots=True)
class _Fit:
    """Factors of channels by least squares, and the cosines with which they fit."""

    factor: Tensor
    cosine: Tensor

    @property
    def log(self) -> Tensor:
        return self.factor.log()

    @property
    def noise(self) -> Tensor:
        """Return squared error over squared signal of each channel, once its factor is taken out."""
        return self.cosine.square().clamp(min=1e-6).reciprocal() - 1

    def by_value_head(self, dimensions: Dimensions) -> _Fit:
        """Return the fit with the mean over the query heads that read one value head."""
        groups = dimensions.heads // dimensions.kv_heads
        shape = (dimensions.kv_heads, groups, dimensions.head)
        return _Fit(*(v.view(shape).mean(1).flatten() for v in (self.factor, self.cosine)))


def _fitted(source: Tensor, found: Tensor, dim: int) -> _Fit:
    """Return the positive least-squares factor of each row (``dim`` 1) or column (0), and the cosine of the fit."""
    product = (source * found).sum(dim)
    energy, other = source.square().sum(dim), found.square().sum(dim)
    factor = torch.where(energy > 0, product / energy.clamp(min=1e-30), 1.0)
    cosine = torch.where(energy > 0, product / (energy * other).sqrt().clamp(min=1e-30), 1.0)
    return _Fit(factor.clamp(min=1e-6), cosine)
