"""Sampling of tokens from logits: one sampler per request, applied to all rows of a batch together.

A sampler holds everything a request's choices depend on besides the logits: its random generator and the counts of
tokens seen. So a request yields the same tokens alone and in a batch, and resumes correctly after a preemption. The
sampling rules are those of `quantforge.runtime.generation_options`.

Logit bias and penalties touch only the listed or seen tokens, not the rest of the vocabulary. Sampling uses
unnormalized weights exp((l - l_max) / t), so the most likely token has weight 1. It picks the first token at which the
cumulative weight, summed in float64 in the order of ids, exceeds a uniform number times the total. Blocks of tokens are
summed first and only one block token by token, because reading the vocabulary once takes most of the time. Every row is
computed independently, so its result does not depend on the rest of the batch.
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

# Logits that are sampled from at a time: as many as fit into a CPU's cache, or onto a GPU.
CPU_LOGITS, GPU_LOGITS = 1 << 20, 1 << 26
BLOCK = 256  # tokens whose weights are summed together
# Temperatures are clamped to this range: beyond it the result is the same, but float32 overflows.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
TOP_P_CANDIDATES = 1024  # most likely tokens among which the top-p cutoff is searched first


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """A chosen token, with log-probabilities if requested.

    Attributes:
        token: token id.
        logprob: its log-probability in nats, if requested.
        top: (token id, log-probability) of the most likely tokens, in descending order of probability.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class RowSampler:
    """Sampler of one request: its options, random generator and token counts.

    Args:
        options: the sampling options.
        prompt: token ids of the prompt, for the repetition penalty.
    """

    def __init__(self, options: Sampling, prompt: Iterable[int] = ()) -> None:
        self.options = options
        self.counts = TokenCounts(prompt) if options.needs_counts else None
        self._generator = torch.Generator().manual_seed(options.seed)

    @property
    def has_state(self) -> bool:
        """Return whether a choice depends on earlier ones, through the random generator or through token counts."""
        return not self.options.greedy or self.counts is not None

    def choose(self, logits: Tensor) -> ChosenToken:
        """Choose the next token from logits ``[vocabulary]``, float32; raises as `choose_tokens` does."""
        return choose_tokens([self], logits[None])[0]

    def uniform(self) -> float:
        """Draw the next uniform random number in [0, 1)."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def fork(self) -> RowSampler:
        """Return an independent copy in the same state."""
        copy = RowSampler(self.options)
        copy.counts = deepcopy(self.counts)
        copy._generator.set_state(self._generator.get_state())
        return copy

    def fork_after(self, token: int) -> RowSampler:
        """Return a copy in the state after ``token`` was chosen; this sampler is not changed."""
        copy = self.fork()
        if not self.options.greedy:
            copy.uniform()
        copy.record(token)
        return copy

    def draft_candidates(self, logits: Tensor, count: int) -> list[int]:
        """Return up to ``count`` draft candidates: the token `choose` would choose, then the most likely other tokens.

        ``logits`` are ``[vocabulary]``, float32. The sampler's state is not changed. Raises as `choose_tokens` does.
        """
        check_finite(logits[None])
        adjusted = apply_bias_and_penalties(logits[None], [self.options], [self.counts])[0]
        if self.options.greedy:
            first = int(adjusted.argmax())
        else:
            generator = torch.Generator()
            generator.set_state(self._generator.get_state())
            uniform = torch.rand((), generator=generator, dtype=torch.float64)
            first = int(
                sample_tokens(sampling_weights(adjusted[None], [self.options]), uniform[None])
            )
        most_likely = adjusted.topk(min(count, len(adjusted))).indices.tolist()
        return [first, *(token for token in most_likely if token != first)][:count]

    def record(self, token: int) -> None:
        """Count a token that was accepted without `choose`, such as a verified drafted token."""
        if self.counts is not None:
            self.counts.add(token)


def choose_tokens(samplers: Sequence[RowSampler], logits: Tensor) -> list[ChosenToken]:
    """Choose the next token of each request and record it in its sampler.

    Args:
        samplers: one for each row.
        logits: ``[rows, vocabulary]``, float32; not modified.

    Raises:
        InputError: a logit is NaN or infinite.
        UsageError: a bias for a token that is not in the vocabulary.
    """
    check_finite(logits)
    options = [sampler.options for sampler in samplers]
    adjusted = apply_bias_and_penalties(logits, options, [sampler.counts for sampler in samplers])
    sampled_rows = [row for row, option in enumerate(options) if not option.greedy]
    if len(sampled_rows) < len(samplers):
        tokens = adjusted.argmax(-1)
    else:
        tokens = torch.zeros(len(samplers), dtype=torch.long, device=logits.device)
    max_logits = CPU_LOGITS if logits.device.type == "cpu" else GPU_LOGITS
    rows_at_once = max(1, max_logits // logits.shape[1])
    for start in range(0, len(sampled_rows), rows_at_once):
        rows = sampled_rows[start : start + rows_at_once]
        uniform = torch.tensor([samplers[row].uniform() for row in rows], dtype=torch.float64)
        tokens[rows] = sample_tokens(
            sampling_weights(adjusted[rows], [options[row] for row in rows]), uniform
        )
    chosen_tokens = [ChosenToken(token) for token in tokens.tolist()]
    logprob_rows = [row for row, option in enumerate(options) if option.logprobs is not None]
    if logprob_rows:
        counts = [options[row].logprobs or 0 for row in logprob_rows]
        with_logprobs = with_log_probabilities(
            logits[logprob_rows], [chosen_tokens[row].token for row in logprob_rows], counts
        )
        for row, token in zip(logprob_rows, with_logprobs, strict=True):
            chosen_tokens[row] = token
    for sampler, token in zip(samplers, chosen_tokens, strict=True):
        sampler.record(token.token)
    return chosen_tokens


def with_log_probabilities(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[ChosenToken]:
    """Return tokens with their log-probabilities and those of the most likely tokens.

    Args:
        logits: raw logits of the model, ``[rows, vocabulary]``.
        tokens: one token id for each row.
        counts: for each row, the number of most likely tokens to report.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen_logprobs = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[
        :, 0
    ].tolist()
    top = logprobs.topk(min(max(counts), logprobs.shape[1]), -1)
    ids, top_logprobs = top.indices.tolist(), top.values.tolist()
    return [
        ChosenToken(
            token, logprob, tuple(zip(ids[row][:count], top_logprobs[row][:count], strict=True))
        )
        for row, (token, logprob, count) in enumerate(
            zip(tokens, chosen_logprobs, counts, strict=True)
        )
    ]


