"""A generated text: what `generate` returns, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Stopped = Literal["end", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class Generated:
    """A text that a model has written behind a prompt.

    Attributes:
        model: as it was named.
        text: without special tokens.
        tokens: ids of the text.
        stopped: ``end``: by a token that ends texts or turns; ``length``: by the limit; ``interrupted``: by a person.
        templated: whether the chat template has rendered the prompt; else it was completed as text.
        decoder: ``own`` or ``transformers``.
        prompt_tokens: how many the prompt has.
        prompt_seconds: from the beginning to the first token.
        steps: tokens that were computed after the first one, a last one that ended the text included.
        step_seconds: of all steps together.
    """

    model: str
    text: str
    tokens: tuple[int, ...]
    stopped: Stopped
    templated: bool
    decoder: str
    prompt_tokens: int
    prompt_seconds: float
    steps: int
    step_seconds: float

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Return the tokens of the prompt per second until the first token; None before there was one."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens per second behind the first one; None without any."""
        return self.steps / self.step_seconds if self.steps else None

    def document(self) -> dict[str, Any]:
        """Return the text and its figures as plain data (an answer of ``quantforge.generate/1``)."""
        return {
            "model": self.model,
            "text": self.text,
            "tokens": list(self.tokens),
            "stopped": self.stopped,
            "templated": self.templated,
            "decoder": self.decoder,
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
        }
