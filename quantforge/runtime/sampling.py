"""Choosing tokens from logits: every request has a sampler of its own, and rows of logits are chosen for together.

A sampler holds what a request's choices depend on besides its logits: its generator, and the tokens that occurred. So a
request gives the same tokens alone and with others, and continues where it was when it is computed again. The rules are
those of `quantforge.runtime.generation_options`.

Bias and penalties are applied to tokens that are named or that occurred, without work on the rest of the vocabulary. A
draw follows weights that are not normalized: that of the most likely token is 1, those of the others are
exp((l - l_max) / t). It takes the first token at which the sum of weights, in float64 and in the order of ids, exceeds
a uniform number times the sum of all. It adds up blocks of tokens first, and tokens in one block only: most of the time
goes into reading a vocabulary once. Every row is computed by itself, so it comes out the same whatever other rows are
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantforge.errors import InputError, UsageError
from quantforge.runtime.generation_options import Sampling

CACHED, ON_GPU = (
    1 << 20,
    1 << 26,
)  # logits that are drawn from together: what a processor's cache holds, and a GPU
BLOCK = 256  # tokens that are added up together
COLDEST, HOTTEST = (
    1e-30,
    1e30,
)  # temperatures beyond them have no other effect, and overflow float32
LIKELY = 1024  # most likely tokens among which the border of top-p is looked for first


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token, and what the model thinks of it.

    Attributes:
        token: its id.
        logprob: its log-probability in nats, where it was asked for.
        top: ids of the most likely tokens with their log-probabilities, the most likely one first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class RowSampler:
    """Chooser of the tokens of one request.

    Args:
        options: the rule.
        prompt: tokens of the prompt, for the repetition penalty.
    """

    def __init__(self, options: Sampling, prompt: Iterable[int] = ()) -> None:
        self.options = options
        self.counts = TokenCounts(prompt) if options.counted else None
        self._generator = torch.Generator().manual_seed(options.seed)

    @property
    def has_state(self) -> bool:
        """Return whether a choice depends on earlier ones: by a draw or by counts of tokens."""
        return not self.options.greedy or self.counts is not None

    def choose(self, logits: Tensor) -> Chosen:
        """Return the next token for logits ``[vocabulary]``, float32; errors as `choose_rows`."""
        return choose_rows([self], logits[None])[0]

    def uniform(self) -> float:
        """Return the next uniform number, 0 to below 1."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def fork(self) -> RowSampler:
        """Return a sampler that will choose as this one would, without advancing it."""
        twin = RowSampler(self.options)
        twin.counts = deepcopy(self.counts)
        twin._generator.set_state(self._generator.get_state())
        return twin

    def after(self, token: int) -> RowSampler:
        """Return a sampler that will choose as this one would after it chose ``token``, without advancing it."""
        twin = self.fork()
        if not self.options.greedy:
            twin.uniform()
        twin.note(token)
        return twin

    def likely(self, logits: Tensor, count: int) -> list[int]:
        """Return what `choose` would choose for logits ``[vocabulary]``, float32, and the most likely others.

        They are ``count`` in all, or the vocabulary; nothing is drawn or noted. Errors as `choose_rows`.
        """
        check_finite(logits[None])
        adjusted = adjust(logits[None], [self.options], [self.counts])[0]
        if self.options.greedy:
            first = int(adjusted.argmax())
        else:
            generator = torch.Generator()
            generator.set_state(self._generator.get_state())
            uniform = torch.rand((), generator=generator, dtype=torch.float64)
            first = int(drawn(weigh(adjusted[None], [self.options]), uniform[None]))
        best = adjusted.topk(min(count, len(adjusted))).indices.tolist()
        return [first, *(token for token in best if token != first)][:count]

    def note(self, token: int) -> None:
        """Note a token that was taken without `choose`, as a verified drafted token is."""
        if self.counts is not None:
            self.counts.add(token)


