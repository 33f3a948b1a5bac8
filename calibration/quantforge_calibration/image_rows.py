"""Pack documents with images into rows of equal length: whole documents while their images fit, the last one truncated.

A row starts with a document; others follow in file order, separated by the end-of-text token. The row is truncated at
its length, but never before the end of an image: a document whose images do not fit starts the next row, and the rest
of the current row is filled with the builtin text. So there is no padding, which would have to be excluded from every
statistic. Tokens after the truncation are dropped and counted.

A row stores its text and the paths of its images. Pixels are recomputed on each access and compared with their digest,
because for hundreds of rows they would take gigabytes.
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

SPARE_TOKENS = 8  # extra filler tokens, because tokens may merge where texts are joined
_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class ImageRow:
    """A row with images.

    Attributes:
        text: text of the row.
        images: image files in order.
        where: location of its first document.
        digest: SHA-256 of the tensors that the processor computes from it.
    """

    text: str
    images: tuple[Path, ...]
    where: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Model inputs of rows with images, except their token ids.

    Attributes:
        rows: one entry per row; None for a row of plain text.
        processor: processor of the model.
        length: token ids per row.
        filler_tokens: number of token ids that are builtin text.
    """

    rows: tuple[ImageRow | None, ...]
    processor: RowProcessor
    length: int
    filler_tokens: int = 0

    def __call__(self, row: int) -> dict[str, Tensor]:
        """Return the model inputs of a row by argument name, without ``input_ids``.

        Raises:
            SourceError: an image has changed.
        """
        image_row = self.rows[row]
        if image_row is None:
            return {}
        values = _process_row(image_row, self.processor, self.length)
        if _digest(values) != image_row.digest:
            raise SourceError(
                f"{image_row.where}: an image of calibration row {row} changed meanwhile",
                "leave the images as they are while a run reads them",
            )
        del values[IDS]
        return values

    @property
    def count(self) -> int:
        """Return the number of images in all rows."""
        return sum(len(row.images) for row in self.rows if row is not None)

    def select(self, rows: slice) -> ImageRows:
        """Return a slice of the rows."""
        return replace(self, rows=self.rows[rows])


def combine_image_rows(sources: Sequence[tuple[ImageRows | None, int]]) -> ImageRows | None:
    """Concatenate the image rows of several samples, given with their numbers of rows; None if there are no images."""
    with_images = [images for images, _ in sources if images is not None]
    if not with_images:
        return None
    rows = [images.rows if images is not None else (None,) * count for images, count in sources]
    filler_tokens = sum(images.filler_tokens for images in with_images)
    return replace(
        with_images[0],
        rows=tuple(row for source_rows in rows for row in source_rows),
        filler_tokens=filler_tokens,
    )


@dataclass(frozen=True, slots=True)
class PackedImages:
    """Packed rows with images.

    Attributes:
        ids: token ids ``[rows, length]``.
        images: the other model inputs.
        available_tokens: number of token ids of all documents read.
        dropped: number of token ids after truncation.
    """

    ids: Tensor
    images: ImageRows
    available_tokens: int
    dropped: int


def pack_images(
    documents: Iterable[ImageDocument],
    rows: int,
    length: int,
    processor: RowProcessor,
    tokenizer: TextTokenizer,
) -> PackedImages:
    """Pack documents into rows, reading no more documents than necessary; messages must be rendered already.

    Raises:
        SourceError: an image cannot be read, the processor refuses a document, or its images do not fit into a row.
    """
    measured = _MeasuredDocuments(documents, processor, tokenizer)
    separator = _token_text(tokenizer, tokenizer.eos_id) or _SEPARATOR
    filler_characters = (character for text in cycle([*builtin()]) for character in text)
    packed_rows, ids = [], [torch.empty(0, length, dtype=torch.int64)]
    dropped = filler_tokens = 0
    for group, used_tokens in islice(_group_documents(measured, length), rows):
        missing_tokens = max(0, length - used_tokens)
        dropped, filler_tokens = (
            dropped + max(0, used_tokens - length),
            filler_tokens + missing_tokens,
        )
        filler = "".join(
            islice(filler_characters, BYTES_PER_TOKEN * (missing_tokens + SPARE_TOKENS))
        )
        text = separator.join([*(str(document.record) for document in group), filler])
        images = tuple(path for document in group for path in document.images)
        row = ImageRow(text, images, group[0].where)
        values = _process_row(row, processor, length)
        tokenizer.check(values[IDS][0, ~processor.image_mask(values)[:length]].tolist(), row.where)
        ids.append(values[IDS])
        packed_rows.append(replace(row, digest=_digest(values)))
    packed = ImageRows(tuple(packed_rows), processor, length, filler_tokens)
    return PackedImages(torch.cat(ids), packed, measured.tokens, dropped)


