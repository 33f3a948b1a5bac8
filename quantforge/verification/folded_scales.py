"""Factors that were moved between tensors before rounding: ``W_q ~ diag(r) W diag(c)``, ``r`` and ``c`` unknown.

AWQ and SmoothQuant move a factor per channel between a producer and the layers that read it. The model computes what it
did, every weight has changed, and nothing in the files says which factors these were. They are found again by least
squares: the factor of a row is ``<w_i, q_i> / <w_i, w_i>``, that of a column likewise.

* Where a norm took the factor, it is the quotient of the two gains; the columns of its readers must agree with it. They
  may differ by as much as tuning changes a gain afterwards.
* Where a linear took it (v for o, up for down), the rows of the one and the columns of the other vary against each
  other, ``log r ~ -log c``. Otherwise nothing was moved.

A search of scales clips outliers in channels that hardly count. Their fitted factors are then too small, by more than
the noise, because clipping errs in one direction. A wrong factor changes all weights of a channel, clipping only those
at the ends of their groups: factors are reported only where they do not cancel among the other weights either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantforge.architectures import FoldKind, SharedInput
from quantforge.architectures.match import ModelLayout, require_declarations
from quantforge.model.scale_folding import expand_heads

MIN_SPREAD = 0.02  # standard deviation of log factors from which they are more than noise
MIN_SPREAD_ALONE = 4 * MIN_SPREAD  # the same where only one side can be read
MAX_CORRELATION = -0.5  # of the two sides of a fold
CLOSE = 0.01  # log of a gain over the factor of its readers: what both lose where they are stored in 16 bits
TUNING = (
    0.25  # largest relative change of a gain that is taken for tuning where no manifest says more
)
UNCHANGED = (
    2.0**-7
)  # relative: what rounding to 16 bits may change, once for a value and once for its factor
RELATED = 0.5  # cosine below which one tensor is not made from the other, and a factor between them means nothing
NOISES = 5.0  # times the noise over the signal of a column: what its fitted factor may be off
CANCELS = 0.1  # log of the product of two factors that is more than rounding,
SPREADS = 8.0  # and than so many robust standard deviations of all channels
MIN_ROWS = 2  # with one, the factor of a column fits anything
MIN_NOISE = 1e-6  # noise over signal below which neither side is better than the other

Weight = Callable[[str], Tensor | None]  # canonical name to float32 values, linears as [out, in]
Pair = tuple[Tensor, Tensor]  # a weight of the source and the artifact's, of one shape
Pairs = Callable[[str], Pair | None]  # canonical module name to its weights


@dataclass(slots=True)
class Folds:
    """Factors of the linears of one block, by canonical module name.

    Attributes:
        rows, columns: ``[out]`` and ``[in]``, where they are not all one.
        norms: what the gain and bias of a norm are multiplied by.
        fitted: modules whose factors are fitted and not known exactly.
        problems: modules whose factors do not cancel, with a description.
    """

    rows: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    fitted: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)

    def applied(self, module: str, weight: Tensor) -> Tensor:
        """Return the source's weight ``[out, in]`` times its factors: what was rounded."""
        if module in self.columns:
            weight = weight * self.columns[module]
        return weight * self.rows[module][:, None] if module in self.rows else weight

    def removed(self, module: str, weight: Tensor) -> Tensor:
        """Return a weight ``[out, in]`` without its factors."""
        if module in self.columns:
            weight = weight / self.columns[module]
        return weight / self.rows[module][:, None] if module in self.rows else weight

    def touches(self, module: str) -> bool:
        """Return whether a module has any factor other than one."""
        return module in self.rows or module in self.columns


def folds_of(
    model_layout: ModelLayout,
    index: int,
    source: Weight,
    stored: Weight,
    clipped: Weight,
    tuning: float = TUNING,
) -> Folds:
    """Find the factors of one block.

    Args:
        model_layout: says which linears read what, and what can take a factor.
        index: of the block.
        source: weights of the source.
        stored: weights of the artifact, decoded.
        clipped: marks the weights that may have been clipped; None where a weight is not quantized.
        tuning: the largest relative change of a gain that is taken for tuning.
    """

    def pair(module: str) -> Pair | None:
        before, after = source(f"{module}.weight"), stored(f"{module}.weight")
        if before is None or after is None or before.shape != after.shape:
            return None
        return before, after

    def unclipped(module: str) -> Pair | None:
        both, mask = pair(module), clipped(f"{module}.weight")
        if both is None or mask is None:
            return both
        return both[0].masked_fill(mask, 0.0), both[1].masked_fill(mask, 0.0)

    folds, block = Folds(), model_layout.block_name(index)
    for norm, shared in absorbing_norms(model_layout, index):
        _find_norm_factors(folds, norm, shared, block, pair, tuning)
    for shared in model_layout.layers[index].inputs:
        if shared.scale_fold is not None and shared.scale_fold.kind is FoldKind.ROWS:
            _find_row_factors(folds, model_layout, shared, block, pair, unclipped)
    return folds


