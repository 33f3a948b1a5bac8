"""Requests to an engine, and what it reports: new tokens, log-probabilities of prompts, and the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.sampling import Chosen


class FinishReason(StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to continue.

    Attributes:
        id: names it in events; of no other request that is not finished.
        ids: its tokens.
        new_tokens: at most so many are chosen.
        stop: tokens that end it; the one that does is its last.
        sampling: how tokens are chosen; its seed is of this request alone.
        prompt_logprobs: report the log-probability of each token of the prompt after the first, and of so many of
            the most likely ones; None reports nothing.
    """

    id: str
    ids: tuple[int, ...]
    new_tokens: int
    stop: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token was chosen.

    Attributes:
        id: of the request.
        token: the token.
        place: its number among the new tokens of the request, from 0.
        logprob: its log-probability in nats, where it was asked for.
        top: the most likely tokens with theirs, likewise.
    """

    id: str
    token: int
    place: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Tokens of a prompt were computed whose log-probabilities were asked for.

    Attributes:
        id: of the request.
        first: place of the first of the tokens in the prompt.
        tokens: the prompt's own, each with its log-probability.
    """

    id: str
    first: int
    tokens: tuple[Chosen, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended, and holds no page any more.

    Attributes:
        id: of the request.
        reason: why.
        tokens: all of its new tokens.
        error: what went wrong, where ``reason`` is that.
    """

    id: str
    reason: FinishReason
    tokens: tuple[int, ...]
    error: str = ""


Happening = NewToken | PromptScored | Finished
