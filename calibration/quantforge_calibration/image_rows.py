"""Rows of one length from documents with images: whole documents as long as their images fit, the last one cut.

A row begins with a document, and others follow, in the order of the file, with the end-of-text token between them. The
row is cut at its length, never before the end of an image: a document whose images do not fit begins the next row, and
what is left of this one is filled with the builtin text. So there is no padding, which every statistic would have to
leave out. What is behind a cut is dropped and counted.

A row keeps its text and the paths of its images. Its pixels are made anew whenever they are asked for, and compared
with what they were: of hundreds of rows they would take gigabytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

from quantforge_calibration.image_documents import ImageDocument
from quantforge_calibration.images import read_image
from quantforge_calibration.row_count import BYTES_PER_TOKEN
from quantforge_calibration.row_processor import IDS, RowProcessor
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.sources import builtin
from quantforge_calibration.tokenizer import TextTokenizer

SPARE = 8  # tokens of filling beyond what is missing: those at the seams may be counted twice
_SEAM = "\n"


@dataclass(frozen=True, slots=True)
class ImageRow:
    """A row: its text, its images, the document that it begins with, and the digest of what they make."""

    text: str
    images: tuple[Path, ...]
    where: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The rest of what a model takes of rows, beside their ids; None stands for a row of a text without a processor.

    Attributes:
        filled: ids that are builtin text.
    """

    rows: tuple[ImageRow | None, ...]
    processor: RowProcessor
    length: int
    filled: int = 0

    def __call__(self, row: int) -> dict[str, Tensor]:
        """Return what the model takes of a row, by argument; ``input_ids`` are not among them.

        Raises:
            SourceError: an image is not what it was.
        """
        found = self.rows[row]
        if found is None:
            return {}
        values = made(found, self.processor, self.length)
        if digest_of(values) != found.digest:
            raise SourceError(
                f"{found.where}: an image of calibration row {row} changed meanwhile",
                "leave the images as they are while a run reads them",
            )
        return {name: value for name, value in values.items() if name != IDS}

    @property
    def count(self) -> int:
        """Return the number of images in all rows."""
        return sum(len(row.images) for row in self.rows if row is not None)

    def part(self, rows: slice) -> ImageRows:
        """Return some of the rows."""
        return replace(self, rows=self.rows[rows])


def combined(parts: Sequence[tuple[ImageRows | None, int]]) -> ImageRows | None:
    """Return the images of stacked samples, of so many rows each; None where there are none."""
    found = [images for images, _ in parts if images is not None]
    if not found:
        return None
    rows = [images.rows if images is not None else (None,) * count for images, count in parts]
    filled = sum(images.filled for images in found)
    return replace(found[0], rows=tuple(row for part in rows for row in part), filled=filled)


@dataclass(slots=True)
class _Open:
    """A row that is being filled, with its tokens so far."""

    where: str = ""
    texts: list[str] = field(default_factory=list)
    images: list[Path] = field(default_factory=list)
    used: int = 0


@dataclass(frozen=True, slots=True)
class PackedImages:
    """Rows of ids ``[rows, length]``, the rest of them, and counts of ids as of a report of text."""

    ids: Tensor
    images: ImageRows
    available: int
    dropped: int