def absorbing_norms(model_layout: ModelLayout, index: int) -> list[tuple[str, SharedInput]]:
    """Return the norms of a block that can take a factor, each with an input that it makes."""
    if not 0 <= index < len(model_layout.layers):
        return []
    return [
        (f"{model_layout.block_name(index)}.{shared.scale_fold.module}", shared)
        for shared in model_layout.layers[index].inputs
        if shared.scale_fold is not None and shared.scale_fold.kind is not FoldKind.ROWS
    ]


def _find_norm_factors(
    folds: Folds, norm: str, shared: SharedInput, block: str, pair: Pairs, tuning: float
) -> None:
    """Compare the gains of a norm, and check that the columns of its readers agree with the quotient."""
    assert shared.scale_fold is not None
    if (gains := pair(norm)) is None:
        return
    offset = 1.0 if shared.scale_fold.kind is FoldKind.NORM_PLUS_ONE else 0.0
    before, after = (gain + offset for gain in gains)
    same = (before - after).abs() <= UNCHANGED * torch.maximum(before.abs(), after.abs())
    if bool(same.all()):
        return
    linears = [f"{block}.{linear}" for linear in shared.readers]
    known = [both for linear in linears if (both := pair(linear)) is not None]
    alive = (before != 0) & (after != 0)
    gain = torch.where(alive, before / torch.where(alive, after, 1.0), 1.0)
    columns = gain
    if known:
        fit = _fit(torch.cat([a for a, _ in known]), torch.cat([b for _, b in known]), dim=0)
        good = fit.cosine >= RELATED
        excess = fit.log - gain.clamp(min=1e-6).log()  # of the gain, over what its readers tell
        apart = excess.abs() - NOISES * fit.noise
        limit = torch.where(excess > 0, math.log1p(tuning), -math.log1p(-tuning))
        # Tuning has changed the gain afterwards, or it is zero on both sides and any factor will do.
        columns = torch.where(good & ((gain > 0) & (apart > CLOSE) | ~alive), fit.factor, gain)
        dead = (before == 0) != (after == 0)
        wrong = dead | (alive & good & ((apart > limit) | (gain <= 0)))
        if bool(wrong.any()):
            channel = int(torch.where(dead, torch.inf, apart).masked_fill(~wrong, -1).argmax())
            changed = after[channel] / before[channel]
            folds.problems[norm] = (
                f"the gain of channel {channel} is {float(changed):.3g} times the source's,"
                f" and the weights that read it are {float(fit.factor[channel]):.3g} times the source's:"
                f" the two do not cancel ({int(wrong.sum())} of {len(gain)} channels)"
            )
            columns = torch.where(wrong, gain, columns)
    folds.norms[norm] = torch.where(alive, after / torch.where(alive, before, 1.0), 1.0)
    folds.columns.update(dict.fromkeys(linears, columns))


