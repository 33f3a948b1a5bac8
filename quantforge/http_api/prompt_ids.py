"""Prompts as token ids: texts encoded, conversations rendered by the chat template in its sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quantforge.errors import InputError
from quantforge.http_api.api_error import ApiError, refusal
from quantforge.http_api.asked_answers import AskedAnswers
from quantforge.runtime.text_side import TextSide, as_input_errors
from quantforge_calibration.chat import ChatLimits, render
from quantforge_calibration.conversations import Conversation

RENDERING = ChatLimits(cpu_seconds=10, wall_seconds=20.0)


def prompt_ids(side: TextSide, asked: AskedAnswers) -> list[tuple[int, ...]]:
    """Return the tokens of every prompt; those that have a bias are checked likewise.

    Raises:
        ApiError: a prompt cannot be encoded or rendered, or has no token; the model has no chat template, or no
            embedding for a token.
    """
    with _refusals("logit_bias"):
        side.tokenizer.check(asked.sampling.get("logit_bias", ()), "logit_bias")
    several = len(asked.prompts) > 1
    return [
        _ids(side, prompt, f"prompt[{number}]" if several else "prompt")
        for number, prompt in enumerate(asked.prompts)
    ]


def _ids(
    side: TextSide, prompt: str | tuple[int, ...] | Conversation, place: str
) -> tuple[int, ...]:
    tokenizer = side.tokenizer
    if isinstance(prompt, tuple):
        with _refusals("prompt"):
            tokenizer.check(prompt, place)
        return prompt
    if isinstance(prompt, str):
        with _refusals("prompt"):
            ids = tokenizer.encode(prompt, place)
        first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        ids = first + ids or ([] if tokenizer.eos_id is None else [tokenizer.eos_id])
        param = "prompt"
    else:
        ids, param = _rendered(side, prompt), "messages"
    if not ids:
        raise ApiError("the prompt has no token; say something", param=param, code="empty_prompt")
    return tuple(ids)


@contextmanager
def _refusals(param: str, code: str | None = None, hint: str = "") -> Iterator[None]:
    """Turn a `SourceError` into the refusal of a field."""
    try:
        with as_input_errors(hint):
            yield
    except InputError as error:
        raise refusal(error, param, code) from error


def _rendered(side: TextSide, talk: Conversation) -> list[int]:
    if side.template is None:
        raise ApiError(
            "the model has no chat template, so it cannot be shown a conversation; send a text to /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    with _refusals("messages", "chat_template", "/v1/completions takes a text as it is"):
        (text,) = render(side.template, [talk], RENDERING, answer=True)
    with _refusals("messages"):
        return side.tokenizer.encode_all(text, "messages, in the model's chat template")
