"""Prompts as token ids: texts encoded, conversations rendered by the chat template in its sandbox."""

from __future__ import annotations

from collections.abc import Sequence

from quantforge.errors import InputError
from quantforge.http_api.api_error import ApiError, refusal
from quantforge.http_api.asked_answers import AskedAnswers, Turn
from quantforge.runtime.text_side import TextSide, as_input_errors
from quantforge_calibration.chat import ChatLimits, render

RENDERING = ChatLimits(cpu_seconds=10, wall_seconds=20.0)


def prompt_ids(side: TextSide, asked: AskedAnswers) -> list[tuple[int, ...]]:
    """Return the tokens of every prompt.

    Raises:
        ApiError: a prompt cannot be encoded or rendered, or has no token; the model has no chat template.
    """
    return [_ids(side, prompt) for prompt in asked.prompts]


def _ids(side: TextSide, prompt: str | tuple[int, ...] | list[Turn]) -> tuple[int, ...]:
    tokenizer = side.tokenizer
    if isinstance(prompt, tuple):
        return prompt
    if isinstance(prompt, str):
        ids = _encoded(side, prompt, "prompt")
        first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        ids = first + ids or ([] if tokenizer.eos_id is None else [tokenizer.eos_id])
        param = "prompt"
    else:
        ids, param = _rendered(side, prompt), "messages"
    if not ids:
        raise ApiError("the prompt has no token; say something", param=param, code="empty_prompt")
    return tuple(ids)


def _encoded(side: TextSide, text: str, param: str) -> list[int]:
    try:
        with as_input_errors():
            return side.tokenizer.encode(text)
    except InputError as error:
        raise refusal(error, param) from error


def _rendered(side: TextSide, turns: Sequence[Turn]) -> list[int]:
    if side.template is None:
        raise ApiError(
            "the model has no chat template, so it cannot be shown a conversation; send a text to /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    try:
        with as_input_errors("/v1/completions takes a text as it is"):
            (text,) = render(
                side.template, [[dict(turn) for turn in turns]], RENDERING, answer=True
            )
            return side.tokenizer.encode_all(text)
    except InputError as error:
        raise refusal(error, "messages", "chat_template") from error
