"""Fields of a body: those that are read, those that mean nothing here, and those that are refused by name.

A field that would change the answer is never passed over. ``null`` is the same as nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quantforge.errors import nearest
from quantforge.http_api.api_error import NOT_SUPPORTED, ApiError
from quantforge.http_api.body_values import (
    Check,
    bias,
    documents,
    escaped,
    flag,
    sampled,
    stops,
    stream_options,
    template_kwargs,
    text,
    whole,
)
from quantforge.runtime.sampling_options import MOST_LOGPROBS

MOST_ANSWERS = 128  # of one request
COMMON: Mapping[str, Check] = {
    "model": text,
    "max_tokens": whole(0),
    "n": whole(1, MOST_ANSWERS),
    "temperature": sampled,
    "top_p": sampled,
    "top_k": sampled,
    "min_p": sampled,
    "seed": sampled,
    "repetition_penalty": sampled,
    "frequency_penalty": sampled,
    "presence_penalty": sampled,
    "logit_bias": bias,
    "stop": stops,
    "include_stop_str_in_output": flag,
    "ignore_eos": flag,
    "stream": flag,
    "stream_options": stream_options,
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "frequency_penalty",
            "presence_penalty", "logit_bias")  # fmt: skip
COMPLETION: Mapping[str, Check] = {
    **COMMON,
    "prompt": lambda _, value: value,
    "logprobs": whole(0, MOST_LOGPROBS),
    "echo": flag,
}
CHAT: Mapping[str, Check] = {
    **COMMON,
    "messages": lambda _, value: value,
    "documents": documents,
    "chat_template_kwargs": template_kwargs,
    "max_completion_tokens": whole(1),
    "logprobs": flag,
    "top_logprobs": whole(0, MOST_LOGPROBS),
}
# Who asks, and how servers of others may keep or route it.
MEANINGLESS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
    }
)
# Refused, with values that ask for nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


def fields(body: Mapping[str, Any], known: Mapping[str, Check], served: str) -> dict[str, Any]:
    """Return the values of a body that are read, checked.

    Args:
        body: the object.
        known: which fields are read.
        served: name of the model.

    Raises:
        ApiError: a field that is not known or not supported, a value that is refused, or another model.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in known or name in MEANINGLESS:
            continue
        if name in REFUSED:
            if any(type(value) is type(one) and value == one for one in REFUSED[name]):
                continue
            raise ApiError(
                f"{name} is not supported here; leave it out", param=name, code=NOT_SUPPORTED
            )
        shown = escaped(name)[:60]
        raise ApiError(
            f"no field '{shown}': {nearest(name[:60], known)}", param=shown, code="unknown_field"
        )
    if "model" not in given:
        raise ApiError(
            f'model is missing: send "model": {json.dumps(served)}', param="model", code="missing"
        )
    found = {name: known[name](name, value) for name, value in given.items() if name in known}
    if found["model"] != served:
        raise ApiError(
            f"no model {found['model']!a:.100} is served here; it is {served!a}",
            404,
            "model",
            "model_not_found",
        )
    return found