def choose_rows(samplers: Sequence[RowSampler], logits: Tensor) -> list[Chosen]:
    """Return the next token of each request, and note it.

    Args:
        samplers: one for each row.
        logits: ``[rows, vocabulary]``, float32; not changed.

    Raises:
        InputError: a logit is NaN or infinite.
        UsageError: a bias for a token that is not in the vocabulary.
    """
    check_finite(logits)
    options = [one.options for one in samplers]
    adjusted = adjust(logits, options, [one.counts for one in samplers])
    draws = [row for row, one in enumerate(options) if not one.greedy]
    if len(draws) < len(samplers):
        tokens = adjusted.argmax(-1)
    else:
        tokens = torch.zeros(len(samplers), dtype=torch.long, device=logits.device)
    most = CACHED if logits.device.type == "cpu" else ON_GPU
    together = max(1, most // logits.shape[1])
    for first in range(0, len(draws), together):
        rows = draws[first : first + together]
        uniform = torch.tensor([samplers[row].uniform() for row in rows], dtype=torch.float64)
        tokens[rows] = drawn(weigh(adjusted[rows], [options[row] for row in rows]), uniform)
    found = [Chosen(token) for token in tokens.tolist()]
    asked = [row for row, one in enumerate(options) if one.logprobs is not None]
    if asked:
        counts = [options[row].logprobs or 0 for row in asked]
        scored = log_probabilities(logits[asked], [found[row].token for row in asked], counts)
        for row, one in zip(asked, scored, strict=True):
            found[row] = one
    for sampler, one in zip(samplers, found, strict=True):
        sampler.note(one.token)
    return found


def log_probabilities(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Chosen]:
    """Return tokens with their log-probabilities.

    Args:
        logits: ``[rows, vocabulary]`` of the model itself.
        tokens: one for each row.
        counts: for each row, how many of the most likely tokens to report too.
    """
    values = logits.float().log_softmax(-1)
    own = values.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = values.topk(min(max(counts), values.shape[1]), -1)
    ids, likely = best.indices.tolist(), best.values.tolist()
    return [
        Chosen(token, logprob, tuple(zip(ids[row][:count], likely[row][:count], strict=True)))
        for row, (token, logprob, count) in enumerate(zip(tokens, own, counts, strict=True))
    ]


def check_finite(logits: Tensor) -> None:
    """Refuse logits ``[rows, vocabulary]`` that are no numbers.

    Raises:
        InputError: with the first of them.
    """
    # One fast pass: both ends of the range are numbers only if all logits are.
    if not bool(torch.stack(logits.aminmax()).isfinite().all()):
        row, token = logits.isfinite().logical_not().nonzero()[0].tolist()
        raise InputError(
            f"the logit of token {token} of sequence {row} is {logits[row, token].item()}",
            "the weights are damaged, or activations overflow this type: try float32",
        )


class TokenCounts:
    """Distinct tokens of a request, and how often each was generated.

    Args:
        prompt: its tokens, which count as not generated.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.fromiter(self._places, np.int64)
        self._generated = np.zeros(len(self._ids), np.float32)

    def add(self, token: int) -> None:
        """Note that a token was generated."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._generated = np.concatenate([self._generated, np.zeros(room, np.float32)])
        self._ids[place] = token
        self._generated[place] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Return the tokens that occurred."""
        return self._ids[: len(self._places)]

    @property
    def generated(self) -> NDArray[np.float32]:
        """Return how often each of `ids` was generated."""
        return self._generated[: len(self._places)]


def adjust(
    logits: Tensor, options: Sequence[Sampling], counts: Sequence[TokenCounts | None]
) -> Tensor:
    """Return logits ``[rows, vocabulary]`` with bias and penalties; the given ones are not changed.

    Args:
        logits: float32.
        options: one for each row.
        counts: one for each row that has penalties.

    Raises:
        UsageError: a bias for a token that is not in the vocabulary.
    """
    biased = [(row, one) for row, one in enumerate(options) if one.logit_bias]
    counted = [
        (row, *pair) for row, pair in enumerate(zip(options, counts, strict=True)) if pair[1]
    ]
    if not biased and not counted:
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    flat, vocabulary = logits.view(-1), logits.shape[1]
    if biased:
        _check(biased, vocabulary)
        places = [row * vocabulary + token for row, one in biased for token in one.logit_bias]
        bias = [value for _, one in biased for value in one.logit_bias.values()]
        flat[torch.tensor(places, device=flat.device)] += flat.new_tensor(bias)
    if counted:
        _penalise(flat, vocabulary, counted)
    return logits


def _penalise(
    flat: Tensor, vocabulary: int, counted: Sequence[tuple[int, Sampling, TokenCounts | None]]
) -> None:
    """Lower the logits of tokens that occurred, in place."""
    places, factors, lowered = [], [], []
    for row, one, count in counted:
        assert count is not None
        generated = count.generated
        places.append(count.ids + row * vocabulary)
        factors.append(np.full(len(generated), one.repetition_penalty, np.float32))
        lowered.append(one.frequency_penalty * generated + one.presence_penalty * (generated > 0))
    where = torch.from_numpy(np.concatenate(places)).to(flat.device)
    factor = torch.from_numpy(np.concatenate(factors)).to(flat.device)
    amount = torch.from_numpy(np.concatenate(lowered).astype(np.float32)).to(flat.device)
    flat[where] = repeated(flat[where], factor) - amount


def repeated(logits: Tensor, penalty: Tensor | float) -> Tensor:
    """Return the logits that tokens have which occurred before, by the repetition penalty."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def _check(biased: Sequence[tuple[int, Sampling]], vocabulary: int) -> None:
    most = max(max(one.logit_bias) for _, one in biased)
    if most >= vocabulary:
        raise UsageError(
            f"logit_bias of token {most}", f"the model has tokens 0 to {vocabulary - 1}"
        )


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
