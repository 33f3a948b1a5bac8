"""Chat messages as a text, written by a model's chat template in jinja's sandbox.

A chat template is a program that arrives with the weights. jinja's immutable sandbox keeps it from reaching Python and
from changing what it is given; it sets no limit of time or memory. Nothing is rendered unless the user asks for it;
conversions carry templates unread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quantforge_calibration.chat_templates import DEFAULT, TOOL_USE, read_templates
from quantforge_calibration.conversations import Conversation
from quantforge_calibration.readers import UnusedColumns
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import read_tokenizer_config, token_text

TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
HINT = "use texts instead of messages, or leave chat_template = false"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The templates of a model by name, and the special tokens (``bos_token`` ...) that they may name.

    Attributes:
        named: at least one.
        tokens: text of each, by name.
        notes: templates of the model that are not used (see `quantforge_calibration.chat_templates`).
    """

    named: Mapping[str, str]
    tokens: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def text_for(self, conversation: Conversation) -> str:
        """Return the template that renders a conversation: ``tool_use`` where that has tools, else ``default``.

        Raises:
            SourceError: there is no default, or it is empty.
        """
        name = TOOL_USE if conversation.tools is not None and TOOL_USE in self.named else DEFAULT
        text = self.named.get(name)
        if text is None:
            raise SourceError(
                f"the model has chat templates {', '.join(sorted(self.named))} and no default", HINT
            )
        if not text.strip():
            raise SourceError(f"the chat template {name} of the model is empty", HINT)
        return text

    def render(
        self,
        conversation: Conversation,
        *,
        answer: bool = False,
        unused: UnusedColumns | None = None,
    ) -> str:
        """Render a conversation.

        Args:
            conversation: given to the template as transformers' ``apply_chat_template`` does.
            answer: whether the text ends where the model's answer begins.
            unused: takes the names of the conversation's variables that are nowhere in the template.

        Raises:
            SourceError: the template fails or is refused by the sandbox; or as `text_for`.
        """
        text = self.text_for(conversation)
        if unused is not None:
            names = (name for name in conversation.beside() if not _names(text, name))
            unused.add(conversation.file, names)
        variables = {"add_generation_prompt": answer, **self.tokens, **conversation.given()}
        try:
            return _compile(text).render(variables)
        except Exception as error:  # a template can raise whatever its expressions raise
            place = f"{conversation.where}: " if conversation.where else ""
            message = (
                f"{place}the chat template cannot be rendered: {type(error).__name__}: {error}"
            )
            raise SourceError(message, HINT) from error


def load_chat_template(model: Path, *, processor: bool = False) -> ChatTemplate:
    """Read the chat templates of a model.

    Raises:
        SourceError: it has none, or as `find_chat_template`.
    """
    found = find_chat_template(model, processor=processor)
    if found is None:
        raise SourceError(f"{model} has no chat template", HINT)
    return found


def find_chat_template(model: Path, *, processor: bool = False) -> ChatTemplate | None:
    """Read the chat templates of a model, None where there are none; ``processor`` as of `read_templates`.

    Raises:
        SourceError: as `read_templates`, or tokenizer_config.json is not a JSON object.
    """
    found = read_templates(model, processor=processor)
    if not found.named:
        return None
    config = read_tokenizer_config(model)
    tokens = {name: token_text(config, name) for name in TOKENS}
    given = {name: token for name, token in tokens.items() if token is not None}
    return ChatTemplate(found.named, given, found.notes)


@lru_cache(8)
def _compile(text: str) -> Template:
    """Compile a template in a sandbox with what published templates expect of ``transformers``."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise
    # The date is part of the text that is measured, and a result must not depend on the day.
    sandbox.globals["strftime_now"] = datetime(2024, 7, 26).strftime
    return sandbox.from_string(text)


class _Generation(Extension):
    """``{% generation %}``: marks the assistant's turns for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - as declared by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements up to ``endgeneration``."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _names(template: str, name: str) -> bool:
    """Return whether a template has the name of a variable anywhere in its text."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template) is not None
