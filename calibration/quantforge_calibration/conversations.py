"""The conversation in a row of a data set: messages, and the other variables of its chat template.

A row has ``messages``, and may have ``tools``, ``documents`` and ``chat_template_kwargs``: the arguments of
transformers' ``apply_chat_template``. Each may be a JSON string of its value, as in tables where all values of a column
need the same type; so may an item of a list.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantforge_calibration.source_error import FILES, SourceError
from quantforge_files.roles import LINE

MESSAGES, TOOLS, DOCUMENTS, KWARGS = "messages", "tools", "documents", "chat_template_kwargs"
FIELDS = (MESSAGES, TOOLS, DOCUMENTS, KWARGS)
# Names that ``chat_template_kwargs`` may not contain: arguments that `apply_chat_template` does not pass on to the
# template, and variables of the template for which a row has its own fields.
RESERVED = frozenset(
    {
        "self", "conversation", MESSAGES, TOOLS, DOCUMENTS, "chat_template", "continue_final_message", "tokenize",
        "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
        "tokenizer_kwargs", "sanitize_control_tokens",
    }
)  # fmt: skip
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template.

    Attributes:
        messages: objects with the keys that the template reads, at least ``role`` and ``content``.
        tools: JSON schemas of functions; None for no tools.
        documents: sources for the answer (RAG); None for no documents.
        kwargs: further variables of the template; they override those of the model.
        where: the file and row, for error messages.
        file: the file alone.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    file: str = ""

    def given(self) -> dict[str, Any]:
        """Return the variables of the template by name, as transformers passes them."""
        return {
            MESSAGES: [_plain(message) for message in self.messages],
            TOOLS: self.tools,
            DOCUMENTS: self.documents,
            **self.kwargs,
        }

    def beside(self) -> list[str]:
        """Return the names of all variables that are set (not None), except the messages."""
        listed = {TOOLS: self.tools, DOCUMENTS: self.documents, **self.kwargs}
        return [name for name, value in listed.items() if value is not None]


def conversation(where: str, file: str, fields: Mapping[str, Any]) -> Conversation | None:
    """Return the conversation in a row; None if it has no messages.

    Raises:
        SourceError: a field has the wrong type, or as `check_names`; the message names the row.
    """
    messages = messages_in(where, fields)
    if not messages:
        return None
    kwargs = _value(where, KWARGS, fields.get(KWARGS))
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise _wrong(where, KWARGS, kwargs, "an object")
    check_names(where, kwargs or {})
    return Conversation(
        messages,
        _objects(where, TOOLS, fields.get(TOOLS)),
        _objects(where, DOCUMENTS, fields.get(DOCUMENTS)),
        kwargs or {},
        where,
        file,
    )


def messages_in(where: str, fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the messages in a row, an empty list if it has none; errors as `conversation`."""
    return _objects(where, MESSAGES, fields.get(MESSAGES)) or []


def check_names(where: str, kwargs: Iterable[str]) -> None:
    """Refuse names that cannot be variables of a chat template.

    Raises:
        SourceError: a name is in `RESERVED`.
    """
    for name in kwargs:
        if name in RESERVED:
            raise SourceError(
                f"{where}: {KWARGS} has {name!r}, which is no variable of a chat template",
                f"leave it out; {TOOLS} and {DOCUMENTS} stand beside {MESSAGES}",
            )


def _objects(where: str, name: str, value: Any) -> list[Mapping[str, Any]] | None:
    found = _value(where, name, value)
    if found is None:
        return None
    if not isinstance(found, list):
        raise _wrong(where, name, found, "a list of objects")
    items = [_value(where, f"{name}[{n}]", item) for n, item in enumerate(found)]
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise _wrong(where, f"{name}[{number}]", item, "an object")
    return items


def _value(where: str, name: str, value: Any) -> Any:
    """Return a value, parsed as JSON if it is a string; None for a blank string."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    data = value.encode(errors="surrogatepass")
    place = f"{where}: {name}"
    FILES.check_json(data, place, LINE)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{place} is a string that is not JSON: {error}",
            "write its value, or a JSON string of it",
        ) from error


def _wrong(where: str, name: str, value: Any, rule: str) -> SourceError:
    return SourceError(
        f"{where}: {name} is {type(value).__name__}", f"{rule} is expected, or a JSON string of it"
    )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null fields, and with its reasoning copied to each key that templates read it from."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}
