"""The next token of each request of a batch, by its own rule and its own generator."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quantforge.errors import InputError, UsageError
from quantforge.runtime.sampling import Chosen, choose_rows, log_probabilities
from quantforge.runtime.serving.entries import ServedEntry, Work


def choose(logits: Tensor, entries: Sequence[ServedEntry]) -> list[Chosen | InputError]:
    """Return the next token of each entry, or what is wrong with its logits.

    Args:
        logits: ``[entries, vocabulary]`` float32.
        entries: whose they are.
    """
    try:
        return [*choose_rows([entry.sampler for entry in entries], logits)]
    except InputError:  # of one of them; nothing was drawn yet
        return [_one(logits[place : place + 1], entry) for place, entry in enumerate(entries)]


def _one(logits: Tensor, entry: ServedEntry) -> Chosen | InputError:
    try:
        return choose_rows([entry.sampler], logits)[0]
    except (InputError, UsageError) as error:
        return InputError(error.message, error.hint)


def score(logits: Tensor, part: Work) -> list[Chosen]:
    """Return what the model thinks of the prompt's own tokens that follow those of a part.

    Args:
        logits: ``[tokens of the part, vocabulary]`` float32.
        part: of an entry whose request asks for it.
    """
    entry, first = part.entry, part.first + 1
    told = entry.request.ids[first : first + part.tokens]
    count = entry.request.prompt_logprobs or 0
    return log_probabilities(logits[: len(told)], told, [count] * len(told)) if told else []
