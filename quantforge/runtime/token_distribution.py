"""The distribution that a draw follows: weights of tokens after temperature and cut-offs, and the draw itself.

Weights are not normalised: that of the most likely token is 1, those of the others exp((l - l_max) / t). A draw takes
the first token at which the sum of weights, in float64 and in the order of ids, exceeds a uniform number times the sum
of all.
It adds up blocks of tokens first, and tokens in one block only: most of the time goes into reading a vocabulary once.
Every row is computed by itself, so that it comes out the same whatever other rows are there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantforge.runtime.sampling_options import Sampling

BLOCK = 256  # tokens that are added up together
COLDEST, HOTTEST = (
    1e-30,
    1e30,
)  # temperatures beyond them have no other effect, and overflow float32
LIKELY = 1024  # most likely tokens among which the border of top-p is looked for first


def weigh(logits: Tensor, options: Sequence[Sampling]) -> Tensor:
    """Return the weights ``[rows, vocabulary]`` that draws follow.

    Args:
        logits: ``[rows, vocabulary]``, float32, after bias and penalties.
        options: one for each row; temperatures are above 0.
    """
    temperatures = [min(max(one.temperature, COLDEST), HOTTEST) for one in options]
    below = logits - logits.amax(-1, keepdim=True)
    weights = (below / _column(temperatures, below)).exp_()
    vocabulary = logits.shape[1]
    rows = [row for row, one in enumerate(options) if 0 < one.top_k < vocabulary]
    if rows:
        _cut_top_k(weights, below, rows, [options[row].top_k for row in rows])
    rows = [row for row, one in enumerate(options) if one.top_p < 1]
    if rows:
        _cut_top_p(weights, rows, [options[row].top_p for row in rows])
    if any(one.min_p for one in options):
        weights.masked_fill_(weights < _column([one.min_p for one in options], weights), 0)
    return weights


def normalised(weights: Tensor) -> Tensor:
    """Return probabilities of weights ``[rows, vocabulary]``, float64."""
    return weights.double() / _sums(weights)[:, -1:]


def drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return a token for each row of weights ``[rows, vocabulary]``.

    Args:
        weights: none negative, in each row one positive.
        uniform: ``[rows]``, float64, 0 to below 1.
    """
    sums = _sums(weights)
    point = uniform.to(sums.device)[:, None] * sums[:, -1:]
    block = _first_beyond(sums, point)
    before = sums.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0)
    ids = block * BLOCK + torch.arange(BLOCK, device=sums.device)
    inside = weights.gather(1, ids.clamp(max=weights.shape[1] - 1))
    inside = inside.masked_fill_(ids >= weights.shape[1], 0).cumsum(-1, dtype=torch.float64)
    return (block * BLOCK + _first_beyond(inside, point - before))[:, 0]


def _sums(weights: Tensor) -> Tensor:
    """Return the sums ``[rows, blocks]``, float64, of all tokens up to the end of each block."""
    whole = weights.shape[1] // BLOCK
    blocks = weights[:, : whole * BLOCK].reshape(len(weights), whole, BLOCK)
    rest = weights[:, whole * BLOCK :].sum(-1, keepdim=True, dtype=torch.float64)
    return torch.cat([blocks.sum(-1, dtype=torch.float64), rest], 1).cumsum(-1)


def _first_beyond(sums: Tensor, point: Tensor) -> Tensor:
    """Return the first place ``[rows, 1]`` whose sum exceeds a point, which rounding may have put at the sum of all."""
    below = sums[:, -1:].nextafter(sums.new_zeros(()))
    return torch.searchsorted(sums, torch.minimum(point, below), right=True)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _cut_top_k(weights: Tensor, logits: Tensor, rows: Sequence[int], counts: Sequence[int]) -> None:
    """Make the weights of tokens less likely than the k-th zero, in place."""
    those = logits if len(rows) == len(logits) else logits[rows]
    places = torch.tensor(counts, device=logits.device)[:, None] - 1
    least = torch.full_like(logits[:, :1], -torch.inf)
    least[rows] = those.topk(max(counts), -1).values.gather(1, places)
    weights.masked_fill_(logits < least, 0)


def _cut_top_p(weights: Tensor, rows: Sequence[int], shares: Sequence[float]) -> None:
    """Make the weights of tokens outside of the smallest set that reaches a share zero, in place.

    The border is looked for among some most likely tokens, and among more where these do not reach the share.
    """
    border, count = torch.zeros_like(weights[:, :1]), weights.shape[1]
    room = torch.full_like(border, count, dtype=torch.long)
    left = torch.tensor(rows, device=weights.device)
    target = _column(shares, weights.new_zeros(0, dtype=torch.float64)) * _sums(weights)[left, -1:]
    looked = LIKELY
    while len(left):
        looked = min(looked, count)
        those = weights if len(left) == len(weights) else weights[left]
        best = those.topk(looked, -1).values
        sums = best.cumsum(-1, dtype=torch.float64)
        # Added up in another order, all tokens may just miss a share of nearly all.
        found = (sums[:, -1] >= target[:, 0]) | (looked == count)
        last = torch.searchsorted(sums[found], target[found]).clamp_(max=looked - 1)
        border[left[found]] = best[found].gather(1, last)
        room[left[found]] = last + 1
        left, target = left[~found], target[~found]
        looked *= 8
    dropped = weights < border
    for row in (count - dropped.sum(-1, keepdim=True) > room)[:, 0].nonzero()[:, 0].tolist():
        equal = weights[row] == border[row]
        more = room[row] - (weights[row] > border[row]).sum()
        dropped[row] |= equal & (equal.cumsum(-1) > more)
    weights.masked_fill_(dropped, 0)
