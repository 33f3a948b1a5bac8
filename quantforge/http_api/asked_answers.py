"""A request over HTTP as data: prompts, how tokens are chosen, how answers are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantforge_calibration.conversations import Conversation


@dataclass(frozen=True, slots=True)
class AskedAnswers:
    """Answers that one request asks for: ``n`` for each prompt.

    Attributes:
        prompts: each a text, token ids, or a conversation.
        max_tokens: of each answer; None: as many as there is room for.
        n: answers to each prompt.
        sampling: fields of `quantforge.runtime.sampling.Sampling` that are given.
        stop: strings that end an answer.
        include_stop: such a string is part of the text.
        ignore_eos: go on behind a token that ends answers.
        logprobs: tell log-probabilities, and of so many most likely tokens; None tells nothing.
        echo: the answer begins with the prompt.
        stream: tell the answer as it comes.
        include_usage: a stream ends with the count of tokens.
    """

    prompts: Sequence[str | tuple[int, ...] | Conversation]
    max_tokens: int | None
    n: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
