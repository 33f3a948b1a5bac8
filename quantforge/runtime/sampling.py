"""Choosing the next token from logits, by the usual definitions.

In this order: the *repetition penalty* r makes the logit l of a token that occurred l / r if it is
positive and l r otherwise (CTRL, arXiv 1909.05858); it is divided by the *temperature*, of which 0
takes the most likely token; *top-k* leaves out all but the k most likely; *top-p* all but the
smallest set whose probability reaches p (nucleus sampling, arXiv 1904.09751). Then one is drawn by
the inverse of the cumulative distribution: one uniform number per sequence, from a seeded generator
of the CPU, so that the same seed gives the same tokens anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.errors import InputError, UsageError

MOST_SEED = (1 << 63) - 1  # what torch's generator takes
RULES = "numbers with temperature >= 0, 0 < top_p <= 1, repetition_penalty > 0; whole: top_k >= 0, seed >= 0"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rule by which tokens are chosen; the default takes the most likely one.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is all.
        top_p: 1 is all.
        repetition_penalty: 1 is none.
        seed: of the generator.

    Raises:
        UsageError: a value out of its range, see `RULES`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        numbers, whole = (int, float), (int,)
        for name, kinds, least, most in (
            ("temperature", numbers, 0, None),
            ("top_k", whole, 0, None),
            ("top_p", numbers, None, 1),
            ("repetition_penalty", numbers, None, None),
            ("seed", whole, 0, MOST_SEED),
        ):
            value = getattr(self, name)
            good = type(value) in kinds and math.isfinite(value)
            good = good and (value > 0 if least is None else value >= least)
            if not good or (most is not None and value > most):
                raise UsageError(f"{name} = {value!r}", RULES)

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is taken."""
        return self.temperature == 0


class Sampler:
    """Chooser of tokens, with one generator for all of them."""

    def __init__(self, options: Sampling) -> None:
        self._options = options
        self._generator = torch.Generator().manual_seed(options.seed)

    def fork(self) -> Sampler:
        """Return a sampler that will make the same draws, without advancing this one."""
        twin = Sampler(self._options)
        twin._generator.set_state(self._generator.get_state())
        return twin

    def choose(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the next token ``[sequences]`` for logits ``[sequences, vocabulary]``.

        Args:
            logits: float32.
            seen: ``[sequences, vocabulary]`` bool, tokens that occurred; for the penalty.

        Raises:
            InputError: a logit is NaN or infinite.
        """
        if not bool(logits.isfinite().all()):
            sequence, token = logits.isfinite().logical_not().nonzero()[0].tolist()
            raise InputError(
                f"the logit of token {token} of sequence {sequence} is "
                f"{logits[sequence, token].item()}",
                "the weights are damaged, or activations overflow this type: try float32",
            )
        options = self._options
        if options.repetition_penalty != 1 and seen is not None:
            logits = penalised(logits, seen, options.repetition_penalty)
        if options.greedy:
            return logits.argmax(-1)
        weights = distribution(logits, options)
        draws = torch.rand(len(weights), 1, generator=self._generator, dtype=torch.float64)
        sums = weights.double().cumsum(-1)
        point = draws.to(sums.device) * sums[:, -1:]
        chosen = torch.searchsorted(sums, point, right=True)[:, 0]
        # A draw of all but 1 may round beyond the last token that has a probability.
        last = weights.shape[1] - 1 - weights.flip(1).gt(0).int().argmax(1)
        return torch.minimum(chosen, last)


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return logits with those of tokens that occurred made less likely (or more, below 1)."""
    changed = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, changed, logits)


def distribution(logits: Tensor, options: Sampling) -> Tensor:
    """Return the probabilities ``[sequences, vocabulary]`` that a draw follows."""
    logits = logits / options.temperature
    if 0 < options.top_k < logits.shape[-1]:
        least = logits.topk(options.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    weights = logits.softmax(-1)
    if options.top_p < 1:
        ordered, order = weights.sort(stable=True, dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        dropped = torch.zeros_like(weights, dtype=torch.bool)
        dropped.scatter_(1, order, before >= options.top_p)
        weights = weights.masked_fill(dropped, 0)
        weights = weights / weights.sum(-1, keepdim=True)
    return weights
