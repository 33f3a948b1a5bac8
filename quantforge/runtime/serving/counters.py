"""Counts of an engine since it was made, and how it stands."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from quantforge.runtime.serving.generation_requests import FinishReason
from quantforge.runtime.speculation.verify import SpeculationCounts


@dataclass(slots=True)
class Counters:
    """Counts of what happened, and the state after the last step.

    Attributes:
        steps: computed.
        computed_tokens: that went through the model.
        new_tokens: chosen.
        finished: requests by reason.
        preemptions: requests that had to give back their pages.
        scheduling_seconds: spent on deciding and keeping books, without the model and the choice of tokens.
        step_seconds: spent in steps.
        waiting, running: requests.
        pages, pages_free: of the cache.
        speculation: what came of drafted tokens.
        reserved_tokens, used_tokens: places in the pages of running requests, and those in use.
    """

    steps: int = 0
    computed_tokens: int = 0
    new_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    preemptions: int = 0
    scheduling_seconds: float = 0.0
    step_seconds: float = 0.0
    waiting: int = 0
    running: int = 0
    pages: int = 0
    pages_free: int = 0
    reserved_tokens: int = 0
    used_tokens: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
