"""Bodies of ``/v1/chat/completions``: a conversation to answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.http_api.api_error import NOT_SUPPORTED, ApiError
from quantforge.http_api.asked_answers import AskedAnswers
from quantforge.http_api.body_values import escaped, text, wrong
from quantforge.http_api.request_fields import CHAT, SAMPLING, fields
from quantforge_calibration.conversations import Conversation

# "developer" is the later name of "system", which templates know.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
EMPTY: tuple[object, ...] = (None, [], "")


def conversation(body: Mapping[str, Any], served: str) -> AskedAnswers:
    """Return what a body asks for; errors as `fields`."""
    found = fields(body, CHAT, served)
    limits = {found[name] for name in ("max_tokens", "max_completion_tokens") if name in found}
    if len(limits) > 1:
        raise ApiError(
            "max_tokens and max_completion_tokens differ; send one",
            param="max_tokens",
            code="invalid_value",
        )
    if 0 in limits:
        raise wrong("max_tokens", 0, "a whole number from 1 on")
    top = found.get("top_logprobs")
    if top is not None and not found.get("logprobs", False):
        raise ApiError(
            'top_logprobs needs "logprobs": true', param="top_logprobs", code="invalid_value"
        )
    return AskedAnswers(
        prompts=[
            Conversation(
                _turns(found.get("messages")),
                documents=found.get("documents"),
                kwargs=found.get("chat_template_kwargs", {}),
            )
        ],
        max_tokens=next(iter(limits), None),
        n=found.get("n", 1),
        sampling={name: found[name] for name in SAMPLING if name in found},
        stop=found.get("stop", ()),
        include_stop=found.get("include_stop_str_in_output", False),
        ignore_eos=found.get("ignore_eos", False),
        logprobs=(top or 0) if found.get("logprobs") else None,
        stream=found.get("stream", False),
        include_usage=found.get("stream_options", False),
    )


def _turns(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, 'a list of {"role": ..., "content": ...}')
    return [_turn(f"messages[{number}]", message) for number, message in enumerate(messages)]


def _turn(place: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise wrong(place, message, 'an object {"role": ..., "content": ...}')
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        if role in {"tool", "function"}:
            raise ApiError(
                f"{place}.role {role!a} is not supported here", param="messages", code=NOT_SUPPORTED
            )
        raise wrong(f"{place}.role", role, f"one of {', '.join(ROLES)}")
    for name, value in message.items():
        if name not in {"role", "content"} and value not in EMPTY:
            raise ApiError(
                f"{place}.{escaped(name)[:60]} is not supported here; leave it out",
                param="messages",
                code=NOT_SUPPORTED,
            )
    return {"role": ROLES[role], "content": _content(f"{place}.content", message.get("content"))}


def _content(place: str, content: Any) -> str:
    if not isinstance(content, list):
        return text(place, content)
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            if isinstance(kind, str):
                raise ApiError(
                    f"{place} has a part of type {kind!a:.60}, which is not supported here; send text",
                    param="messages",
                    code=NOT_SUPPORTED,
                )
            raise wrong(place, part, 'a part {"type": "text", "text": ...}')
        found.append(text(place, part.get("text")))
    return "".join(found)