def pack_images(
    documents: Iterable[ImageDocument],
    rows: int,
    length: int,
    processor: RowProcessor,
    tokenizer: TextTokenizer,
) -> PackedImages:
    """Fill rows with documents, no more of them than it takes; the texts of messages are rendered already.

    Raises:
        SourceError: an image cannot be read, the processor refuses a document, or its images do not fit into a row.
    """
    between = _token(tokenizer, tokenizer.eos_id) or _SEAM
    filling = _filling()
    done: list[ImageRow] = []
    available = dropped = filled = 0

    def close(row: _Open) -> None:
        nonlocal dropped, filled
        missing = max(0, length - row.used)
        dropped, filled = dropped + max(0, row.used - length), filled + missing
        filler = "".join(islice(filling, BYTES_PER_TOKEN * (missing + SPARE)))
        text = between.join([*row.texts, filler])
        done.append(ImageRow(text, tuple(row.images), row.where))

    row = _Open()
    for document in documents:
        text = _without_beginning(str(document.record), tokenizer)
        count, end = _measured(replace(document, record=text), processor, tokenizer)
        available += count
        if end > length:
            raise SourceError(
                f"{document.where}: its images end with token {end}, and rows have {length}",
                f"--length {end}, or more; or smaller images, where the model reads them in their own size",
            )
        if row.texts and row.used + end > length:
            close(row)
            row = _Open()
            if len(done) == rows:
                break
        row.where = row.where or document.where
        row.texts.append(text)
        row.images += document.images
        row.used += count + 1
        if row.used >= length:
            close(row)
            row = _Open()
            if len(done) == rows:
                break
    if row.texts and len(done) < rows:
        close(row)
    ids, made_rows = [], []
    for each in done:
        values = made(each, processor, length)
        of_text = ~processor.seen(values)[:length]
        tokenizer.check(values[IDS][0, of_text].tolist(), each.where)
        ids.append(values[IDS])
        made_rows.append(replace(each, digest=digest_of(values)))
    images = ImageRows(tuple(made_rows), processor, length, filled)
    joined = torch.cat(ids) if ids else torch.empty(0, length, dtype=torch.int64)
    return PackedImages(joined, images, available, dropped)


def made(row: ImageRow, processor: RowProcessor, length: int) -> dict[str, Tensor]:
    """Return what a model takes of a row: ids ``[1, length]``, and the rest by argument.

    Raises:
        SourceError: an image cannot be read, or the processor refuses the row.
    """
    values = processor(row.text, [read_image(path, row.where) for path in row.images], row.where)
    tokens = values[IDS].shape[1]
    if tokens < length or processor.seen(values)[length:].any():
        raise SourceError(
            f"{row.where}: the row that begins there has {tokens} tokens, and its images do not end within {length}",
            "another --length",
        )
    return {
        name: value[:, :length].contiguous() if value.shape[:2] == (1, tokens) else value
        for name, value in values.items()
    }


def digest_of(values: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 (hex) of tensors with their names, types and shapes."""
    hasher = hashlib.sha256()
    for name, value in sorted(values.items()):
        hasher.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        hasher.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _measured(
    document: ImageDocument, processor: RowProcessor, tokenizer: TextTokenizer
) -> tuple[int, int]:
    """Return how many tokens a document has, and how many to the end of its last image."""
    text = str(document.record)
    processor.check(text, len(document.images), document.where)
    # Within its time: the processor's own has no end to it. The model looks no places of images up.
    replace(tokenizer, rows=None).encode(text)
    pictures = [read_image(path, document.where) for path in document.images]
    values = processor(text, pictures, document.where)
    places = processor.seen(values).nonzero()
    end = 1 + int(places.max()) if len(places) else 0
    if pictures and not end:
        raise SourceError(
            f"{document.where}: the model's processor makes no tokens of its {len(pictures)} image(s)",
            f"write {processor.placeholder or 'the place of an image'} where each belongs",
        )
    return values[IDS].shape[1], end


def _token(tokenizer: TextTokenizer, number: int | None) -> str | None:
    return None if number is None else tokenizer.tokenizer.id_to_token(number)


def _without_beginning(text: str, tokenizer: TextTokenizer) -> str:
    """Return a text without the token that begins one: the processor puts it in front of every row."""
    return text.removeprefix(_token(tokenizer, tokenizer.bos_id) or "")


def _filling() -> Iterator[str]:
    """Yield the characters of the builtin text over and over."""
    texts: Sequence[str] = [*builtin()]
    return (character for text in cycle(texts) for character in text)
