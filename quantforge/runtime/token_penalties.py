"""Bias and penalties on logits, for tokens that are named or that occurred: no work on the rest of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantforge.errors import UsageError
from quantforge.runtime.sampling_options import Sampling


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