def check_finite(logits: Tensor) -> None:
    """Check that logits ``[rows, vocabulary]`` are finite.

    Raises:
        InputError: a logit is NaN or infinite; the message names the first one.
    """
    # One fast pass: both ends of the range are numbers only if all logits are.
    if not bool(torch.stack(logits.aminmax()).isfinite().all()):
        row, token = logits.isfinite().logical_not().nonzero()[0].tolist()
        raise InputError(
            f"the logit of token {token} of sequence {row} is {logits[row, token].item()}",
            "the weights are damaged, or activations overflow this type: try float32",
        )


class TokenCounts:
    """Distinct tokens of a request, with the number of times each was generated.

    Args:
        prompt: token ids of the prompt; they are listed with a count of 0.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._index = {token: index for index, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.fromiter(self._index, np.int64)
        self._generated = np.zeros(len(self._ids), np.float32)

    def add(self, token: int) -> None:
        """Count a generated token."""
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            growth = max(64, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(growth, np.int64)])
            self._generated = np.concatenate([self._generated, np.zeros(growth, np.float32)])
        self._ids[index] = token
        self._generated[index] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Return the distinct tokens of the prompt and the completion."""
        return self._ids[: len(self._index)]

    @property
    def generated(self) -> NDArray[np.float32]:
        """Return how often each of `ids` was generated."""
        return self._generated[: len(self._index)]


