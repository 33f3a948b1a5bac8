"""Sample rows of equal length from tokenized documents, and report what was used.

All documents are joined into one stream, separated by the end-of-text id if the tokenizer has one. The stream is cut
into consecutive windows without overlap, and rows are chosen among the windows. If the tokenizer puts a BOS id before a
text, every row starts with one and has ``length - 1`` ids of text, because activations at that position differ from all
others and every prompt has it.

``choose="spread"`` divides the windows into as many equal sections as there are rows and takes one window at random
from each, so that every row is random but no part of the text is over-represented. ``"first"`` takes the first windows,
as perplexity protocols do. Both keep the order of the text. The only randomness is a local generator with the given
seed.

There is no padding: the ids after the last full window are dropped and counted.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from quantforge_calibration.image_rows import ImageRows, PackedImages, combine_image_rows
from quantforge_calibration.row_count import too_short_error
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import TextTokenizer

Choice = Literal["spread", "first"]
MIN_TOKENS_PER_COLUMN = 8


@dataclass(frozen=True, slots=True)
class DrawReport:
    """Statistics of a sample; all numbers count ids or rows.

    Attributes:
        sources: names of the sources.
        rows: number of rows.
        rows_requested: number of requested rows.
        length: ids per row.
        tokens_available: ids of the joined stream.
        tokens_used: ids of the chosen windows, without BOS and without random rows.
        tokens_truncated: ids after the last full window.
        duplicated_rows: number of rows that repeat another row.
        digest: SHA-256 of the rows, see `digest`.
        random_rows: number of rows with random tokens.
    """

    sources: tuple[str, ...]
    rows: int
    rows_requested: int
    length: int
    tokens_available: int
    tokens_used: int
    tokens_truncated: int
    duplicated_rows: int
    digest: str
    random_rows: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Rows of token ids.

    Attributes:
        ids: token ids, int64 ``[rows, length]``.
        report: where they came from.
        images: the other model inputs of rows with images.
    """

    ids: Tensor
    report: DrawReport
    images: ImageRows | None = None

    def select(self, rows: slice) -> Sample:
        """Return a slice of the rows, with the report of the whole sample."""
        images = None if self.images is None else self.images.select(rows)
        return replace(self, ids=self.ids[rows].contiguous(), images=images)


def pack_rows(
    documents: Iterable[Sequence[int]],
    rows: int,
    length: int,
    bos_id: int | None = None,
    eos_id: int | None = None,
    seed: int = 0,
    choose: Choice = "spread",
    *,
    allow_fewer: bool = False,
    source: str = "the text",
) -> Sample:
    """Join documents, cut them into windows, and choose ``rows`` of the windows.

    Args:
        documents: token ids of each document, without special tokens.
        rows: number of rows to return, at least 1.
        length: ids per row, at least 2, including BOS.
        bos_id: id at the beginning of every row; None if the tokenizer adds none.
        eos_id: id between documents; None if there is none.
        seed: seed of the choice of windows with ``"spread"``.
        choose: ``"spread"`` or ``"first"``.
        allow_fewer: use all windows instead of raising an error if there are fewer than ``rows``.
        source: name of the source in the report.

    Raises:
        SourceError: there are fewer windows than rows (or none at all with ``allow_fewer``).
        ValueError: ``rows`` or ``length`` is out of range.
    """
    if rows < 1 or length < 2:
        raise ValueError(f"cannot make {rows} rows of {length} ids")
    ids_per_row = length - (bos_id is not None)
    stream = _join_documents(documents, eos_id)
    windows = len(stream) // ids_per_row
    if windows < (1 if allow_fewer else rows):
        raise too_short_error(source, len(stream), 1 if allow_fewer else rows, ids_per_row)
    row_count = min(rows, windows)
    starts = range(row_count) if choose == "first" else _choose_spread(windows, row_count, seed)
    text = torch.tensor(stream[: windows * ids_per_row], dtype=torch.int64).view(
        windows, ids_per_row
    )
    ids = text[torch.tensor(list(starts))]
    if bos_id is not None:
        ids = torch.cat((torch.full((row_count, 1), bos_id, dtype=torch.int64), ids), dim=1)
    return Sample(
        ids,
        DrawReport(
            sources=(source,),
            rows=row_count,
            rows_requested=rows,
            length=length,
            tokens_available=len(stream),
            tokens_used=row_count * ids_per_row,
            tokens_truncated=len(stream) - windows * ids_per_row,
            duplicated_rows=count_duplicates(ids),
            digest=digest(ids),
        ),
    )


def wrap_rows(ids: Tensor, source: str = "self") -> Sample:
    """Create a sample from given rows, for example of text that the model generated.

    Raises:
        SourceError: ``ids`` is not a non-empty int64 tensor ``[rows, length]``.
    """
    if ids.dim() != 2 or ids.dtype != torch.int64 or not ids.numel():
        raise SourceError(
            f"'{source}' gave {ids.dtype} {list(ids.shape)} instead of int64 [rows, length]",
            "use --calibration builtin",
        )
    ids = ids.cpu()
    rows, length = ids.shape
    tokens = rows * length
    counts = (rows, rows, length, tokens, tokens, 0, count_duplicates(ids), digest(ids))
    return Sample(ids, DrawReport((source,), *counts))