def _find_row_factors(
    folds: Folds,
    model_layout: ModelLayout,
    shared: SharedInput,
    block: str,
    pair: Pairs,
    unclipped: Pairs,
) -> None:
    """Fit both sides of a factor between a linear and its reader, and check that they cancel."""
    assert shared.scale_fold is not None
    architecture, dimensions = require_declarations(model_layout)
    producer, reader = f"{block}.{shared.scale_fold.module}", f"{block}.{shared.key}"
    rows = architecture.slice_rows(dimensions, shared.scale_fold.module, shared.scale_fold.rows)

    def fit_rows(made: Pair) -> _Fit:
        return _fit(folds.applied(producer, made[0])[rows], made[1][rows], dim=1)

    def fit_columns(read: Pair) -> _Fit:
        fit = _fit(*read, dim=0)
        if not shared.heads:
            return fit
        heads = (dimensions.kv_heads, dimensions.heads // dimensions.kv_heads, dimensions.head)
        return _Fit(*(v.view(heads).nanmean(1).flatten() for v in (fit.factor, fit.cosine)))

    made, read = pair(producer), pair(reader)
    own = None if made is None else fit_rows(made)
    other = None if read is None else fit_columns(read)
    scale = _agreed(own, other)
    if scale is None:
        return
    if own is not None and other is not None:
        product = own.log + other.log
        spread = 1.4826 * float((product - product.median()).abs().median())
        noise = (NOISES * (own.noise + other.noise)).clamp(min=max(CANCELS, SPREADS * spread))

        def apart(own: _Fit, other: _Fit) -> Tensor:
            related = (own.cosine >= RELATED) & (other.cosine >= RELATED)
            return related & ((own.log + other.log).abs() > noise)

        wrong = apart(own, other)
        if bool(wrong.any()):
            made_inside, read_inside = unclipped(producer), unclipped(reader)
            if made_inside is not None and read_inside is not None:
                wrong &= apart(fit_rows(made_inside), fit_columns(read_inside))
        if bool(wrong.any()):
            channel = int((product.abs() * wrong).argmax())
            folds.problems[producer] = (
                f"row {channel} of the rows that carry a factor is {float(own.factor[channel]):.3g} times the source's,"
                f" and the column of {reader} that reads it {float(other.factor[channel]):.3g} times: the two do not"
                f" cancel ({int(wrong.sum())} of {len(wrong)} channels)"
            )
    if made is not None:
        folds.rows[producer] = torch.ones(len(made[0]))
        folds.rows[producer][rows] = 1 / scale
    folds.columns[reader] = expand_heads(dimensions, scale) if shared.heads else scale
    folds.fitted |= {producer, reader}


@dataclass(frozen=True, slots=True)
class _Fit:
    """Least-squares factors of channels, and the cosines with which they fit; NaN where a channel is zero."""

    factor: Tensor
    cosine: Tensor

    @property
    def log(self) -> Tensor:
        return self.factor.log()

    @property
    def noise(self) -> Tensor:
        """Return squared error over squared signal of each channel, once its factor is taken out."""
        return self.cosine.nan_to_num(0.0).square().clamp(min=1e-6).reciprocal() - 1


def own_columns(source: Tensor, stored: Tensor, near: Tensor, tuning: float) -> Tensor:
    """Return the factors of the columns of an unrounded weight, no further from ``near`` than tuning goes."""
    if len(source) < MIN_ROWS:
        return near
    factor = _fit(source, stored, dim=0).factor
    return torch.minimum(torch.maximum(factor, near * (1 - tuning)), near * (1 + tuning))


def _fit(source: Tensor, stored: Tensor, dim: int) -> _Fit:
    """Fit the positive factor of each row (``dim`` 1) or column (0)."""
    product = (source * stored).sum(dim)
    energy, other = source.square().sum(dim), stored.square().sum(dim)
    factor = torch.where(energy > 0, product / energy.clamp(min=1e-30), 1.0)
    cosine = torch.where(energy > 0, product / (energy * other).sqrt().clamp(min=1e-30), torch.nan)
    return _Fit(factor.clamp(min=1e-6), cosine)


def _agreed(own: _Fit | None, other: _Fit | None) -> Tensor | None:
    """Return the factor of each channel, as both sides tell it, or None where nothing was moved.

    The side with less noise counts more: a column that was made small beside the others of its row has lost its factor,
    and the row that was made large has it exactly. Where one side is damaged, the other still tells.
    """
    usable = [
        fit for fit in (own, other) if fit is not None and float(fit.cosine.nanmedian()) > RELATED
    ]
    if own is not None and other is not None and len(usable) == 2:
        if min(float(own.log.std()), float(other.log.std())) < MIN_SPREAD:
            return None
        first, second = 1 / own.noise.clamp(min=MIN_NOISE), 1 / other.noise.clamp(min=MIN_NOISE)
        weights = torch.minimum(first, second)
        weights = weights.clamp(max=float(weights.median()))
        mean = (second * other.log - first * own.log) / (first + second)
        return mean.exp() if _correlation(own.log, other.log, weights) < MAX_CORRELATION else None
    if not usable or float(usable[0].log.std()) < MIN_SPREAD_ALONE:
        return None
    return (-usable[0].log if usable[0] is own else usable[0].log).exp()


def _correlation(first: Tensor, second: Tensor, weights: Tensor) -> float:
    weights = weights / weights.sum()
    a, b = (value - (value * weights).sum() for value in (first, second))
    size = (a.square() * weights).sum() * (b.square() * weights).sum()
    return float((a * b * weights).sum() / size.sqrt()) if float(size) > 0 else 0.0
