"""Rows of one length from documents with images: whole documents as long as their images fit, the last one cut.

A row begins with a document, and others follow, in the order of the file, with the end-of-text token between them. The
row is cut at its length, never before the end of an image: a document whose images do not fit begins the next row, and
what is left of this one is filled with the builtin text. So there is no padding, which every statistic would have to
leave out. What is after a cut is dropped and counted.

A row keeps its text and the paths of its images. Its pixels are made anew whenever they are asked for, and compared
with what they were: for hundreds of rows they would take gigabytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

from quantforge_calibration.image_documents import ImageDocument, read_image
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
    """What a model takes of rows beside their ids; None stands for a row of a text without a processor.

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
        values = _made(found, self.processor, self.length)
        if _digest(values) != found.digest:
            raise SourceError(
                f"{found.where}: an image of calibration row {row} changed meanwhile",
                "leave the images as they are while a run reads them",
            )
        del values[IDS]
        return values

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


@dataclass(frozen=True, slots=True)
class PackedImages:
    """Rows of ids ``[rows, length]``, the rest of them, and counts of ids as in a report on text."""

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
    measured = _Measured(documents, processor, tokenizer)
    between = _token(tokenizer, tokenizer.eos_id) or _SEAM
    filling = (character for text in cycle([*builtin()]) for character in text)
    done, ids = [], [torch.empty(0, length, dtype=torch.int64)]
    dropped = filled = 0
    for group, used in islice(_grouped(measured, length), rows):
        missing = max(0, length - used)
        dropped, filled = dropped + max(0, used - length), filled + missing
        filler = "".join(islice(filling, BYTES_PER_TOKEN * (missing + SPARE)))
        text = between.join([*(str(document.record) for document in group), filler])
        images = tuple(path for document in group for path in document.images)
        row = ImageRow(text, images, group[0].where)
        values = _made(row, processor, length)
        tokenizer.check(values[IDS][0, ~processor.seen(values)[:length]].tolist(), row.where)
        ids.append(values[IDS])
        done.append(replace(row, digest=_digest(values)))
    packed = ImageRows(tuple(done), processor, length, filled)
    return PackedImages(torch.cat(ids), packed, measured.tokens, dropped)


@dataclass(slots=True)
class _Measured:
    """Documents without a token at their beginning, which the processor puts before every row, with their lengths.

    Iteration yields each with its number of tokens, and how many there are to the end of its last image.

    Attributes:
        tokens: of all documents so far.
    """

    documents: Iterable[ImageDocument]
    processor: RowProcessor
    tokenizer: TextTokenizer
    tokens: int = 0

    def __iter__(self) -> Iterator[tuple[ImageDocument, int, int]]:
        beginning = _token(self.tokenizer, self.tokenizer.bos_id) or ""
        for document in self.documents:
            text, where = str(document.record).removeprefix(beginning), document.where
            self.processor.check(text, len(document.images), where)
            # Within its time: the processor's own has no end to it. The model looks no places of images up.
            replace(self.tokenizer, rows=None).encode(text)
            values = self.processor(
                text, [read_image(path, where) for path in document.images], where
            )
            places = self.processor.seen(values).nonzero()
            end = 1 + int(places.max()) if len(places) else 0
            if document.images and not end:
                raise SourceError(
                    f"{where}: the model's processor makes no tokens of its {len(document.images)} image(s)",
                    f"write {self.processor.placeholder or 'the place of an image'} where each belongs",
                )
            count = values[IDS].shape[1]
            self.tokens += count
            yield replace(document, record=text), count, end


def _grouped(
    documents: Iterable[tuple[ImageDocument, int, int]], length: int
) -> Iterator[tuple[list[ImageDocument], int]]:
    """Yield the documents of each row with the number of their tokens; that of the last row may be less than a row."""
    group: list[ImageDocument] = []
    used = 0
    for document, count, end in documents:
        if end > length:
            raise SourceError(
                f"{document.where}: its images end with token {end}, and rows have {length}",
                f"--length {end}, or more; or smaller images, where the model reads them in their own size",
            )
        if group and used + end > length:
            yield group, used
            group, used = [], 0
        group.append(document)
        used += count + 1
        if used >= length:
            yield group, used
            group, used = [], 0
    if group:
        yield group, used


def _made(row: ImageRow, processor: RowProcessor, length: int) -> dict[str, Tensor]:
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


def _digest(values: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 (hex) of tensors with their names, types and shapes."""
    hasher = hashlib.sha256()
    for name, value in sorted(values.items()):
        hasher.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        hasher.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _token(tokenizer: TextTokenizer, number: int | None) -> str | None:
    return None if number is None else tokenizer.tokenizer.id_to_token(number)
