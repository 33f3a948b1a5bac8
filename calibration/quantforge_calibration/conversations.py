"""Parse the conversation in a row of a dataset: messages, and other variables of the chat template.

A row has ``messages``, and may have ``tools``, ``documents`` and ``chat_template_kwargs``: the arguments of
transformers' ``apply_chat_template``. Each may be a JSON string of its value, as in tables where all values of a column
have the same type; so may each item of a list.
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

    def template_variables(self) -> dict[str, Any]:
        """Return the variables of the template by name, as transformers passes them."""
        return {
            MESSAGES: [_normalize_message(message) for message in self.messages],
            TOOLS: self.tools,
            DOCUMENTS: self.documents,
            **self.kwargs,
        }

    def extra_variables(self) -> list[str]:
        """Return the names of all variables that are set (not None), except the messages."""
        variables = {TOOLS: self.tools, DOCUMENTS: self.documents, **self.kwargs}
        return [name for name, value in variables.items() if value is not None]


def conversation(where: str, file: str, fields: Mapping[str, Any]) -> Conversation | None:
    """Parse the conversation in a row; return None if it has no messages.

    Args:
        where: file and row, for error messages.
        file: name of the file.
        fields: fields of the row.

    Raises:
        SourceError: a field has the wrong type, or as `check_names`; the message names the row.
    """
    messages = messages_in(where, fields)
    if not messages:
        return None
    kwargs = _value(where, KWARGS, fields.get(KWARGS))
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise _type_error(where, KWARGS, kwargs, "an object")
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
    """Return the messages in a row, [] if it has none; raises as `conversation` does."""
    return _objects(where, MESSAGES, fields.get(MESSAGES)) or []


def check_names(where: str, kwargs: Iterable[str]) -> None:
    """Check that names can be variables of a chat template.

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
    """Parse a field that must be a list of objects; return None if it is missing."""
    parsed = _value(where, name, value)
    if parsed is None:
        return None
    if not isinstance(parsed, list):
        raise _type_error(where, name, parsed, "a list of objects")
    objects = [_value(where, f"{name}[{index}]", item) for index, item in enumerate(parsed)]
    for number, item in enumerate(objects):
        if not isinstance(item, Mapping):
            raise _type_error(where, f"{name}[{number}]", item, "an object")
    return objects


def _value(where: str, name: str, value: Any) -> Any:
    """Return a value, parsed as JSON if it is a string; None for a blank string."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    data = value.encode(errors="surrogatepass")
    location = f"{where}: {name}"
    FILES.check_json(data, location, LINE)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{location} is a string that is not JSON: {error}",
            "write its value, or a JSON string of it",
        ) from error


def _type_error(where: str, name: str, value: Any, expected: str) -> SourceError:
    """Return the error for a value of the wrong type."""
    return SourceError(
        f"{where}: {name} is {type(value).__name__}",
        f"{expected} is expected, or a JSON string of it",
    )


def _normalize_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Remove null fields from a message, and copy its reasoning to each key that templates read it from."""
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}
