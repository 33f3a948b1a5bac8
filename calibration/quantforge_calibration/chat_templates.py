"""Chat templates of a model by name, from each of the file layouts in which models are published.

==============================================================  ==============================================
``chat_template.jinja``, ``additional_chat_templates/*.jinja``  the default, and one file for each other name
``chat_template`` in ``tokenizer_config.json``                  one text, or a list of names and texts
``chat_template`` in ``chat_template.json``                     the same, of older multimodal processors
``chat_template`` in ``processor_config.json``                  the same, of multimodal processors
==============================================================  ==============================================

A model may have several layouts at once, and only one is used. transformers' tokenizers use the files of the first
line together, or else the key of the second; they do not read the others, which are used here if nothing else is there.
transformers' processors use the fourth, or else the third, or else the first. A note names each unused layout whose
templates differ from those in use. If there are several templates, ``tool_use`` renders conversations with tools and
``default`` all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quantforge_calibration.source_error import FILES, SourceError
from quantforge_files.roles import SETTINGS, TEMPLATE

FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
TOKENIZER_CONFIG, OLDER_FILE, PROCESSOR = (
    "tokenizer_config.json",
    "chat_template.json",
    "processor_config.json",
)
KEY, DEFAULT, TOOL_USE = "chat_template", "default", "tool_use"
SUFFIX = ".jinja"
LAYOUTS = (FILE, TOKENIZER_CONFIG, OLDER_FILE, PROCESSOR)
_LAYOUTS_OF_PROCESSORS = (PROCESSOR, OLDER_FILE, FILE, TOKENIZER_CONFIG)


@dataclass(frozen=True, slots=True)
class TemplateSet:
    """The chat templates of a model.

    Attributes:
        named: templates by name.
        place: the file of the layout in use, one of `LAYOUTS`; "" if there is no template.
        notes: which other templates are there and not used.
    """

    named: Mapping[str, str]
    place: str = ""
    notes: tuple[str, ...] = ()


def read_templates(model: Path, *, processor: bool = False) -> TemplateSet:
    """Read the chat templates of a model directory; see `choose`.

    Raises:
        SourceError: a file cannot be read, or as `choose`.
    """
    names = [(name, SETTINGS) for name in (TOKENIZER_CONFIG, PROCESSOR)]
    names += [(name, TEMPLATE) for name in (FILE, OLDER_FILE)]
    found = [(name, role) for name, role in names if (model / name).is_file()]
    if (model / FOLDER).is_dir():
        inner = (f"{FOLDER}/{name}" for name in FILES.listing(model / FOLDER, model))
        found += [(name, TEMPLATE) for name in inner if is_template(name)]
    files = {name: FILES.read(model / name, role, model) for name, role in found}
    return choose(files, model, processor=processor)


def choose(
    files: Mapping[str, bytes], model: Path | str, *, processor: bool = False
) -> TemplateSet:
    """Return the templates that transformers uses, given the files of a model.

    Args:
        files: contents by name inside of the model; files of no layout are ignored.
        model: its name in messages.
        processor: choose as transformers' processors do, which use only ``default`` if it exists, not as tokenizers do.

    Raises:
        SourceError: in the first layout that has templates, one is not text, or a list entry lacks its name or text;
            or a processor would refuse the combination of files.
    """
    taken: dict[str, str] = {}
    place, notes = "", []
    for layout in _LAYOUTS_OF_PROCESSORS if processor else LAYOUTS:
        try:
            named, said = _layout(layout, files, model)
        except SourceError as error:
            if not taken:
                raise
            notes.append(f"{error.message}; it is not used: transformers takes {_shown(place)}")
            continue
        differ = sorted(name for name, text in named.items() if not _same(taken.get(name), text))
        if not taken and named:
            taken, place = named, layout
            notes += said
        elif differ:
            notes.append(
                f"{layout}: its chat template {', '.join(differ)} is not used: transformers takes {_shown(place)}"
            )
    if processor and place == OLDER_FILE and any(is_template(n) and n != FILE for n in files):
        raise SourceError(
            f"{model}: {OLDER_FILE} and {FOLDER}/ contradict each other: transformers' processors refuse them",
            f"rename the template of {OLDER_FILE} to {FILE}",
        )
    if processor and DEFAULT in taken:
        taken = {DEFAULT: taken[DEFAULT]}
    return TemplateSet(taken, place, tuple(notes))


def _layout(
    layout: str, files: Mapping[str, bytes], model: Path | str
) -> tuple[dict[str, str], list[str]]:
    """Return the templates of one layout by name, and notes on different ones of the same name; errors as `stated`."""
    named: dict[str, str] = {}
    notes = []
    for name in sorted(files, key=lambda name: (name != FILE, name)):
        if name != layout and not (layout == FILE and is_template(name)):
            continue
        for template, text in stated(name, files[name], f"{model}/{name}"):
            if named.get(template, text) != text:
                notes.append(
                    f"{name}: another template {template!r} than before: the last one is used"
                )
            named[template] = text
    return named, notes


def is_template(name: str) -> bool:
    """Return whether a file, given by its name inside of a model, consists of one template."""
    path = PurePosixPath(name)
    return name == FILE or (path.parent.as_posix() == FOLDER and name.endswith(SUFFIX))


def file_of(name: str) -> str:
    """Return the file inside of a model that holds the template of this name.

    Raises:
        ValueError: the name cannot be a file name.
    """
    if name == DEFAULT:
        return FILE
    if not name or not name.isprintable() or name in {".", ".."} or {*name} & {*"/\\:"}:
        raise ValueError(name)
    return f"{FOLDER}/{name}{SUFFIX}"


def stated(name: str, data: bytes, shown: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each template in one file of a model.

    Args:
        name: of the file, inside of the model.
        data: its content.
        shown: how messages name the file.

    Raises:
        SourceError: a template is not text, or an entry of a list lacks its name or text.
    """
    if is_template(name):
        called = DEFAULT if name == FILE else PurePosixPath(name).name.removesuffix(SUFFIX)
        try:
            yield called, data.decode()
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{shown} cannot be read: {error}", "save the template as UTF-8"
            ) from error
        return
    value = FILES.parse_object(data, shown, SETTINGS, loose=True).get(KEY)
    for called, text in _entries(value, shown):
        if not isinstance(called, str) or not isinstance(text, str):
            raise SourceError(
                f"{shown}: {KEY} holds {called!a:.60} with a template that is {type(text).__name__}",
                'a text, or a list of {"name": "...", "template": "..."}',
            )
        yield called, text


def _entries(value: Any, shown: str) -> Iterable[tuple[Any, Any]]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return value.items()
    if not isinstance(value, list):
        return [(DEFAULT, value)]
    for number, item in enumerate(value):
        if not isinstance(item, Mapping) or not {"name", "template"} <= item.keys():
            raise SourceError(
                f"{shown}: {KEY}[{number}] lacks a name or a template",
                'a list of {"name": "...", "template": "..."}',
            )
    return [(item["name"], item["template"]) for item in value]


def _same(one: str | None, other: str) -> bool:
    """Return whether two templates are equal but for a final newline, which Jinja drops."""
    return one is not None and one.removesuffix("\n") == other.removesuffix("\n")


def _shown(place: str) -> str:
    return f"{FILE} and {FOLDER}/" if place == FILE else f"that of {place}"
