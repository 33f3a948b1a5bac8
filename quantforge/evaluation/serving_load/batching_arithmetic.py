"""Batching by arithmetic alone: how busy the rows of a batch are, and how much of a cache is reserved in vain.

No model is needed: with the lengths of the answers known, a static batch computes as many steps as its longest answer
has tokens, all rows of it; a continuous one fills a row as soon as it is free. A contiguous cache reserves the longest
possible text for every row; a paged one reserves whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

from quantforge_kernels.kv import PAGE


@dataclass(frozen=True, slots=True)
class BatchingForecast:
    """Shares, 0 to 1.

    Attributes:
        static, continuous: of the rows that bring a token, over all steps.
        contiguous_waste: of the places of a cache that are reserved for the longest text in every row, and not used.
        paged_waste: likewise with pages that are taken as the text grows.
    """

    static: float
    continuous: float
    contiguous_waste: float
    paged_waste: float


def forecast(
    prompts: Sequence[int], answers: Sequence[int], rows: int, longest: int
) -> BatchingForecast:
    """Return the shares of requests that are all there at the begin, served in order.

    Args:
        prompts: tokens of the prompt of each request.
        answers: likewise of its answer.
        rows: of a batch.
        longest: tokens that a contiguous cache reserves for a row.
    """
    tokens = sum(answers)
    rows = min(rows, len(answers))
    steps = sum(max(answers[first : first + rows]) for first in range(0, len(answers), rows))
    free = [0] * rows  # the step at which each row is free
    for answer in answers:
        heapreplace(free, free[0] + answer)
    used = contiguous = paged = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        lengths = range(prompt, prompt + answer)
        used += sum(lengths)
        contiguous += longest * answer
        paged += sum(-(-length // PAGE) * PAGE for length in lengths)
    return BatchingForecast(
        static=tokens / (steps * rows),
        continuous=tokens / (max(free) * rows),
        contiguous_waste=1 - used / contiguous,
        paged_waste=1 - used / paged,
    )
