"""Render chat messages as text with a model's chat template in jinja's sandbox.

A chat template is a program that comes with the weights. jinja's immutable sandbox prevents it from reaching Python or
modifying its arguments, but limits neither time nor memory. Templates are rendered only if the user asks for it;
conversions copy them without running them.
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

SPECIAL_TOKENS = (
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
    """The chat templates of a model and the special tokens (``bos_token`` ...) that they may use.

    Attributes:
        templates: templates by name, at least one.
        special_tokens: text of the special tokens by name.
        notes: templates of the model that are not used (see `quantforge_calibration.chat_templates`).
    """

    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def template_for(self, conversation: Conversation) -> str:
        """Return the template for a conversation: ``tool_use`` if it has tools and the model has one, else ``default``.

        Raises:
            SourceError: there is no default template, or it is empty.
        """
        name = (
            TOOL_USE if conversation.tools is not None and TOOL_USE in self.templates else DEFAULT
        )
        template = self.templates.get(name)
        if template is None:
            raise SourceError(
                f"the model has chat templates {', '.join(sorted(self.templates))} and no default",
                HINT,
            )
        if not template.strip():
            raise SourceError(f"the chat template {name} of the model is empty", HINT)
        return template

    def render(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = False,
        unused: UnusedColumns | None = None,
    ) -> str:
        """Render a conversation as text.

        Args:
            conversation: variables of the template, as transformers' ``apply_chat_template`` passes them.
            add_generation_prompt: whether the text ends where the model's answer begins.
            unused: collects the names of the conversation's variables that do not occur in the template.

        Raises:
            SourceError: the template fails or is refused by the sandbox; or as `template_for`.
        """
        template = self.template_for(conversation)
        if unused is not None:
            unused_names = (
                name for name in conversation.extra_variables() if not _mentions(template, name)
            )
            unused.add(conversation.file, unused_names)
        variables = {
            "add_generation_prompt": add_generation_prompt,
            **self.special_tokens,
            **conversation.template_variables(),
        }
        try:
            return _compile(template).render(variables)
        except Exception as error:  # a template can raise whatever its expressions raise
            prefix = f"{conversation.where}: " if conversation.where else ""
            message = (
                f"{prefix}the chat template cannot be rendered: {type(error).__name__}: {error}"
            )
            raise SourceError(message, HINT) from error


def load_chat_template(model: Path, *, processor: bool = False) -> ChatTemplate:
    """Read the chat templates of a model.

    Raises:
        SourceError: it has none, or as `find_chat_template`.
    """
    template = find_chat_template(model, processor=processor)
    if template is None:
        raise SourceError(f"{model} has no chat template", HINT)
    return template


def find_chat_template(model: Path, *, processor: bool = False) -> ChatTemplate | None:
    """Read the chat templates of a model; return None if there are none.

    Args:
        model: directory of the model.
        processor: choose as transformers' processors do, see `read_templates`.

    Raises:
        SourceError: as `read_templates`, or tokenizer_config.json is not a JSON object.
    """
    template_set = read_templates(model, processor=processor)
    if not template_set.templates:
        return None
    config = read_tokenizer_config(model)
    tokens = {name: token_text(config, name) for name in SPECIAL_TOKENS}
    defined_tokens = {name: token for name, token in tokens.items() if token is not None}
    return ChatTemplate(template_set.templates, defined_tokens, template_set.notes)


@lru_cache(8)
def _compile(text: str) -> Template:
    """Compile a template in a sandbox with the filters and functions that ``transformers`` provides."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    # A fixed date, because the date becomes part of the calibration text and results must not depend on the day.
    sandbox.globals["strftime_now"] = datetime(2024, 7, 26).strftime
    return sandbox.from_string(text)


class _GenerationTag(Extension):
    """jinja extension for ``{% generation %}``, which marks assistant turns for training; renders its content."""

    tags = {"generation"}  # noqa: RUF012 - as declared by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements up to ``endgeneration``."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert a value to JSON as transformers' ``tojson`` filter does, without escaping HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    """Raise an error with the message of the template."""
    raise TemplateError(message)


def _mentions(template: str, name: str) -> bool:
    """Return whether the name of a variable occurs anywhere in the text of a template."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template) is not None
