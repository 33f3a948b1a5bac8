"""Documents of text with images, out of ``.jsonl``: a text or chat messages, and the files of images that belong to it.

A row names its images in ``image`` (one) or ``images`` (a list), as paths from the folder of the ``.jsonl``; a part of
a chat message of the type ``image`` names its own, or takes the next of the row's list. An address of the network is
never asked for, and a path leads down from that folder. A row without images is a text like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from quantforge_calibration.conversations import messages_in
from quantforge_calibration.opening import FILES
from quantforge_calibration.readers import Record, RowReader, UnusedColumns, json_lines
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.sources import Source, files_of, read_file
from quantforge_files.roles import IMAGE, TEXT

FIELDS = ("images", "image")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
COPY = "copy the processor files of the original model: " + ", ".join(PROCESSOR_FILES)
INSTALL = "pip install 'quantforge[images]'"
_PART = "image"  # the type of a part of a message, and of what a template is given in its place
_NAMES = ("image", "path", "url", "image_url")
_NAMED = "a path from the folder of the file, such as images/1.png"


@dataclass(frozen=True, slots=True)
class ImageDocument:
    """A document: ``where`` it stands, its text or messages, and its images in their order."""

    where: str
    record: Record
    images: tuple[Path, ...] = ()


def first_image(source: Source) -> str | None:
    """Return where a source names an image first, None where it names none: it is read until there.

    Raises:
        SourceError: a file cannot be read, or a row that names an image is malformed.
    """
    for path in _tables(source):
        for where, fields in json_lines(path, b'"image'):
            if any(fields.get(name) for name in FIELDS) or any(_places(fields)):
                return where
    return None


def image_documents(
    source: Source,
    max_bytes: int,
    column: str,
    *,
    chat: bool,
    unused: UnusedColumns | None = None,
) -> Iterator[ImageDocument]:
    """Yield the documents of a source that names images.

    Args:
        source: a file, or a directory.
        max_bytes: of a file of plain text.
        column: of the text.
        chat: whether messages are rendered.
        unused: takes the columns that are not used, while documents are read.

    Raises:
        SourceError: a row has no text, names an image by no path, or its messages have more or fewer places than it
            names images.
    """
    assert source.path is not None
    rows = RowReader(source.column or column, chat, unused or UnusedColumns())
    for path in files_of(source.path, source):
        if path.suffix.lower() != ".jsonl":
            for text in read_file(path, max_bytes, rows):
                yield ImageDocument(str(path), text)
            continue
        for where, fields in json_lines(path):
            for found in rows.record(path.name, where, fields, FIELDS):
                yield _document(where, path.parent, fields, found)


def check_images(source: Source, rows: int, column: str, model: Path, *, chat: bool) -> None:
    """Refuse what rows with images lack, as far as it is known without reading any of these.

    Args:
        source: that names images.
        rows: of ids that are asked for: each begins with a document of its own.
        column: of the text.
        model: the directory with the processor.
        chat: whether messages are rendered.

    Raises:
        SourceError: the model has no processor, Pillow is missing, an image is missing, or there are too few documents.
    """
    documents = 0
    for found in image_documents(source, TEXT.limit, column, chat=chat):
        if not documents:
            check_processor(model, found.where)
        for path in found.images:
            if find_spec("PIL") is None:
                raise SourceError(f"{found.where} names an image, which Pillow reads", INSTALL)
            try:
                FILES.check(path, IMAGE, None)
            except SourceError as error:
                raise SourceError(f"{found.where}: image {error.message}", error.hint) from error
        documents += 1
        if documents >= rows:
            return
    raise SourceError(
        f"{source.name} has {documents} rows, and {rows} are asked for, each of which begins with one of them",
        f"give more rows, or --samples {documents}" if documents else "give rows with text",
    )


def check_processor(model: Path, where: str) -> None:
    """Refuse a model directory without the files of a processor."""
    if not any((model / name).is_file() for name in PROCESSOR_FILES):
        raise SourceError(
            f"{where} names an image, and {model} has no processor: neither {' nor '.join(PROCESSOR_FILES)}",
            COPY,
        )


def _tables(source: Source) -> list[Path]:
    if source.path is None:
        return []
    return [path for path in files_of(source.path, source) if path.suffix.lower() == ".jsonl"]


def _document(where: str, folder: Path, fields: Mapping[str, Any], found: Record) -> ImageDocument:
    listed = _listed(where, fields)
    if isinstance(found, str):
        names = listed
    else:
        names, messages = _of_messages(where, listed, found.messages)
        found = replace(found, messages=messages)
    return ImageDocument(where, found, tuple(_path(where, folder, name) for name in names))


def _listed(where: str, fields: Mapping[str, Any]) -> list[Any]:
    given = [fields[name] for name in FIELDS if fields.get(name)]
    if len(given) > 1:
        raise SourceError(f"{where} has both `image` and `images`", "one of them")
    found = given[0] if given else []
    return found if isinstance(found, list) else [found]


def _of_messages(
    where: str, listed: list[Any], messages: Sequence[Mapping[str, Any]]
) -> tuple[list[Any], list[Mapping[str, Any]]]:
    """Return the names of images in the order of their places, and the messages without them."""
    left, names = list(listed), []
    plain: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            plain.append(message)
            continue
        parts = []
        for part in content:
            if not _is_place(part):
                parts.append(part)
                continue
            own = next((part[key] for key in _NAMES if part.get(key)), None)
            names.append(own if own is not None else left.pop(0) if left else None)
            parts.append({"type": _PART})
        plain.append({**message, "content": parts})
    if left or None in names:
        raise SourceError(
            f"{where} names {len(listed)} image(s) beside its messages, which have {len(names)} place(s) for any",
            'a part {"type": "image"} of a message for each of them, or its path in that part',
        )
    return names, plain


def _places(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of messages that stand for images."""
    try:
        messages = messages_in("", fields)
    except SourceError:  # told where conversations are asked for
        return
    for message in messages:
        content = message.get("content")
        yield from (
            (part for part in content if _is_place(part)) if isinstance(content, list) else ()
        )


def _is_place(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in {_PART, "image_url"}


def _path(where: str, folder: Path, name: Any) -> Path:
    if isinstance(name, Mapping):  # as tables of the hub write them, and messages of OpenAI's
        name = name.get("path") or name.get("url")
    if not isinstance(name, str) or not name.strip():
        raise SourceError(f"{where}: an image is {type(name).__name__} and no path", _NAMED)
    if "://" in name or name.startswith("data:"):
        raise SourceError(
            f"{where}: {name[:80]!a} is an address; nothing is fetched for calibration",
            f"fetch it first, and give {_NAMED}",
        )
    path = PurePosixPath(name)
    if path.is_absolute() or Path(name).is_absolute() or ".." in path.parts:
        raise SourceError(f"{where}: {name[:80]!a} leads out of the folder of the file", _NAMED)
    return folder / name