def apply_bias_and_penalties(
    logits: Tensor, options: Sequence[Sampling], counts: Sequence[TokenCounts | None]
) -> Tensor:
    """Apply logit bias and penalties to logits ``[rows, vocabulary]``; return a copy if any row has them.

    Args:
        logits: float32; not modified.
        options: one for each row.
        counts: token counts of each row; None for rows without penalties.

    Raises:
        UsageError: a bias for a token that is not in the vocabulary.
    """
    biased = [
        (row, row_options) for row, row_options in enumerate(options) if row_options.logit_bias
    ]
    penalized_rows = [
        (row, *count_pair)
        for row, count_pair in enumerate(zip(options, counts, strict=True))
        if count_pair[1]
    ]
    if not biased and not penalized_rows:
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    flat, vocabulary = logits.view(-1), logits.shape[1]
    if biased:
        _check_bias_tokens(biased, vocabulary)
        positions = [
            row * vocabulary + token
            for row, row_options in biased
            for token in row_options.logit_bias
        ]
        bias = [value for _, row_options in biased for value in row_options.logit_bias.values()]
        flat[torch.tensor(positions, device=flat.device)] += flat.new_tensor(bias)
    if penalized_rows:
        _apply_penalties(flat, vocabulary, penalized_rows)
    return logits


def _apply_penalties(
    flat: Tensor,
    vocabulary: int,
    penalized_rows: Sequence[tuple[int, Sampling, TokenCounts | None]],
) -> None:
    """Apply repetition, frequency and presence penalties to the flattened logits, in place."""
    positions, factors, reductions = [], [], []
    for row, row_options, count in penalized_rows:
        assert count is not None
        generated = count.generated
        positions.append(count.ids + row * vocabulary)
        factors.append(np.full(len(generated), row_options.repetition_penalty, np.float32))
        reductions.append(
            row_options.frequency_penalty * generated
            + row_options.presence_penalty * (generated > 0)
        )
    indices = torch.from_numpy(np.concatenate(positions)).to(flat.device)
    factor = torch.from_numpy(np.concatenate(factors)).to(flat.device)
    reduction = torch.from_numpy(np.concatenate(reductions).astype(np.float32)).to(flat.device)
    flat[indices] = apply_repetition_penalty(flat[indices], factor) - reduction


def apply_repetition_penalty(logits: Tensor, penalty: Tensor | float) -> Tensor:
    """Apply the repetition penalty to the logits of tokens that occurred before."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def _check_bias_tokens(biased: Sequence[tuple[int, Sampling]], vocabulary: int) -> None:
    largest = max(max(row_options.logit_bias) for _, row_options in biased)
    if largest >= vocabulary:
        raise UsageError(
            f"logit_bias of token {largest}", f"the model has tokens 0 to {vocabulary - 1}"
        )


def sampling_weights(logits: Tensor, options: Sequence[Sampling]) -> Tensor:
    """Return unnormalized sampling weights ``[rows, vocabulary]`` after temperature, top-k, top-p and min-p.

    Args:
        logits: ``[rows, vocabulary]``, float32, after bias and penalties.
        options: one for each row; temperatures are above 0.
    """
    temperatures = [
        min(max(row_options.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
        for row_options in options
    ]
    shifted_logits = logits - logits.amax(-1, keepdim=True)
    weights = (shifted_logits / _column(temperatures, shifted_logits)).exp_()
    vocabulary = logits.shape[1]
    rows = [row for row, row_options in enumerate(options) if 0 < row_options.top_k < vocabulary]
    if rows:
        _apply_top_k(weights, shifted_logits, rows, [options[row].top_k for row in rows])
    rows = [row for row, row_options in enumerate(options) if row_options.top_p < 1]
    if rows:
        _apply_top_p(weights, rows, [options[row].top_p for row in rows])
    if any(row_options.min_p for row_options in options):
        weights.masked_fill_(
            weights < _column([row_options.min_p for row_options in options], weights), 0
        )
    return weights


def sample_tokens(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample a token id for each row of weights ``[rows, vocabulary]`` by the inverse cumulative distribution.

    Args:
        weights: non-negative, with at least one positive weight per row.
        uniform: uniform random numbers ``[rows]``, float64, in [0, 1).
    """
    sums = _cumulative_block_sums(weights)
    point = uniform.to(sums.device)[:, None] * sums[:, -1:]
    block = _first_index_exceeding(sums, point)
    sum_before = sums.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0)
    ids = block * BLOCK + torch.arange(BLOCK, device=sums.device)
    block_sums = weights.gather(1, ids.clamp(max=weights.shape[1] - 1))
    block_sums = block_sums.masked_fill_(ids >= weights.shape[1], 0).cumsum(-1, dtype=torch.float64)
    return (block * BLOCK + _first_index_exceeding(block_sums, point - sum_before))[:, 0]


