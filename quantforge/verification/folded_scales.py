"""Find per-channel scales that were moved between tensors before rounding: ``W_q ~ diag(r) W diag(c)``.

AWQ and SmoothQuant move a scale per channel between a producer and the layers that read it. The model computes the same
function, every weight has changed, and no file records the scales ``r`` and ``c``. They are recovered by least squares:
the scale of a row is ``<w_i, q_i> / <w_i, w_i>``, and that of a column is computed in the same way.

* If a norm absorbed the scale, it is the ratio of the two norm weights, and the columns of its readers must agree with
it. They may differ by as much as tuning changes a norm weight afterwards. * If a linear absorbed it (v for o, up for
down), the rows of one and the columns of the other are inversely related, ``log r ~ -log c``. Otherwise nothing was
moved.

A search of quantization scales clips outliers in channels with little influence. The scales fitted there are too small
by more than the noise, because clipping always shrinks weights. A wrong channel scale changes all weights of the
channel, clipping only the largest of each group: mismatches are reported only if they remain without the clipped
weights.
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

MIN_SPREAD = 0.02  # standard deviation of log scales above which they are more than noise
MIN_SPREAD_ALONE = 4 * MIN_SPREAD  # the same if only one side can be read
MAX_CORRELATION = -0.5  # correlation of the two sides of a fold
# Log ratio of a gain and the fitted scale of its readers that storing both in 16 bits explains.
MAX_GAIN_MISMATCH = 0.01
# Largest relative change of a gain that may come from tuning if no manifest tells.
MAX_TUNING_CHANGE = 0.25
# Largest relative error of rounding a value and its scale to 16 bits.
MAX_CAST_ERROR = 2.0**-7
MIN_COSINE = 0.5  # below this cosine similarity, one tensor was not made from the other
NOISE_FACTOR = 5.0  # allowed error of a fitted scale, as a multiple of noise over signal
MIN_MISMATCH = 0.1  # log of the product of two scales that rounding does not explain,
SPREAD_FACTOR = 8.0  # nor this many robust standard deviations of all channels
MIN_ROWS = 2  # with one row, a column scale fits anything
MIN_NOISE = 1e-6  # noise over signal below which neither side is better than the other

# Returns a float32 weight by canonical name, linears as [out, in].
WeightLoader = Callable[[str], Tensor | None]
# A weight of the source and of the artifact, with equal shapes.
WeightPair = tuple[Tensor, Tensor]
# Returns both weights of a module by canonical name.
PairLoader = Callable[[str], WeightPair | None]


@dataclass(slots=True)
class FoldedScales:
    """Folded scales of the linears and norms of one block, by canonical module name.

    Attributes:
        row_scales: scales of rows ``[out]``, unless all are one.
        column_scales: scales of columns ``[in]``, unless all are one.
        norm_scales: factors by which the weight and bias of a norm were multiplied.
        fitted_modules: modules whose scales are fitted instead of known exactly.
        problems: descriptions by module, for modules whose scales do not cancel.
    """

    row_scales: dict[str, Tensor] = field(default_factory=dict)
    column_scales: dict[str, Tensor] = field(default_factory=dict)
    norm_scales: dict[str, Tensor] = field(default_factory=dict)
    fitted_modules: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)

    def apply(self, module: str, weight: Tensor) -> Tensor:
        """Apply the scales of a module to a source weight ``[out, in]``; the result is what was rounded."""
        if module in self.column_scales:
            weight = weight * self.column_scales[module]
        return weight * self.row_scales[module][:, None] if module in self.row_scales else weight

    def remove(self, module: str, weight: Tensor) -> Tensor:
        """Remove the scales of a module from a weight ``[out, in]``."""
        if module in self.column_scales:
            weight = weight / self.column_scales[module]
        return weight / self.row_scales[module][:, None] if module in self.row_scales else weight

    def has_scale(self, module: str) -> bool:
        """Return whether a module has any scale other than one."""
        return module in self.row_scales or module in self.column_scales


def find_folded_scales(
    model_layout: ModelLayout,
    index: int,
    source_weight: WeightLoader,
    artifact_weight: WeightLoader,
    clipping_mask: WeightLoader,
    max_tuning: float = MAX_TUNING_CHANGE,
) -> FoldedScales:
    """Find the folded scales of one block.

    Args:
        model_layout: the model, whose declarations list shared inputs and scale folds.
        index: index of the block.
        source_weight: returns a weight of the source.
        artifact_weight: returns a decoded weight of the artifact.
        clipping_mask: marks the weights that may have been clipped; None for a weight that is not quantized.
        max_tuning: largest relative change of a norm weight that is attributed to tuning.
    """

    def pair(module: str) -> WeightPair | None:
        source, artifact = source_weight(f"{module}.weight"), artifact_weight(f"{module}.weight")
        if source is None or artifact is None or source.shape != artifact.shape:
            return None
        return source, artifact

    def unclipped(module: str) -> WeightPair | None:
        weight_pair, mask = pair(module), clipping_mask(f"{module}.weight")
        if weight_pair is None or mask is None:
            return weight_pair
        return weight_pair[0].masked_fill(mask, 0.0), weight_pair[1].masked_fill(mask, 0.0)

    folds, block = FoldedScales(), model_layout.block_name(index)
    for norm, shared in foldable_norms(model_layout, index):
        _find_norm_scales(folds, norm, shared, block, pair, max_tuning)
    for shared in model_layout.layers[index].inputs:
        if shared.scale_fold is not None and shared.scale_fold.kind is FoldKind.ROWS:
            _find_row_scales(folds, model_layout, shared, block, pair, unclipped)
    return folds


def foldable_norms(model_layout: ModelLayout, index: int) -> list[tuple[str, SharedInput]]:
    """Return the norms of a block into which a scale can be folded, each with a shared input that it produces."""
    if not 0 <= index < len(model_layout.layers):
        return []
    return [
        (f"{model_layout.block_name(index)}.{shared.scale_fold.module}", shared)
        for shared in model_layout.layers[index].inputs
        if shared.scale_fold is not None and shared.scale_fold.kind is not FoldKind.ROWS
    ]


def _find_norm_scales(
    folds: FoldedScales,
    norm: str,
    shared: SharedInput,
    block: str,
    pair: PairLoader,
    max_tuning: float,
) -> None:
    """Compare the weights of a norm, and check that the columns of its readers agree with the ratio."""
    assert shared.scale_fold is not None
    if (gains := pair(norm)) is None:
        return
    offset = 1.0 if shared.scale_fold.kind is FoldKind.NORM_PLUS_ONE else 0.0
    source_gain, artifact_gain = (gain + offset for gain in gains)
    is_unchanged = (source_gain - artifact_gain).abs() <= MAX_CAST_ERROR * torch.maximum(
        source_gain.abs(), artifact_gain.abs()
    )
    if bool(is_unchanged.all()):
        return
    linears = [f"{block}.{linear}" for linear in shared.readers]
    readers = [weight_pair for linear in linears if (weight_pair := pair(linear)) is not None]
    nonzero = (source_gain != 0) & (artifact_gain != 0)
    gain = torch.where(nonzero, source_gain / torch.where(nonzero, artifact_gain, 1.0), 1.0)
    columns = gain
    if readers:
        fit = _fit_scales(
            torch.cat([a for a, _ in readers]), torch.cat([b for _, b in readers]), dim=0
        )
        has_good_fit = fit.cosine >= MIN_COSINE
        log_excess = fit.log - gain.clamp(min=1e-6).log()  # of the gain, over what its readers tell
        mismatch = log_excess.abs() - NOISE_FACTOR * fit.noise
        limit = torch.where(log_excess > 0, math.log1p(max_tuning), -math.log1p(-max_tuning))
        # Tuning has changed the gain afterwards, or it is zero on both sides and any factor will do.
        columns = torch.where(
            has_good_fit & ((gain > 0) & (mismatch > MAX_GAIN_MISMATCH) | ~nonzero),
            fit.factor,
            gain,
        )
        only_one_zero = (source_gain == 0) != (artifact_gain == 0)
        is_wrong = only_one_zero | (nonzero & has_good_fit & ((mismatch > limit) | (gain <= 0)))
        if bool(is_wrong.any()):
            channel = int(
                torch.where(only_one_zero, torch.inf, mismatch).masked_fill(~is_wrong, -1).argmax()
            )
            gain_ratio = artifact_gain[channel] / source_gain[channel]
            folds.problems[norm] = (
                f"the gain of channel {channel} is {float(gain_ratio):.3g} times the source's,"
                f" and the weights that read it are {float(fit.factor[channel]):.3g} times the source's:"
                f" the two do not cancel ({int(is_wrong.sum())} of {len(gain)} channels)"
            )
            columns = torch.where(is_wrong, gain, columns)
    folds.norm_scales[norm] = torch.where(
        nonzero, artifact_gain / torch.where(nonzero, source_gain, 1.0), 1.0
    )
    folds.column_scales.update(dict.fromkeys(linears, columns))


def _find_row_scales(
    folds: FoldedScales,
    model_layout: ModelLayout,
    shared: SharedInput,
    block: str,
    pair: PairLoader,
    unclipped: PairLoader,
) -> None:
    """Fit both sides of a scale between a linear and its reader, and check that they cancel."""
    assert shared.scale_fold is not None
    architecture, dimensions = require_declarations(model_layout)
    producer, reader = f"{block}.{shared.scale_fold.module}", f"{block}.{shared.key}"
    rows = architecture.slice_rows(dimensions, shared.scale_fold.module, shared.scale_fold.rows)

    def fit_rows(producer_pair: WeightPair) -> _ScaleFit:
        return _fit_scales(
            folds.apply(producer, producer_pair[0])[rows], producer_pair[1][rows], dim=1
        )

    def fit_columns(reader_pair: WeightPair) -> _ScaleFit:
        fit = _fit_scales(*reader_pair, dim=0)
        if not shared.heads:
            return fit
        heads = (dimensions.kv_heads, dimensions.heads // dimensions.kv_heads, dimensions.head)
        return _ScaleFit(*(v.view(heads).nanmean(1).flatten() for v in (fit.factor, fit.cosine)))

    producer_pair, reader_pair = pair(producer), pair(reader)
    producer_fit = None if producer_pair is None else fit_rows(producer_pair)
    reader_fit = None if reader_pair is None else fit_columns(reader_pair)
    scale = _combine_fits(producer_fit, reader_fit)
    if scale is None:
        return
    if producer_fit is not None and reader_fit is not None:
        product = producer_fit.log + reader_fit.log
        robust_deviation = 1.4826 * float((product - product.median()).abs().median())
        noise = (NOISE_FACTOR * (producer_fit.noise + reader_fit.noise)).clamp(
            min=max(MIN_MISMATCH, SPREAD_FACTOR * robust_deviation)
        )

        def mismatched(producer_fit: _ScaleFit, reader_fit: _ScaleFit) -> Tensor:
            is_proportional = (producer_fit.cosine >= MIN_COSINE) & (
                reader_fit.cosine >= MIN_COSINE
            )
            return is_proportional & ((producer_fit.log + reader_fit.log).abs() > noise)

        is_wrong = mismatched(producer_fit, reader_fit)
        if bool(is_wrong.any()):
            unclipped_producer, unclipped_reader = unclipped(producer), unclipped(reader)
            if unclipped_producer is not None and unclipped_reader is not None:
                is_wrong &= mismatched(fit_rows(unclipped_producer), fit_columns(unclipped_reader))
        if bool(is_wrong.any()):
            channel = int((product.abs() * is_wrong).argmax())
            folds.problems[producer] = (
                f"row {channel} of the rows that carry a factor is"
                f" {float(producer_fit.factor[channel]):.3g} times the source's, and the column of {reader}"
                f" that reads it {float(reader_fit.factor[channel]):.3g} times: the two do not cancel"
                f" ({int(is_wrong.sum())} of {len(is_wrong)} channels)"
            )
    if producer_pair is not None:
        folds.row_scales[producer] = torch.ones(len(producer_pair[0]))
        folds.row_scales[producer][rows] = 1 / scale
    folds.column_scales[reader] = expand_heads(dimensions, scale) if shared.heads else scale
    folds.fitted_modules |= {producer, reader}


@dataclass(frozen=True, slots=True)
class _ScaleFit:
    """Least-squares scales of channels, with the cosine similarity of each fit; NaN for a zero channel."""

    factor: Tensor
    cosine: Tensor

    @property
    def log(self) -> Tensor:
        return self.factor.log()

    @property
    def noise(self) -> Tensor:
        """Return the ratio of squared error to squared signal per channel after fitting its scale."""
        return self.cosine.nan_to_num(0.0).square().clamp(min=1e-6).reciprocal() - 1


def fit_column_scales(
    source: Tensor, stored: Tensor, expected: Tensor, max_tuning: float
) -> Tensor:
    """Fit the column scales of an unquantized weight, limited to what tuning may change from ``expected``."""
    if len(source) < MIN_ROWS:
        return expected
    scale = _fit_scales(source, stored, dim=0).factor
    return torch.minimum(
        torch.maximum(scale, expected * (1 - max_tuning)), expected * (1 + max_tuning)
    )


def _fit_scales(source: Tensor, stored: Tensor, dim: int) -> _ScaleFit:
    """Fit the positive scale of each row (``dim`` 1) or column (``dim`` 0) of a weight."""
    product = (source * stored).sum(dim)
    energy, other = source.square().sum(dim), stored.square().sum(dim)
    factor = torch.where(energy > 0, product / energy.clamp(min=1e-30), 1.0)
    cosine = torch.where(energy > 0, product / (energy * other).sqrt().clamp(min=1e-30), torch.nan)
    return _ScaleFit(factor.clamp(min=1e-6), cosine)


def _combine_fits(producer_fit: _ScaleFit | None, reader_fit: _ScaleFit | None) -> Tensor | None:
    """Return the scale of each channel from both fits, or None if nothing was moved.

    The side with less noise counts more: a column that became small relative to the others of its rows has lost
    precision, but the row that became large has it exactly. If one side is damaged, the other one is used.
    """
    usable_fits = [
        fit
        for fit in (producer_fit, reader_fit)
        if fit is not None and float(fit.cosine.nanmedian()) > MIN_COSINE
    ]
    if producer_fit is not None and reader_fit is not None and len(usable_fits) == 2:
        if min(float(producer_fit.log.std()), float(reader_fit.log.std())) < MIN_SPREAD:
            return None
        first, second = (
            1 / producer_fit.noise.clamp(min=MIN_NOISE),
            1 / reader_fit.noise.clamp(min=MIN_NOISE),
        )
        weights = torch.minimum(first, second)
        weights = weights.clamp(max=float(weights.median()))
        mean = (second * reader_fit.log - first * producer_fit.log) / (first + second)
        return (
            mean.exp()
            if _correlation(producer_fit.log, reader_fit.log, weights) < MAX_CORRELATION
            else None
        )
    if not usable_fits or float(usable_fits[0].log.std()) < MIN_SPREAD_ALONE:
        return None
    return (-usable_fits[0].log if usable_fits[0] is producer_fit else usable_fits[0].log).exp()


def _correlation(first: Tensor, second: Tensor, weights: Tensor) -> float:
    weights = weights / weights.sum()
    a, b = (value - (value * weights).sum() for value in (first, second))
    size = (a.square() * weights).sum() * (b.square() * weights).sum()
    return float((a * b * weights).sum() / size.sqrt()) if float(size) > 0 else 0.0
