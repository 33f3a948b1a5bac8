"""The distribution that a draw follows: weights of tokens after temperature and cut-offs, and the draw itself.

Weights are not normalised: that of the most likely token is 1, those of the others exp((l - l_max) / t). A draw takes the
first token at which the sum of weights, in float64 and in the order of ids, exceeds a uniform number times the sum of all.
Every row is computed by itself, so that it comes out the same whatever other rows are there (bit for bit on a processor;
a GPU may add up a single row in another order, in float64).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantforge.runtime.sampling_options import Sampling

COLDEST, HOTTEST = 1e-30, 1e30  # temperatures beyond them have no other effect, and overflow float32
LIKELY = 1024  # most likely tokens among which the border of top-p is looked for first


def weigh(logits: Tensor, options: Sequence[Sampling]) -> Tensor:
    """Return the weights ``[rows, vocabulary]`` that draws follow.

    Args:
        logits: ``[rows, vocabulary]``, float32, after bias and penalties.
        options: one for each row; temperatures are above 0.
    """
    temperatures = [min(max(one.temperature, COLDEST), HOTTEST) for one in options]
    logits = logits - logits.amax(-1, keepdim=True)
    weights = (logits / _column(temperatures, logits)).exp_()
    vocabulary = logits.shape[1]
    rows = [row for row, one in enumerate(options) if 0 < one.top_k < vocabulary]
    if rows:
        _cut_top_k(weights, logits, rows, [options[row].top_k for row in rows])
    rows = [row for row, one in enumerate(options) if one.top_p < 1]
    if rows:
        _cut_top_p(weights, rows, [options[row].top_p for row in rows])
    if any(one.min_p for one in options):
        weights.masked_fill_(weights < _column([one.min_p for one in options], weights), 0)
    return weights


def normalised(weights: Tensor) -> Tensor:
    """Return probabilities of weights ``[..., vocabulary]``, float64."""
    return weights.double() / weights.cumsum(-1, dtype=torch.float64)[..., -1:]


def drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return a token for each row of weights ``[rows, vocabulary]``.

    Args:
        weights: none negative, in each row one positive.
        uniform: ``[rows]``, float64, 0 to below 1.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    whole = sums[:, -1:]
    point = uniform.to(sums.device)[:, None] * whole
    point = torch.minimum(point, whole.nextafter(torch.zeros_like(whole)))  # where it was rounded up
    return torch.searchsorted(sums, point, right=True)[:, 0]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _cut_top_k(weights: Tensor, logits: Tensor, rows: Sequence[int], counts: Sequence[int]) -> None:
    """Make the weights of tokens less likely than the k-th zero, in place."""
    those = logits[rows]
    places = torch.tensor(counts, device=logits.device)[:, None] - 1
    least = those.topk(max(counts), -1).values.gather(1, places)
    weights[rows] = weights[rows].masked_fill_(those < least, 0)


def _cut_top_p(weights: Tensor, rows: Sequence[int], shares: Sequence[float]) -> None:
    """Make the weights of tokens outside of the smallest set that reaches a share zero, in place.

    The border is looked for among some most likely tokens, and among more where these do not reach the share.
    """
    left = torch.tensor(rows, device=weights.device)
    share = torch.tensor(shares, dtype=torch.float64, device=weights.device)[:, None]
    target = share * weights[left].cumsum(-1, dtype=torch.float64)[:, -1:]
    looked, vocabulary = LIKELY, weights.shape[1]
    while len(left):
        looked = min(looked, vocabulary)
        those = weights[left]
        best = those.topk(looked, -1).values
        sums = best.cumsum(-1, dtype=torch.float64)
        found = (sums[:, -1:] >= target)[:, 0]
        if looked == vocabulary:
            found[:] = True  # sums in another order may miss a share of nearly all
        last = torch.searchsorted(sums[found], target[found]).clamp_(max=looked - 1)
        weights[left[found]] = _kept(those[found], best[found], last)
        left, target = left[~found], target[~found]
        looked *= 8


def _kept(weights: Tensor, best: Tensor, last: Tensor) -> Tensor:
    """Return weights with those behind the ``last`` of the ``best`` made zero; of equal ones the first stay."""
    border = best.gather(1, last)
    room = last + 1 - (best > border).sum(-1, keepdim=True)
    equal = weights == border
    kept = (weights > border) | (equal & (equal.cumsum(-1) <= room))
    return weights.masked_fill_(~kept, 0)
