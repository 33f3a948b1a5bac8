"""Choosing tokens from logits: every request has a sampler of its own, and rows of logits are chosen for together.

A sampler holds what a request's choices depend on beside its logits: its generator, and the tokens that occurred. So a
request gives the same tokens alone and beside others, and goes on where it was when it is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.errors import InputError, UsageError
from quantforge.runtime.sampling_options import Sampling
from quantforge.runtime.token_distribution import drawn, normalised, weigh
from quantforge.runtime.token_penalties import TokenCounts, adjust, repeated

__all__ = ["Chosen", "RowSampler", "Sampler", "Sampling", "choose_rows"]

CACHED, ON_GPU = (
    1 << 20,
    1 << 26,
)  # logits that are drawn from together: what a processor's cache holds, and on a GPU


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

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the distribution ``[vocabulary]``, float64, that `choose` draws from; nothing is drawn or noted.

        A greedy one has the probability 1 for one token. Errors as `choose_rows`.
        """
        check_finite(logits[None])
        logits = adjust(logits[None], [self.options], [self.counts])[0]
        if self.options.greedy:
            found = torch.zeros_like(logits, dtype=torch.float64)
            found[logits.argmax()] = 1
            return found
        return normalised(weigh(logits[None], [self.options]))[0]

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


class Sampler:
    """Chooser for rows that are draws of one rule, with one generator for all of them; it counts no tokens.

    Raises:
        UsageError: the rule has a frequency or presence penalty, which a `RowSampler` counts for.
    """

    def __init__(self, options: Sampling) -> None:
        if options.frequency_penalty or options.presence_penalty:
            raise UsageError("a Sampler counts no tokens", "take a RowSampler for each request")
        self._options = options
        self._generator = torch.Generator().manual_seed(options.seed)

    def choose(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the next token ``[rows]`` for logits ``[rows, vocabulary]``, float32.

        Args:
            logits: float32.
            seen: ``[rows, vocabulary]`` bool, tokens that occurred; for the repetition penalty.

        Raises:
            InputError: a logit is NaN or infinite.
        """
        check_finite(logits)
        options = [self._options] * len(logits)
        logits = adjust(logits, options, [None] * len(logits))
        if seen is not None:
            logits = torch.where(seen, repeated(logits, self._options.repetition_penalty), logits)
        if self._options.greedy:
            return logits.argmax(-1)
        uniform = torch.rand(len(logits), generator=self._generator, dtype=torch.float64)
        return drawn(weigh(logits, options), uniform)


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
        told = log_probabilities(logits[asked], [found[row].token for row in asked], counts)
        for row, one in zip(asked, told, strict=True):
            found[row] = one
    for sampler, one in zip(samplers, found, strict=True):
        sampler.note(one.token)
    return found


def log_probabilities(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Chosen]:
    """Return tokens with their log-probabilities.

    Args:
        logits: ``[rows, vocabulary]`` of the model itself.
        tokens: one for each row.
        counts: for each row, of how many most likely tokens they are told too.
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
