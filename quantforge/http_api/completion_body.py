"""Bodies of ``/v1/completions``: texts or token ids to continue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.http_api.api_error import ApiError
from quantforge.http_api.asked_answers import AskedAnswers
from quantforge.http_api.body_values import text, wrong
from quantforge.http_api.request_fields import COMPLETION, MOST_ANSWERS, SAMPLING, fields

DEFAULT_TOKENS = 16  # OpenAI's
RULE = "a string, a list of strings, a list of token ids, or a list of such lists"


def completion(body: Mapping[str, Any], served: str) -> AskedAnswers:
    """Return what a body asks for; errors as `fields`."""
    found = fields(body, COMPLETION, served)
    if "prompt" not in found:
        raise ApiError(f"prompt is missing: {RULE}", param="prompt", code="missing")
    prompts = _prompts(found["prompt"])
    asked = AskedAnswers(
        prompts=prompts,
        max_tokens=found.get("max_tokens", DEFAULT_TOKENS),
        n=found.get("n", 1),
        sampling={name: found[name] for name in SAMPLING if name in found},
        stop=found.get("stop", ()),
        include_stop=found.get("include_stop_str_in_output", False),
        ignore_eos=found.get("ignore_eos", False),
        logprobs=found.get("logprobs"),
        echo=found.get("echo", False),
        stream=found.get("stream", False),
        include_usage=found.get("stream_options", False),
    )
    if len(prompts) * asked.n > MOST_ANSWERS:
        raise ApiError(
            f"{len(prompts)} prompts with n = {asked.n} ask for over {MOST_ANSWERS} answers; send several requests",
            param="n" if asked.n > 1 else "prompt",
            code="too_many_answers",
        )
    if not asked.max_tokens and not asked.echo:
        raise ApiError("max_tokens is 0; that needs echo", param="max_tokens", code="invalid_value")
    return asked


def _prompts(value: Any) -> list[str | tuple[int, ...]]:
    if isinstance(value, str):
        return [text("prompt", value)]
    if not isinstance(value, list) or not value:
        raise wrong("prompt", value, RULE)
    if type(value[0]) is int:
        return [_ids(value)]
    return [_ids(one) if isinstance(one, list) else text("prompt", one) for one in value]


def _ids(value: list[Any]) -> tuple[int, ...]:
    if not value:
        raise wrong("prompt", value, "a list with a token id at least")
    for one in value:
        if type(one) is not int or one < 0:
            raise wrong("prompt", one, "a token id")
    return tuple(value)
