"""Read the chat templates of a model by name from the file layouts in which models are published.

==============================================================  ==============================================
``chat_template.jinja``, ``additional_chat_templates/*.jinja``  the default, and one file for each other name
``chat_template`` in ``tokenizer_config.json``                  one text, or a list of names and texts
``chat_template`` in ``chat_template.json``                     the same, used by older multimodal processors
``chat_template`` in ``processor_config.json``                  the same, used by multimodal processors
==============================================================  ==============================================

A model may have several layouts at once, of which only one is used. transformers' tokenizers use the files of the first
line together, or else the key of the second; they do not read the others, which are used here only if there is nothing
else. transformers' processors use the fourth, or else the third, or else the first. A note names each unused layout
whose templates differ from those in use. If there are several templates, ``tool_use`` renders conversations with tools
and ``default`` all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quantforge_calibration.source_error import FILES, SourceError
from quantforge_files.roles import SETTINGS, TEMPLATE

TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
TOKENIZER_CONFIG, OLD_FILE, PROCESSOR_CONFIG = (
    "tokenizer_config.json",
    "chat_template.json",
    "processor_config.json",
)
TEMPLATE_KEY, DEFAULT, TOOL_USE = "chat_template", "default", "tool_use"
TEMPLATE_SUFFIX = ".jinja"
LAYOUTS = (TEMPLATE_FILE, TOKENIZER_CONFIG, OLD_FILE, PROCESSOR_CONFIG)
_PROCESSOR_LAYOUTS = (PROCESSOR_CONFIG, OLD_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG)


@dataclass(frozen=True, slots=True)
class TemplateSet:
    """The chat templates of a model.

    Attributes:
        templates: templates by name.
        source_file: file of the layout in use, one of `LAYOUTS`; "" if there are no templates.
        notes: notes on other templates that exist and are not used.
    """

    templates: Mapping[str, str]
    source_file: str = ""
    notes: tuple[str, ...] = ()


def read_templates(model: Path, *, processor: bool = False) -> TemplateSet:
    """Read the chat templates of a model directory; see `choose_templates`.

    Raises:
        SourceError: a file cannot be read, or as `choose_templates`.
    """
    names = [(name, SETTINGS) for name in (TOKENIZER_CONFIG, PROCESSOR_CONFIG)]
    names += [(name, TEMPLATE) for name in (TEMPLATE_FILE, OLD_FILE)]
    existing = [(name, role) for name, role in names if (model / name).is_file()]
    if (model / TEMPLATE_FOLDER).is_dir():
        folder_files = (
            f"{TEMPLATE_FOLDER}/{name}" for name in FILES.list_names(model / TEMPLATE_FOLDER, model)
        )
        existing += [(name, TEMPLATE) for name in folder_files if is_template(name)]
    files = {name: FILES.read(model / name, role, model) for name, role in existing}
    return choose_templates(files, model, processor=processor)


def choose_templates(
    files: Mapping[str, bytes], model: Path | str, *, processor: bool = False
) -> TemplateSet:
    """Choose the templates that transformers uses, given the files of a model.

    Args:
        files: contents by name within the model directory; files that belong to no layout are ignored.
        model: name of the model in messages.
        processor: choose as transformers' processors do, which use only ``default`` if it exists.

    Raises:
        SourceError: in the first layout that has templates, one is not text, or a list entry lacks its name or text;
            or a processor would refuse the combination of files.
    """
    chosen_templates: dict[str, str] = {}
    source_file, notes = "", []
    for layout in _PROCESSOR_LAYOUTS if processor else LAYOUTS:
        try:
            templates, layout_notes = _read_layout(layout, files, model)
        except SourceError as error:
            if not chosen_templates:
                raise
            notes.append(
                f"{error.message}; it is not used: transformers takes {_describe_layout(source_file)}"
            )
            continue
        differing = sorted(
            name
            for name, text in templates.items()
            if not _equal_templates(chosen_templates.get(name), text)
        )
        if not chosen_templates and templates:
            chosen_templates, source_file = templates, layout
            notes += layout_notes
        elif differing:
            notes.append(
                f"{layout}: its chat template {', '.join(differing)} is not used:"
                f" transformers takes {_describe_layout(source_file)}"
            )
    if (
        processor
        and source_file == OLD_FILE
        and any(is_template(file_name) and file_name != TEMPLATE_FILE for file_name in files)
    ):
        raise SourceError(
            f"{model}: {OLD_FILE} and {TEMPLATE_FOLDER}/ contradict each other: transformers' processors refuse them",
            f"rename the template of {OLD_FILE} to {TEMPLATE_FILE}",
        )
    if processor and DEFAULT in chosen_templates:
        chosen_templates = {DEFAULT: chosen_templates[DEFAULT]}
    return TemplateSet(chosen_templates, source_file, tuple(notes))


def _read_layout(
    layout: str, files: Mapping[str, bytes], model: Path | str
) -> tuple[dict[str, str], list[str]]:
    """Return the templates of one layout by name, and notes on conflicting templates with the same name.

    Raises:
        SourceError: as `parse_templates`.
    """
    templates: dict[str, str] = {}
    notes = []
    for name in sorted(files, key=lambda name: (name != TEMPLATE_FILE, name)):
        if name != layout and not (layout == TEMPLATE_FILE and is_template(name)):
            continue
        for template_name, text in parse_templates(name, files[name], f"{model}/{name}"):
            if templates.get(template_name, text) != text:
                notes.append(
                    f"{name}: another template {template_name!r} than before: the last one is used"
                )
            templates[template_name] = text
    return templates, notes


def is_template(name: str) -> bool:
    """Return whether a file, given by its name within a model directory, consists of one template."""
    path = PurePosixPath(name)
    return name == TEMPLATE_FILE or (
        path.parent.as_posix() == TEMPLATE_FOLDER and name.endswith(TEMPLATE_SUFFIX)
    )


def template_file_name(name: str) -> str:
    """Return the name of the file within a model directory that stores the template with a given name.

    Raises:
        ValueError: the name cannot be a file name.
    """
    if name == DEFAULT:
        return TEMPLATE_FILE
    if not name or not name.isprintable() or name in {".", ".."} or {*name} & {*"/\\:"}:
        raise ValueError(name)
    return f"{TEMPLATE_FOLDER}/{name}{TEMPLATE_SUFFIX}"


def parse_templates(name: str, data: bytes, display_name: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each template in one file of a model.

    Args:
        name: name of the file within the model directory.
        data: content of the file.
        display_name: name of the file in messages.

    Raises:
        SourceError: a template is not text, or a list entry lacks its name or text.
    """
    if is_template(name):
        template_name = (
            DEFAULT
            if name == TEMPLATE_FILE
            else PurePosixPath(name).name.removesuffix(TEMPLATE_SUFFIX)
        )
        try:
            yield template_name, data.decode()
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{display_name} cannot be read: {error}", "save the template as UTF-8"
            ) from error
        return
    value = FILES.parse_object(data, display_name, SETTINGS, loose=True).get(TEMPLATE_KEY)
    for template_name, text in _entries(value, display_name):
        if not isinstance(template_name, str) or not isinstance(text, str):
            raise SourceError(
                f"{display_name}: {TEMPLATE_KEY} holds {template_name!a:.60}"
                f" with a template that is {type(text).__name__}",
                'a text, or a list of {"name": "...", "template": "..."}',
            )
        yield template_name, text


def _entries(value: Any, display_name: str) -> Iterable[tuple[Any, Any]]:
    """Return pairs of template name and text from the value of the ``chat_template`` key."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return value.items()
    if not isinstance(value, list):
        return [(DEFAULT, value)]
    for number, item in enumerate(value):
        if not isinstance(item, Mapping) or not {"name", "template"} <= item.keys():
            raise SourceError(
                f"{display_name}: {TEMPLATE_KEY}[{number}] lacks a name or a template",
                'a list of {"name": "...", "template": "..."}',
            )
    return [(item["name"], item["template"]) for item in value]


def _equal_templates(first: str | None, second: str) -> bool:
    """Return whether two templates are equal apart from a final newline, which jinja drops."""
    return first is not None and first.removesuffix("\n") == second.removesuffix("\n")


def _describe_layout(source_file: str) -> str:
    """Describe a layout in messages by its files."""
    return (
        f"{TEMPLATE_FILE} and {TEMPLATE_FOLDER}/"
        if source_file == TEMPLATE_FILE
        else f"that of {source_file}"
    )