def _cumulative_block_sums(weights: Tensor) -> Tensor:
    """Return the cumulative weights ``[rows, blocks]``, float64, at the end of each block of tokens."""
    full_blocks = weights.shape[1] // BLOCK
    blocks = weights[:, : full_blocks * BLOCK].reshape(len(weights), full_blocks, BLOCK)
    remainder = weights[:, full_blocks * BLOCK :].sum(-1, keepdim=True, dtype=torch.float64)
    return torch.cat([blocks.sum(-1, dtype=torch.float64), remainder], 1).cumsum(-1)


def _first_index_exceeding(sums: Tensor, point: Tensor) -> Tensor:
    """Return the first index ``[rows, 1]`` whose cumulative sum exceeds ``point``, which is clamped below the total."""
    limit = sums[:, -1:].nextafter(sums.new_zeros(()))
    return torch.searchsorted(sums, torch.minimum(point, limit), right=True)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _apply_top_k(
    weights: Tensor, logits: Tensor, rows: Sequence[int], counts: Sequence[int]
) -> None:
    """Zero the weights of tokens less likely than the k-th, in place."""
    selected = logits if len(rows) == len(logits) else logits[rows]
    ranks = torch.tensor(counts, device=logits.device)[:, None] - 1
    thresholds = torch.full_like(logits[:, :1], -torch.inf)
    thresholds[rows] = selected.topk(max(counts), -1).values.gather(1, ranks)
    weights.masked_fill_(logits < thresholds, 0)


def _apply_top_p(weights: Tensor, rows: Sequence[int], probabilities: Sequence[float]) -> None:
    """Zero the weights of tokens outside the smallest set whose probability reaches top-p, in place.

    The cutoff is searched among some of the most likely tokens first, and among more if these do not reach top-p.
    """
    cutoff, count = torch.zeros_like(weights[:, :1]), weights.shape[1]
    set_size = torch.full_like(cutoff, count, dtype=torch.long)
    pending = torch.tensor(rows, device=weights.device)
    target = (
        _column(probabilities, weights.new_zeros(0, dtype=torch.float64))
        * _cumulative_block_sums(weights)[pending, -1:]
    )
    candidates = TOP_P_CANDIDATES
    while len(pending):
        candidates = min(candidates, count)
        selected = weights if len(pending) == len(weights) else weights[pending]
        top = selected.topk(candidates, -1).values
        sums = top.cumsum(-1, dtype=torch.float64)
        # Added up in another order, all tokens may just miss a share of nearly all.
        is_reached = (sums[:, -1] >= target[:, 0]) | (candidates == count)
        last = torch.searchsorted(sums[is_reached], target[is_reached]).clamp_(max=candidates - 1)
        cutoff[pending[is_reached]] = top[is_reached].gather(1, last)
        set_size[pending[is_reached]] = last + 1
        pending, target = pending[~is_reached], target[~is_reached]
        candidates *= 8
    is_dropped = weights < cutoff
    for row in (count - is_dropped.sum(-1, keepdim=True) > set_size)[:, 0].nonzero()[:, 0].tolist():
        ties = weights[row] == cutoff[row]
        kept_ties = set_size[row] - (weights[row] > cutoff[row]).sum()
        is_dropped[row] |= ties & (ties.cumsum(-1) > kept_ties)
    weights.masked_fill_(is_dropped, 0)
