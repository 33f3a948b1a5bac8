"""Search scales that minimize the weighted squared error of a group.

A candidate scale gives codes ``q``; the best scale for those codes is a least-squares fit over the columns of the
group, ``s = sum h w q / sum h q^2`` with column weights ``h``. It is rounded to its stored type before its error is
measured, so that the winner is also the best in the file; encoding again with it can only lower the error.

On grids of fixed levels (`search_levels`) the codes ``q`` are the levels nearest to ``w / s``. Integer grids have zero
points, or one more code on their negative side. On a symmetric grid (`search_scales`) scales of both signs are tried,
so that the longer side can cover the longer tail of the group ("full-range symmetric" in AutoRound's documentation);
on an asymmetric one (`search_scales_and_zeros`) each scale is tried with three zeros. Large integer matrices are
searched by `scale_loops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantforge.packers import row_encoding, scale_loops
from quantforge.packers.scale_loops import REFINE_ROUNDS

CHUNK_WEIGHTS = 1 << 17  # elements of a chunk of rows: its temporaries stay in a core's cache
# Candidates for each sign (or zero) of an integer scale, from `MAX_FACTOR` to `MIN_FACTOR` times the plain scale.
NUM_CANDIDATES = 14
MAX_FACTOR, MIN_FACTOR = 1.05, 0.4
SCALE_FACTORS = [
    MAX_FACTOR - (MAX_FACTOR - MIN_FACTOR) / (NUM_CANDIDATES - 1) * index
    for index in range(NUM_CANDIDATES)
]
RoundToLevels = Callable[[Tensor], Tensor]  # values in units of the scale -> the nearest levels
RoundToStored = Callable[[Tensor], Tensor]  # scales (float32) -> scales that a file can hold


def search_levels(
    groups: Tensor,
    initial_scales: Tensor,
    importance: Tensor | None,
    round_to_levels: RoundToLevels,
    round_to_stored: RoundToStored,
    factors: Sequence[float],
) -> Tensor:
    """Search the scales of a grid of fixed levels; return them as a file stores them, float32 ``[rows, groups]``.

    Args:
        groups: weights, float32 ``[rows, groups, size]``.
        initial_scales: stored scales ``[rows, groups]``; they are returned where nothing is better.
        importance: ``[groups, size]``, non-negative, or None for equal weights.
        round_to_levels: rounds values in units of their scale to the levels.
        round_to_stored: rounds scales (float32) to the values that a file can hold, in float32.
        factors: candidates, as multiples of the initial scale.
    """
    weights = groups.new_ones(1, 1) if importance is None else importance
    best_scales = torch.empty_like(initial_scales)
    for rows in row_chunks(groups):
        initial = initial_scales[rows]
        columns_first = groups[rows].movedim(-1, 0), weights.T.unsqueeze(1)
        search = ScaleSearch(*columns_first, initial, round_to_stored)

        def codes_under(scale: Tensor, search: ScaleSearch = search) -> Tensor:
            return round_to_levels(search.divide_by_scale(scale).movedim(0, -1)).movedim(-1, 0)

        search.start_with(codes_under(initial))
        for factor in factors:
            search.try_codes(codes_under(initial * factor))
        for _ in range(REFINE_ROUNDS):
            search.try_codes(codes_under(search.scales))
        best_scales[rows] = search.scales
    return best_scales


def search_scales(
    groups: Tensor, scales: Tensor, importance: Tensor, low: int, high: int
) -> Tensor:
    """Search the scales ``[rows, groups]`` of a symmetric grid for ``groups`` ``[rows, groups, parts, size]``.

    ``scales`` are the plain ones: they determine the stored type, and are returned where nothing is better.
    ``importance`` broadcasts to ``groups``.
    """
    if _use_compiled_loops(groups):
        weights = _expand_importance(importance, groups)
        code_limits = low, high, 0  # the last is for grids that have zeros
        return scale_loops.search_integer_scales(
            groups[:, :, 0], weights, scales, None, SCALE_FACTORS, code_limits
        )[0]
    best_scales = torch.empty_like(scales)
    for rows in row_chunks(groups):
        initial = scales[rows].T.contiguous()
        no_zeros = torch.zeros_like(initial)
        search = _IntegerScaleSearch(groups[rows], importance, initial, (low, high), no_zeros)
        codes_clipped = False
        for factor in SCALE_FACTORS:
            search.round_under(initial.float() * factor)
            search.try_zero(search.zeros)
            # As long as no code is cut off, the other sign gives the same values.
            codes_clipped = codes_clipped or search.max_rounded() > high
            if codes_clipped:
                search.flip_sign()
                search.try_zero(search.zeros)
        best_scales[rows] = search.refine().T
    return best_scales


def search_scales_and_zeros(
    groups: Tensor, scales: Tensor, zeros: Tensor, importance: Tensor, min_zero: int, high: int
) -> tuple[Tensor, Tensor]:
    """Search scales and zeros (floats) ``[rows, groups]`` of an asymmetric grid ``0..high``.

    Zeros are at least ``min_zero``. The other arguments are those of `search_scales`.
    """
    if _use_compiled_loops(groups):
        weights = _expand_importance(importance, groups)
        code_limits = 0, high, min_zero
        return scale_loops.search_integer_scales(
            groups[:, :, 0], weights, scales, zeros, SCALE_FACTORS, code_limits
        )
    best_scales, best_zeros = torch.empty_like(scales), torch.empty_like(zeros)
    for rows in row_chunks(groups):
        initial, midrange = scales[rows].T.contiguous(), _midrange(groups[rows]).T.contiguous()
        initial_zeros = zeros[rows].T.contiguous()
        search = _IntegerScaleSearch(groups[rows], importance, initial, (0, high), initial_zeros)
        for factor in SCALE_FACTORS:
            scale = initial.float() * factor
            centered_zero = (high / 2 - midrange / scale).round()
            search.round_under(scale)
            for shift in (-1, 0, 1):
                search.try_zero((centered_zero + shift).clamp_(min_zero, high))
        best_scales[rows], best_zeros[rows] = search.refine().T, search.zeros.T
    return best_scales, best_zeros


def _use_compiled_loops(groups: Tensor) -> bool:
    """Return whether the compiled loops search this matrix; on a CPU only its shape decides."""
    return groups.shape[2] == 1 and row_encoding.supports(groups[:, :, 0])


def _expand_importance(importance: Tensor, groups: Tensor) -> Tensor:
    return importance[0, :, 0].expand(groups.shape[1], groups.shape[3]).contiguous()


def _midrange(groups: Tensor) -> Tensor:
    return (groups.amin((-2, -1)) + groups.amax((-2, -1))) / 2


def row_chunks(groups: Tensor) -> list[slice]:
    """Return slices of the rows of ``groups`` that are small enough for their temporaries to stay in a core's cache."""
    rows_per_chunk = max(1, CHUNK_WEIGHTS // max(1, groups[0].numel()))
    return [slice(first, first + rows_per_chunk) for first in range(0, len(groups), rows_per_chunk)]


class ScaleSearch:
    """The best scale found so far for each group of a chunk; all candidates share two buffers.

    Args:
        groups: weights with the columns of a group along the first dimension.
        importance: broadcasts to ``groups``.
        scales: initial scales; they stay where nothing is better.
        round_to_stored: rounds scales to the values that a file can hold.
    """

    def __init__(
        self, groups: Tensor, importance: Tensor, scales: Tensor, round_to_stored: RoundToStored
    ) -> None:
        self.groups, self.importance = groups, importance
        self.weighted_groups = groups * importance
        self.scales, self.round_to_stored = scales, round_to_stored
        self._scaled, self._buffer = (torch.empty_like(self.groups) for _ in range(2))

    def divide_by_scale(self, scale: Tensor) -> Tensor:
        """Return the weights in units of a candidate scale, in a buffer that the next call overwrites."""
        return torch.mul(self.groups, self.broadcast(scale.reciprocal()), out=self._scaled)

    def start_with(self, codes: Tensor) -> None:
        """Measure the error of the initial scales with these codes."""
        self.best_error = self._measure_error(codes, self.scales.float())

    def try_codes(self, codes: Tensor) -> Tensor:
        """Fit a scale to a candidate's codes and keep it where its error is smaller; return where that is (bool)."""
        products = self.sum_over_group(torch.mul(codes, self.weighted_groups, out=self._buffer))
        squares = torch.mul(codes, codes, out=self._buffer).mul_(self.importance)
        exact_scales = torch.nan_to_num(products / self.sum_over_group(squares), 0.0, 0.0, 0.0)
        fitted = self.round_to_stored(exact_scales)
        scale = fitted.float()
        error = self._measure_error(codes, scale)
        # The error of an infinite scale is NaN, hence not smaller.
        is_better = (error < self.best_error) & (scale != 0)
        self.best_error = torch.where(is_better, error, self.best_error)
        self.scales = torch.where(is_better, fitted, self.scales)
        return is_better

    def _measure_error(self, codes: Tensor, scale: Tensor) -> Tensor:
        # Not by the expanded square: its terms cancel, and near ties would be decided by rounding errors.
        return self.sum_over_group(self.residual(codes, scale).square_().mul_(self.importance))

    def residual(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the weights minus their quantized values, in a buffer."""
        return torch.addcmul(self.groups, codes, scale, value=-1, out=self._buffer)

    def broadcast(self, scales: Tensor) -> Tensor:
        """Reshape scales so that they broadcast to the groups."""
        return scales

    def sum_over_group(self, values: Tensor) -> Tensor:
        """Sum over the columns of a group."""
        return values.sum(0)


class _IntegerScaleSearch(ScaleSearch):
    """`ScaleSearch` for integer grids, with the best zero found so far; scales and zeros are ``[groups, rows]``.

    ``groups`` ``[rows, groups, parts, size]`` are copied with rows as the last dimension, so that each step uses vector
    instructions, whatever the size of a group is.
    """

    def __init__(
        self,
        groups: Tensor,
        importance: Tensor,
        scales: Tensor,
        code_limits: tuple[int, int],
        zeros: Tensor,
    ) -> None:
        columns_first = groups.permute(3, 1, 2, 0).contiguous(), importance.permute(3, 1, 2, 0)
        super().__init__(*columns_first, scales, lambda fitted: fitted.to(scales.dtype))
        self.code_limits, self.zeros = code_limits, zeros
        self._codes = torch.empty_like(self.groups)
        self.round_under(scales.float())
        self.start_with(self._clamp_codes(zeros))

    def round_under(self, scale: Tensor) -> None:
        """Round the weights to integers in units of a candidate scale."""
        self._rounded = self.divide_by_scale(scale).round_()

    def max_rounded(self) -> float:
        """Return the largest magnitude that `round_under` gave."""
        minimum, maximum = self._rounded.aminmax()
        return max(-minimum.item(), maximum.item())

    def flip_sign(self) -> None:
        """Go on with the candidate scale of the opposite sign."""
        self._rounded.neg_()

    def try_zero(self, zero: Tensor) -> None:
        """Clamp the rounded weights to the codes under ``zero``, fit a scale, and keep both where they are better."""
        self.zeros = torch.where(self.try_codes(self._clamp_codes(zero)), zero, self.zeros)

    def refine(self) -> Tensor:
        """Encode and fit again with the best scale, and return the scales."""
        for _ in range(REFINE_ROUNDS):
            self.round_under(self.scales.float())
            self.try_zero(self.zeros)
        return self.scales

    def _clamp_codes(self, zero: Tensor) -> Tensor:
        """Return the rounded weights, clamped to the codes minus the zero."""
        low, high = self.code_limits
        if high < -2 * low:  # symmetric: the limits are numbers, which is faster
            return torch.clamp(self._rounded, low, high, out=self._codes)
        minima, maxima = (low - zero).unsqueeze(1), (high - zero).unsqueeze(1)
        return torch.clamp(self._rounded, minima, maxima, out=self._codes)

    def broadcast(self, scales: Tensor) -> Tensor:
        return scales.unsqueeze(1)

    def sum_over_group(self, values: Tensor) -> Tensor:
        # Part by part: one long sum would depend on the number of threads.
        return values.sum(0).sum(1)

    def residual(self, code_limits: Tensor, scale: Tensor) -> Tensor:
        torch.mul(code_limits, self.broadcast(scale), out=self._buffer)
        return torch.sub(self.groups, self._buffer, out=self._buffer)
