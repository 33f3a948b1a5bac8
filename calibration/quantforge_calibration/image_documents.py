"""Read documents of text with images from ``.jsonl``: a text or chat messages, and their image files.

A row names its images in ``image`` (one) or ``images`` (a list), as paths relative to the directory of the ``.jsonl``;
a part of a chat message with type ``image`` names its own image, or takes the next one of the row's list. Images are
never downloaded. A row without images is a plain text.

Pillow reads the images. A file of a few kilobytes can expand to gigabytes of pixels, so exceeding Pillow's pixel limit,
for which Pillow only warns, is an error here.
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
from quantforge_calibration.sources import Source, read_file, source_files
from quantforge_files.roles import IMAGE, TEXT

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_FIELDS = ("images", "image")
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
COPY_HINT = "copy the processor files of the original model: " + ", ".join(PROCESSOR_FILES)
INSTALL_HINT = "pip install 'quantforge[images]'"


@dataclass(frozen=True, slots=True)
class ImageDocument:
    """A document with images.

    Attributes:
        where: file and line, for error messages.
        record: its text or conversation.
        images: its image files in order.
    """

    where: str
    record: Record
    images: tuple[Path, ...] = ()


def first_image(source: Source) -> str | None:
    """Return the location of the first row that names an image; None if no row does.

    Raises:
        SourceError: a file cannot be read, or a row that names an image is malformed.
    """
    for path in source_files(source.path, source) if source.path is not None else ():
        if path.suffix.lower() != ".jsonl":
            continue
        for where, fields in json_lines(path, b'"image'):
            if any(fields.get(name) for name in IMAGE_FIELDS):
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
    """Yield the documents of a source whose rows name images.

    Args:
        source: a file or a directory.
        max_bytes: maximum number of bytes to read of a plain text file.
        chat: whether messages are rendered.
        unused: collects the columns that are not used.

    Raises:
        SourceError: a row has no text, an image is not given by a path, or the number of images differs from the number
            of image parts in the messages.
    """
    assert source.path is not None
    row_reader = RowReader(source.column or "text", chat, unused or UnusedColumns())
    for path in source_files(source.path, source):
        if path.suffix.lower() != ".jsonl":
            for text in read_file(path, max_bytes, row_reader):
                yield ImageDocument(str(path), text)
            continue
        for where, fields in json_lines(path):
            for record in row_reader.record(path.name, where, fields, IMAGE_FIELDS):
                names, assigned_record = _assign_images(
                    where, _listed_images(where, fields), record
                )
                images = tuple(_image_path(where, path.parent, name) for name in names)
                yield ImageDocument(where, assigned_record, images)


def check_images(source: Source, row_count: int, model: Path, *, chat: bool) -> None:
    """Check a source with images as far as possible without decoding any image.

    Args:
        source: a source whose rows name images.
        row_count: number of requested rows; each starts with a new document.
        model: directory of the model with its processor.
        chat: whether messages are rendered.

    Raises:
        SourceError: the model has no processor, an image is missing, or there are too few documents.
    """
    document_count = 0
    for document in image_documents(source, TEXT.max_bytes, chat=chat):
        if not document_count:
            check_processor(model, document.where)
        for path in document.images:
            try:
                FILES.check(path, IMAGE, None)
            except SourceError as error:
                raise _row_error(document.where, error) from error
        document_count += 1
        if document_count >= row_count:
            return
    raise SourceError(
        f"{source.name} has {document_count} rows, and {row_count} are asked for,"
        " each of which begins with one of them",
        f"give more rows, or --samples {document_count}"
        if document_count
        else "give rows with text",
    )


def check_processor(model: Path, where: str) -> None:
    """Raise `SourceError` if a model directory has no processor files; ``where`` is the row that names an image."""
    if not any((model / name).is_file() for name in PROCESSOR_FILES):
        raise SourceError(
            f"{where} names an image, and {model} has no processor: neither {' nor '.join(PROCESSOR_FILES)}",
            COPY_HINT,
        )


def read_image(path: Path, where: str) -> Image:
    """Return an image as RGB, rotated according to its EXIF data; the first frame if it has several.

    Args:
        path: the image file.
        where: the row that names it.

    Raises:
        SourceError: Pillow is not installed, or the file is missing, damaged, too large or not in `IMAGE_FORMATS`.
    """
    try:
        from PIL import Image as pillow
        from PIL import ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise SourceError(f"{where} names an image, which Pillow reads", INSTALL_HINT) from error
    try:
        data = FILES.read(path, IMAGE, None)
    except SourceError as error:
        raise _row_error(where, error) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(BytesIO(data), formats=IMAGE_FORMATS) as file:
                return ImageOps.exif_transpose(file).convert("RGB")
    except Exception as error:  # Pillow raises errors of any kind for a damaged file
        unknown_format = isinstance(error, UnidentifiedImageError)
        reason = "its format is not one of them" if unknown_format else error
        raise SourceError(
            f"{where}: image {path} cannot be read: {reason}",
            f"give an image as {', '.join(IMAGE_FORMATS)}, no larger than a model reads",
        ) from error


def _row_error(where: str, error: SourceError) -> SourceError:
    """Add the row that names an image to an error about the image."""
    return SourceError(f"{where}: image {error.message}", error.hint)


def _listed_images(where: str, fields: Mapping[str, Any]) -> list[Any]:
    """Return the images listed in a row's ``image`` or ``images`` field."""
    values = [fields[name] for name in IMAGE_FIELDS if fields.get(name)]
    if len(values) > 1:
        raise SourceError(f"{where} has both `image` and `images`", "one of them")
    names = values[0] if values else []
    return names if isinstance(names, list) else [names]


def _assign_images(where: str, listed: list[Any], record: Record) -> tuple[list[Any], Record]:
    """Return the images in the order of their parts in the messages, and the record without image names."""
    if isinstance(record, str):
        return listed, record
    remaining, names, messages = list(listed), [], []
    for message in record.messages:
        content = message.get("content")
        content_parts = content if isinstance(content, list) else []
        for part in filter(_is_image, content_parts):
            part_image = part.get("image") or part.get("path") or part.get("url")
            names.append(part_image or (remaining.pop(0) if remaining else None))
        unnamed_parts = [{"type": "image"} if _is_image(part) else part for part in content_parts]
        messages.append({**message, "content": unnamed_parts} if unnamed_parts else message)
    if remaining or None in names:
        raise SourceError(
            f"{where} names {len(listed)} image(s) beside its messages, which have {len(names)} place(s) for any",
            'a part {"type": "image"} of a message for each of them, or its path in that part',
        )
    return names, replace(record, messages=messages)


def _is_image(content_part: Any) -> bool:
    """Return whether a part of a chat message is an image."""
    return isinstance(content_part, Mapping) and content_part.get("type") == "image"


def _image_path(where: str, folder: Path, name: Any) -> Path:
    """Return the path of an image, which must be below the directory of the ``.jsonl`` file."""
    if isinstance(name, Mapping):  # as the hub's tables write images
        name = name.get("path")
    path = PurePosixPath(name) if isinstance(name, str) and name.strip() else None
    is_url = path is not None and ("://" in name or name.startswith("data:"))
    if path is None or is_url or Path(name).is_absolute() or ".." in path.parts:
        raise SourceError(
            f"{where}: image {str(name)[:80]!a} is not a path below the folder of the file; nothing is fetched",
            "a path such as images/1.png",
        )
    return folder / path
