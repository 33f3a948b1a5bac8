"""Documents of text with images, out of ``.jsonl``: a text or chat messages, and the image files that belong to it.

A row names its images in ``image`` (one) or ``images`` (a list), as paths below the folder of the ``.jsonl``; a part of
a chat message of the type ``image`` names its own, or takes the next of the row's list. Nothing is ever fetched from
the network. A row without images is a text like any other.

Pillow reads the images. A file of a few kilobytes can ask for gigabytes of pixels, so Pillow's limit of pixels, for
which it only warns, is an error here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from quantforge_calibration.conversations import messages_in
from quantforge_calibration.readers import Record, RowReader, UnusedColumns, json_lines
from quantforge_calibration.source_error import FILES, SourceError
from quantforge_calibration.sources import Source, files_of, read_file
from quantforge_files.roles import IMAGE, TEXT

if TYPE_CHECKING:
    from PIL.Image import Image

FIELDS = ("images", "image")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
COPY = "copy the processor files of the original model: " + ", ".join(PROCESSOR_FILES)
INSTALL = "pip install 'quantforge[images]'"


@dataclass(frozen=True, slots=True)
class ImageDocument:
    """A document: ``where`` it stands, its text or messages, and its images in their order."""

    where: str
    record: Record
    images: tuple[Path, ...] = ()


def first_image(source: Source) -> str | None:
    """Return where a source first names an image, None if it names none.

    Raises:
        SourceError: a file cannot be read, or a row that names an image is malformed.
    """
    for path in files_of(source.path, source) if source.path is not None else ():
        if path.suffix.lower() != ".jsonl":
            continue
        for where, fields in json_lines(path, b'"image'):
            if any(fields.get(name) for name in FIELDS):
                return where
            for message in messages_in(where, fields):
                content = message.get("content")
                if isinstance(content, list) and any(map(_is_image, content)):
                    return where
    return None


def image_documents(
    source: Source,
    max_bytes: int,
    *,
    chat: bool,
    unused: UnusedColumns | None = None,
) -> Iterator[ImageDocument]:
    """Yield the documents of a source that names images.

    Args:
        source: a file, or a directory.
        max_bytes: of a file of plain text.
        chat: whether messages are rendered.
        unused: takes the columns that are not used, while documents are read.

    Raises:
        SourceError: a row has no text, an image is not named by a path, or a row's messages have more or fewer places
            for images than it names.
    """
    assert source.path is not None
    rows = RowReader(source.column or "text", chat, unused or UnusedColumns())
    for path in files_of(source.path, source):
        if path.suffix.lower() != ".jsonl":
            for text in read_file(path, max_bytes, rows):
                yield ImageDocument(str(path), text)
            continue
        for where, fields in json_lines(path):
            for found in rows.record(path.name, where, fields, FIELDS):
                names, record = _placed(where, _names(where, fields), found)
                images = tuple(_path(where, path.parent, name) for name in names)
                yield ImageDocument(where, record, images)


def check_images(source: Source, rows: int, model: Path, *, chat: bool) -> None:
    """Refuse what rows with images lack, as far as it is known without reading an image.

    Args:
        source: that names images.
        rows: of ids that are asked for; each begins with a document of its own.
        model: the directory with the processor.
        chat: whether messages are rendered.

    Raises:
        SourceError: the model has no processor, an image is missing, or there are too few documents.
    """
    documents = 0
    for document in image_documents(source, TEXT.limit, chat=chat):
        if not documents:
            check_processor(model, document.where)
        for path in document.images:
            try:
                FILES.check(path, IMAGE, None)
            except SourceError as error:
                raise _of_row(document.where, error) from error
        documents += 1
        if documents >= rows:
            return
    raise SourceError(
        f"{source.name} has {documents} rows, and {rows} are asked for, each of which begins with one of them",
        f"give more rows, or --samples {documents}" if documents else "give rows with text",
    )


def check_processor(model: Path, where: str) -> None:
    """Refuse a model directory without the files of a processor; ``where`` is the row that names an image."""
    if not any((model / name).is_file() for name in PROCESSOR_FILES):
        raise SourceError(
            f"{where} names an image, and {model} has no processor: neither {' nor '.join(PROCESSOR_FILES)}",
            COPY,
        )


def read_image(path: Path, where: str) -> Image:
    """Return an image as RGB, turned as its EXIF data says; of several frames the first.

    Args:
        path: of the file.
        where: the row that names it.

    Raises:
        SourceError: Pillow is missing; the file is missing, is in none of `FORMATS`, is damaged or has too many pixels.
    """
    try:
        from PIL import Image as pillow
        from PIL import ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise SourceError(f"{where} names an image, which Pillow reads", INSTALL) from error
    try:
        data = FILES.read(path, IMAGE, None)
    except SourceError as error:
        raise _of_row(where, error) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(BytesIO(data), formats=FORMATS) as file:
                return ImageOps.exif_transpose(file).convert("RGB")
    except Exception as error:  # Pillow raises errors of any kind for a damaged file
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "its format is not one of them" if unknown else error
        raise SourceError(
            f"{where}: image {path} cannot be read: {reason}",
            f"give an image as {', '.join(FORMATS)}, no larger than a model reads",
        ) from error


def _of_row(where: str, error: SourceError) -> SourceError:
    return SourceError(f"{where}: image {error.message}", error.hint)


def _names(where: str, fields: Mapping[str, Any]) -> list[Any]:
    """Return what a row's own fields name as images."""
    given = [fields[name] for name in FIELDS if fields.get(name)]
    if len(given) > 1:
        raise SourceError(f"{where} has both `image` and `images`", "one of them")
    names = given[0] if given else []
    return names if isinstance(names, list) else [names]


def _placed(where: str, listed: list[Any], record: Record) -> tuple[list[Any], Record]:
    """Return the names of images in the order of their places, and the text or conversation without the names."""
    if isinstance(record, str):
        return listed, record
    left, names, messages = list(listed), [], []
    for message in record.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for part in filter(_is_image, parts):
            own = part.get("image") or part.get("path") or part.get("url")
            names.append(own or (left.pop(0) if left else None))
        plain = [{"type": "image"} if _is_image(part) else part for part in parts]
        messages.append({**message, "content": plain} if plain else message)
    if left or None in names:
        raise SourceError(
            f"{where} names {len(listed)} image(s) beside its messages, which have {len(names)} place(s) for any",
            'a part {"type": "image"} of a message for each of them, or its path in that part',
        )
    return names, replace(record, messages=messages)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _path(where: str, folder: Path, name: Any) -> Path:
    if isinstance(name, Mapping):  # as the hub's tables write images
        name = name.get("path")
    path = PurePosixPath(name) if isinstance(name, str) and name.strip() else None
    address = path is not None and ("://" in name or name.startswith("data:"))
    if path is None or address or Path(name).is_absolute() or ".." in path.parts:
        raise SourceError(
            f"{where}: image {str(name)[:80]!a} is not a path below the folder of the file; nothing is fetched",
            "a path such as images/1.png",
        )
    return folder / path
