"""Result types of text generation: texts, tokens, log-probabilities and timings. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

StopReason = Literal["end", "stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """A token and its log-probability.

    Attributes:
        id: token id.
        text: text of the token decoded alone; U+FFFD stands for an incomplete character.
        logprob: log-probability in nats from the raw logits, before temperature, penalties and truncation.
    """

    id: int
    text: str
    logprob: float

    def document(self) -> dict[str, Any]:
        """Return the token as JSON-serializable data with the field names of OpenAI's API."""
        return {"id": self.id, "token": self.text, "logprob": self.logprob}


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token with the most likely tokens at its position, in descending order of probability."""

    chosen: LikelyToken
    top: tuple[LikelyToken, ...]

    def document(self) -> dict[str, Any]:
        """Return the token as JSON-serializable data with the field names of OpenAI's API."""
        return {**self.chosen.document(), "top_logprobs": [item.document() for item in self.top]}


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """One completion of a prompt.

    Attributes:
        text: the text without special tokens and, by default, without the stop string.
        tokens: token ids of the text, including those of a stop string that ended it.
        stopped: why generation stopped. ``end``: an end-of-text or end-of-turn token; ``stop``: a stop string;
            ``length``: the token limit; ``interrupted``: the user.
        stop: the stop string that ended the text, if any.
        logprobs: log-probabilities of each token, if requested.
        score: beam search only: sum of log-probabilities divided by length^length_penalty.
    """

    text: str
    tokens: tuple[int, ...]
    stopped: StopReason
    stop: str | None = None
    logprobs: tuple[ScoredToken, ...] | None = None
    score: float | None = None

    def document(self) -> dict[str, Any]:
        """Return the completion as JSON-serializable data."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.stopped,
            "stop_sequence": self.stop,
            "logprobs": self.logprobs and [item.document() for item in self.logprobs],
            "score": self.score,
        }


@dataclass(frozen=True, slots=True)
class Generated:
    """Result of generating text for one prompt: the completions with token counts and timings.

    Attributes:
        model: name of the model as given by the caller.
        choices: the completions, at least one; for a beam search the best one first.
        templated: whether the prompt was rendered with the chat template; otherwise it was completed as plain text.
        decoder: which implementation ran the model: ``own`` (QuantForge's decoder) or ``transformers``.
        prompt_tokens: number of tokens in the prompt.
        prompt_seconds: time from the start to the first token.
        steps: tokens computed after the first one of each completion, end tokens included.
        step_seconds: total time of these steps.
        speculation: statistics of speculative decoding: ``passes``, ``guessed`` (drafted tokens), ``accepted``,
            ``acceptance``, ``tokens_per_pass``, and ``expected`` (tokens per pass predicted from the acceptance); None
            if it was not used.
        processor_share: fraction (0 to 1) of the requested CPU time that the threads received; None before the end,
            and on systems that do not report it.
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
        """Return the text of the first choice."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the token ids of the first choice."""
        return self.choices[0].tokens

    @property
    def stopped(self) -> StopReason:
        """Return why generation of the first choice stopped."""
        return self.choices[0].stopped

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Return the prefill speed in prompt tokens per second; None before the first token."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the decoding speed in tokens per second, without the first token; None if there are no others."""
        return self.steps / self.step_seconds if self.steps else None

    def document(self) -> dict[str, Any]:
        """Return the result as JSON-serializable data (a completion in a ``quantforge.generate/2`` document)."""
        return {
            "model": self.model,
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.stopped,
            "choices": [item.document() for item in self.choices],
            "chat_template": self.templated,
            "decoder": self.decoder,
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
            "speculation": self.speculation,
            "processor_share": self.processor_share,
        }
