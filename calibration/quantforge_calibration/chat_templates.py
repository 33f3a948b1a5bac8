"""Chat templates of a model by name, from every layout in which models are published.

==============================================================  ==============================================
``chat_template.jinja``, ``additional_chat_templates/*.jinja``  the default, and one file for each other name
``chat_template`` in ``tokenizer_config.json``                  one text, or a list of names and texts
``chat_template`` in ``chat_template.json``                     as processors of images had it
``chat_template`` in ``processor_config.json``                  the same, in settings of a processor
==============================================================  ==============================================

Several layouts may be there at once. transformers' tokenizers take the files of the first line together, and without
any the key of the second; they do not read the others, which count here where there is nothing else. Its processors
take the fourth, then the third, then the first. Of the layouts that are not taken, whatever says something else is a
note. Of several templates, ``tool_use`` renders a conversation with tools, ``default`` any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quantforge_calibration.opening import FILES
from quantforge_calibration.source_error import SourceError
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
    """Templates by name, the file or key that has them, and what other layouts say otherwise."""

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
    """Return the templates that transformers takes of the files of a model.

    Args:
        files: by name inside of the model; other files than those of the layouts are passed over.
        model: for messages.
        processor: take what a processor takes, with the default alone, instead of what a tokenizer takes.

    Raises:
        SourceError: a template is not text, an entry of a list lacks its name or text, or a processor would refuse the
            combination.
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
    """Return the templates of one layout by name, and notes where two of them have one name; errors as `stated`."""
    named: dict[str, str] = {}
    notes = []
    for name in sorted(files, key=lambda name: (name != FILE, name)):
        if name != layout and not (layout == FILE and is_template(name)):
            continue
        for called, text in stated(name, files[name], f"{model}/{name}"):
            if named.get(called, text) != text:
                notes.append(
                    f"{name}: another template {called!r} than before: the last one is used"
                )
            named[called] = text
    return named, notes


def is_template(name: str) -> bool:
    """Return whether a file, by its name inside of a model, is one template and nothing else."""
    path = PurePosixPath(name)
    return name == FILE or (path.parent.as_posix() == FOLDER and name.endswith(SUFFIX))


def file_of(name: str) -> str:
    """Return the file, inside of a model, for a template of this name.

    Raises:
        ValueError: the name is no name for a file.
    """
    if name == DEFAULT:
        return FILE
    if not name or not name.isprintable() or name in {".", ".."} or {*name} & {*"/\\:"}:
        raise ValueError(name)
    return f"{FOLDER}/{name}{SUFFIX}"


def stated(name: str, data: bytes, shown: str) -> Iterator[tuple[str, str]]:
    """Yield the templates in one file of a model, each with its name.

    Args:
        name: of the file, inside of the model.
        data: its content.
        shown: the file in messages.

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
    """Return whether two texts are one template: Jinja drops the last newline."""
    return one is not None and one.removesuffix("\n") == other.removesuffix("\n")


def _shown(place: str) -> str:
    return f"{FILE} and {FOLDER}/" if place == FILE else f"that of {place}"
