"""Requests to a serving engine and the events it reports: new tokens, prompt log-probabilities, end of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.sampling import ChosenToken


class FinishReason(StrEnum):
    """Reason why a request finished."""

    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A generation request: a prompt with its options.

    Attributes:
        id: identifies the request in events; unique among unfinished requests.
        ids: token ids of the prompt.
        new_tokens: most new tokens.
        stop: ids of tokens that end the completion; the end token is its last token.
        sampling: sampling options; the seed applies to this request alone.
        prompt_logprobs: report log-probabilities of the prompt tokens after the first, each with this many most likely
            tokens; None reports none.
    """

    id: str
    ids: tuple[int, ...]
    new_tokens: int
    stop: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class NewToken:
    """Event: a new token was generated.

    Attributes:
        id: id of the request.
        token: token id.
        place: index among the new tokens of the request, from 0.
        logprob: its log-probability in nats, if requested.
        top: the most likely tokens with their log-probabilities, if requested.
    """

    id: str
    token: int
    place: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Event: requested log-probabilities of prompt tokens were computed.

    Attributes:
        id: id of the request.
        first: index of the first of these tokens in the prompt.
        tokens: the prompt tokens with their log-probabilities.
    """

    id: str
    first: int
    tokens: tuple[ChosenToken, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: a request finished, and its cache pages are free.

    Attributes:
        id: id of the request.
        reason: why it finished.
        tokens: all of its new tokens.
        error: error message if ``reason`` is ERROR.
    """

    id: str
    reason: FinishReason
    tokens: tuple[int, ...]
    error: str = ""


EngineEvent = NewToken | PromptScored | Finished
