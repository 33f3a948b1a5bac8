"""Generated texts: what `generate` returns, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Stopped = Literal["end", "stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """A token and its log-probability.

    Attributes:
        id: of the token.
        text: of the token by itself; U+FFFD stands for a part of a character.
        logprob: in nats, by the model itself: without temperature, penalties and cut-offs.
    """

    id: int
    text: str
    logprob: float

    def document(self) -> dict[str, Any]:
        """Return it as plain data, in the words of OpenAI's API."""
        return {"id": self.id, "token": self.text, "logprob": self.logprob}


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a text, and the most likely ones in its place, the most likely one first."""

    chosen: LikelyToken
    top: tuple[LikelyToken, ...]

    def document(self) -> dict[str, Any]:
        """Return it as plain data, in the words of OpenAI's API."""
        return {**self.chosen.document(), "top_logprobs": [one.document() for one in self.top]}


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """One of the texts that a model has written after a prompt.

    Attributes:
        text: without special tokens, and without the string that ended it.
        tokens: ids of the text, of a string that ended it too.
        stopped: ``end``: by a token that ends texts or turns; ``stop``: by a stop string; ``length``: by the limit;
            ``interrupted``: by a person.
        stop: the stop string that ended it.
        logprobs: of each token, where they were asked for.
        score: of a beam search: sum of log-probabilities over length^length_penalty.
    """

    text: str
    tokens: tuple[int, ...]
    stopped: Stopped
    stop: str | None = None
    logprobs: tuple[ScoredToken, ...] | None = None
    score: float | None = None

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "stopped": self.stopped,
            "stop": self.stop,
            "logprobs": self.logprobs and [one.document() for one in self.logprobs],
            "score": self.score,
        }


@dataclass(frozen=True, slots=True)
class Generated:
    """Texts that a model has written after a prompt.

    Attributes:
        model: as it was named.
        choices: the texts, at least one; of a beam search the best one first.
        templated: whether the chat template has rendered the prompt; else it was completed as text.
        decoder: ``own`` or ``transformers``.
        prompt_tokens: how many the prompt has.
        prompt_seconds: from the beginning to the first token.
        steps: tokens that were computed after the first one of each text, one that ended it included.
        step_seconds: of all steps together.
        speculation: what came of drafted tokens: ``passes``, ``guessed``, ``accepted``, ``acceptance``,
            ``tokens_per_pass``, and what the acceptance lets expect, ``expected``; None without.
        processor_share: share of the processor time that the threads asked for and got, from 0 to 1; None before the
            end, and where the system does not count it.
    """

    model: str
    choices: tuple[GeneratedText, ...]
    templated: bool
    decoder: str
    prompt_tokens: int
    prompt_seconds: float
    steps: int
    step_seconds: float
    speculation: dict[str, float | None] | None = None
    processor_share: float | None = None

    @property
    def text(self) -> str:
        """Return the first text."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens of the first text."""
        return self.choices[0].tokens

    @property
    def stopped(self) -> Stopped:
        """Return why the first text ended."""
        return self.choices[0].stopped

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Return the tokens of the prompt per second until the first token; None before there was one."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens per second after the first one; None without any."""
        return self.steps / self.step_seconds if self.steps else None

    def document(self) -> dict[str, Any]:
        """Return texts and figures as plain data (an answer of ``quantforge.generate/1``)."""
        return {
            "model": self.model,
            "text": self.text,
            "tokens": list(self.tokens),
            "stopped": self.stopped,
            "choices": [one.document() for one in self.choices],
            "templated": self.templated,
            "decoder": self.decoder,
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
            "speculation": self.speculation,
            "processor_share": self.processor_share,
        }