@dataclass(slots=True)
class _MeasuredDocuments:
    """Documents with their lengths in tokens, and without a leading BOS token, which the processor adds to every row.

    Iteration yields each document with its number of tokens and the number of tokens up to the end of its last image.

    Attributes:
        tokens: number of tokens of all documents so far.
    """

    documents: Iterable[ImageDocument]
    processor: RowProcessor
    tokenizer: TextTokenizer
    tokens: int = 0

    def __iter__(self) -> Iterator[tuple[ImageDocument, int, int]]:
        bos_text = _token_text(self.tokenizer, self.tokenizer.bos_id) or ""
        for document in self.documents:
            text, where = str(document.record).removeprefix(bos_text), document.where
            self.processor.check(text, len(document.images), where)
            # Tokenize with our time limit first, because the processor's tokenizer has none. Ids of image tokens
            # may exceed the embedding and are not checked.
            replace(self.tokenizer, embedding_rows=None).encode(text)
            values = self.processor(
                text, [read_image(path, where) for path in document.images], where
            )
            image_positions = self.processor.image_mask(values).nonzero()
            end = 1 + int(image_positions.max()) if len(image_positions) else 0
            if document.images and not end:
                raise SourceError(
                    f"{where}: the model's processor makes no tokens of its {len(document.images)} image(s)",
                    f"write {self.processor.placeholder or 'the place of an image'} where each belongs",
                )
            count = values[IDS].shape[1]
            self.tokens += count
            yield replace(document, record=text), count, end


def _group_documents(
    documents: Iterable[tuple[ImageDocument, int, int]], length: int
) -> Iterator[tuple[list[ImageDocument], int]]:
    """Yield the documents of each row with their total number of tokens, which may be too few for a full last row."""
    group: list[ImageDocument] = []
    used_tokens = 0
    for document, count, end in documents:
        if end > length:
            raise SourceError(
                f"{document.where}: its images end with token {end}, and rows have {length}",
                f"--length {end}, or more; or smaller images, where the model reads them in their own size",
            )
        if group and used_tokens + end > length:
            yield group, used_tokens
            group, used_tokens = [], 0
        group.append(document)
        used_tokens += count + 1
        if used_tokens >= length:
            yield group, used_tokens
            group, used_tokens = [], 0
    if group:
        yield group, used_tokens


def _process_row(row: ImageRow, processor: RowProcessor, length: int) -> dict[str, Tensor]:
    """Return the model inputs of a row by argument name; token ids are ``[1, length]``.

    Raises:
        SourceError: an image cannot be read, or the processor refuses the row.
    """
    values = processor(row.text, [read_image(path, row.where) for path in row.images], row.where)
    tokens = values[IDS].shape[1]
    if tokens < length or processor.image_mask(values)[length:].any():
        raise SourceError(
            f"{row.where}: the row that begins there has {tokens} tokens, and its images do not end within {length}",
            "another --length",
        )
    return {
        name: value[:, :length].contiguous() if value.shape[:2] == (1, tokens) else value
        for name, value in values.items()
    }


def _digest(values: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 (hex) of tensors with their names, dtypes and shapes."""
    hasher = hashlib.sha256()
    for name, value in sorted(values.items()):
        hasher.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        hasher.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _token_text(tokenizer: TextTokenizer, token_id: int | None) -> str | None:
    """Return the text of a token id, or None if there is no id."""
    return None if token_id is None else tokenizer.tokenizer.id_to_token(token_id)
