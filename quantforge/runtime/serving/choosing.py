"""The next token of each request of a batch, by its own rule and its own generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.runtime.sampling import Sampling
from quantforge.runtime.serving.entries import ServedEntry


def choose(logits: Tensor, entries: Sequence[ServedEntry]) -> list[int | InputError]:
    """Return the next token of each entry, or what is wrong with its logits.

    Args:
        logits: ``[entries, vocabulary]`` float32.
        entries: whose they are. Those that take the most likely token, unchanged, are chosen together.
    """
    plain = [
        entry.request.sampling == Sampling(seed=entry.request.sampling.seed) for entry in entries
    ]
    finite = logits.isfinite().all(-1).tolist()
    most_likely = logits.argmax(-1).tolist()
    return [
        most_likely[place]
        if plain[place] and finite[place]
        else _one(logits[place : place + 1], entry)
        for place, entry in enumerate(entries)
    ]


def _one(logits: Tensor, entry: ServedEntry) -> int | InputError:
    seen = None
    if entry.request.sampling.repetition_penalty != 1:
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        seen[0, torch.tensor(entry.tokens, device=logits.device)] = True
    try:
        return int(entry.sampler.choose(logits, seen))
    except InputError as error:
        return error
