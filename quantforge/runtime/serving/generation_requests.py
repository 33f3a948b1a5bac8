"""Requests to an engine, and what it says of them: new tokens, and the end of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from quantforge.runtime.sampling import Sampling


class FinishReason(StrEnum):
    """FinishReason for the end of a request."""

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
    """

    id: str
    ids: tuple[int, ...]
    new_tokens: int
    stop: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token was chosen.

    Attributes:
        id: of the request.
        token: the token.
        place: its number among the new tokens of the request, from 0.
    """

    id: str
    token: int
    place: int


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


Happening = NewToken | Finished