def concatenate_samples(samples: Sequence[Sample]) -> Sample:
    """Concatenate samples of the same row length; counts are summed, duplicates and the digest are recomputed."""
    ids = torch.cat([sample.ids for sample in samples])
    images = combine_image_rows([(sample.images, len(sample.ids)) for sample in samples])
    reports = [sample.report for sample in samples]
    return Sample(
        ids,
        DrawReport(
            sources=tuple(name for report in reports for name in report.sources),
            rows=len(ids),
            rows_requested=sum(report.rows_requested for report in reports),
            length=ids.shape[1],
            tokens_available=sum(report.tokens_available for report in reports),
            tokens_used=sum(report.tokens_used for report in reports),
            tokens_truncated=sum(report.tokens_truncated for report in reports),
            duplicated_rows=count_duplicates(ids, images),
            digest=digest(ids, images),
        ),
        images,
    )


def wrap_image_rows(packed: PackedImages, requested_rows: int, source: str) -> Sample:
    """Create a sample from packed rows with images."""
    ids, images = packed.ids, packed.images
    rows, length = ids.shape
    report = DrawReport(
        sources=(source,),
        rows=rows,
        rows_requested=requested_rows,
        length=length,
        tokens_available=packed.available_tokens,
        tokens_used=rows * length - images.filler_tokens,
        tokens_truncated=packed.dropped,
        duplicated_rows=count_duplicates(ids, images),
        digest=digest(ids, images),
    )
    return Sample(ids, report, images)


def with_random_rows(
    sample: Sample, fraction: float, tokenizer: TextTokenizer, seed: int
) -> Sample:
    """Replace some text rows, spread over the sample, by tokens drawn uniformly from the vocabulary.

    A quantizer that compensates the error of one column with others relies on the correlations of activations in the
    calibration text. On other kinds of text these correlations differ, and part of the gain is lost. Rows of random
    tokens resemble no text, and show what holds for the model in general: a few of them cost little on the given text
    and recover much of the loss on others.

    Args:
        sample: rows of text; rows with images are never replaced.
        fraction: fraction of the text rows to replace, 0 to 1, rounded down to whole rows.
        tokenizer: tokenizer of the model; its special and added tokens, and those that exceed the embedding, are not
            drawn.
        seed: seed of the random tokens.

    Returns:
        The sample with random rows, which keep their first id if it is BOS or the same in all rows.
    """
    images = sample.images
    text_rows = [i for i in range(len(sample.ids)) if images is None or images.rows[i] is None]
    count = int(len(text_rows) * fraction)
    candidate_ids = torch.tensor(tokenizer.ordinary_ids() if count else [])
    if not len(candidate_ids):
        return sample
    rows = [text_rows[-(-(2 * i + 1) * len(text_rows) // (2 * count)) - 1] for i in range(count)]
    same_first_id = len(sample.ids) > 1 and bool((sample.ids[:, 0] == sample.ids[0, 0]).all())
    first_random = int(same_first_id or tokenizer.bos_id is not None)
    shape = count, sample.ids.shape[1] - first_random
    generator = torch.Generator().manual_seed(seed)
    ids = sample.ids.clone()
    ids[rows, first_random:] = candidate_ids[
        torch.randint(len(candidate_ids), shape, generator=generator)
    ]
    report = replace(
        sample.report,
        random_rows=count,
        tokens_used=sample.report.tokens_used - shape[0] * shape[1],
        duplicated_rows=count_duplicates(ids, images),
        digest=digest(ids, images),
    )
    return replace(sample, ids=ids, report=report)


def digest(ids: Tensor, images: ImageRows | None = None) -> str:
    """Return the SHA-256 (hex) of the shape, the ids as little-endian int64, and the digests of image rows."""
    shape = torch.tensor(ids.shape, dtype=torch.int64)
    hasher = hashlib.sha256()
    for values in (shape, ids):
        hasher.update(values.contiguous().numpy().astype("<i8").tobytes())
    for row in images.rows if images is not None else ():
        hasher.update(row.digest.encode() if row is not None else b"-")
    return hasher.hexdigest()


def tokens_per_column_warning(tokens: int, in_features: int) -> str | None:
    """Return a warning if there are fewer than 8 tokens per input column, too few for statistics; else None."""
    if tokens >= MIN_TOKENS_PER_COLUMN * in_features:
        return None
    return (
        f"{tokens} calibration tokens for {in_features} input columns, "
        f"{tokens / in_features:.1f} per column: below {MIN_TOKENS_PER_COLUMN} the statistics are "
        "mostly noise; raise --samples or --length"
    )


def _join_documents(documents: Iterable[Sequence[int]], eos_id: int | None) -> array[int]:
    """Join documents into one stream, with the end-of-text id between them if there is one."""
    stream = array("q")
    for ids in documents:
        if stream and ids and eos_id is not None:
            stream.append(eos_id)
        stream.extend(ids)
    return stream


def _choose_spread(windows: int, count: int, seed: int) -> list[int]:
    """Choose one window at random from each of ``count`` equal sections."""
    generator = random.Random(seed)  # only its method random() is stable across Python versions
    edges = [i * windows // count for i in range(count + 1)]
    return [low + int(generator.random() * (high - low)) for low, high in pairwise(edges)]


def count_duplicates(ids: Tensor, images: ImageRows | None = None) -> int:
    """Return the number of rows that repeat another row."""
    image_rows = images.rows if images is not None else [None] * len(ids)
    pairs = zip(ids, image_rows, strict=True)
    return len(ids) - len(
        {(row.numpy().tobytes(), image_row and image_row.digest) for row, image_row in pairs}
    )
