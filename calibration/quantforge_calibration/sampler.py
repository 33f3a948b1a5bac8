"""Rows of one length from documents of token ids, with an account of what was used.

All documents are joined into one stream, with the end-of-text id between them where the tokenizer
has one. The stream is cut into consecutive windows that do not overlap, and rows are chosen among
the windows. Where the tokenizer puts a beginning-of-text id in front of a text, every row starts
with one and carries ``length - 1`` ids of text, because activations at that position are unlike all
others and every prompt has it.

``choose="spread"`` divides the windows into as many equal stretches as there are rows and takes one
window at random from each: random as far as any single row is concerned, yet no part of the text is
over-represented. ``"first"`` takes the first windows, as perplexity protocols do. Both keep the
order of the text. The only randomness is a local generator made from the seed.

Padding does not exist here: the ids after the last full window are dropped and counted.
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

from quantforge_calibration.image_rows import ImageRows, PackedImages, combined
from quantforge_calibration.row_count import too_short
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import TextTokenizer

Choice = Literal["spread", "first"]
TOKENS_PER_COLUMN = 8


@dataclass(frozen=True, slots=True)
class DrawReport:
    """Figures of a sample and what it was made of; all are counts of ids or of rows.

    ``tokens_available`` is the joined stream, ``tokens_truncated`` its tail after the last full
    window, ``tokens_used`` the ids of the chosen windows; ids put at the beginning of rows are in
    none of them, nor are those of ``random_rows``, which are drawn at random.
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
    """Token ids, int64 ``[rows, length]``, where they came from, and what else a model takes of rows with images."""

    ids: Tensor
    report: DrawReport
    images: ImageRows | None = None

    def part(self, rows: slice) -> Sample:
        """Return some of the rows; the report stays that of all."""
        images = None if self.images is None else self.images.part(rows)
        return replace(self, ids=self.ids[rows].contiguous(), images=images)


def pack_rows(
    documents_of_ids: Iterable[Sequence[int]],
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
    """Cut documents into windows and choose ``rows`` of them.

    Args:
        documents_of_ids: ids of each document, without special tokens.
        rows: how many rows to return, at least 1.
        length: ids per row, at least 2, with the one at the beginning.
        bos_id: put at the beginning of every row; None for tokenizers that add none.
        eos_id: put between documents; None where there is none.
        seed: decides which windows ``"spread"`` takes.
        choose: ``"spread"`` or ``"first"``.
        allow_fewer: use every window, instead of failing, when there are fewer than ``rows``.
        source: the name to report.

    Raises:
        SourceError: there are fewer windows than rows (none at all, with ``allow_fewer``).
        ValueError: ``rows`` or ``length`` is out of range.
    """
    if rows < 1 or length < 2:
        raise ValueError(f"cannot make {rows} rows of {length} ids")
    payload = length - (bos_id is not None)
    stream = _join(documents_of_ids, eos_id)
    windows = len(stream) // payload
    if windows < (1 if allow_fewer else rows):
        raise too_short(source, len(stream), 1 if allow_fewer else rows, payload)
    taken = min(rows, windows)
    starts = range(taken) if choose == "first" else _spread(windows, taken, seed)
    text = torch.tensor(stream[: windows * payload], dtype=torch.int64).view(windows, payload)
    ids = text[torch.tensor(list(starts))]
    if bos_id is not None:
        ids = torch.cat((torch.full((taken, 1), bos_id, dtype=torch.int64), ids), dim=1)
    return Sample(
        ids,
        DrawReport(
            sources=(source,),
            rows=taken,
            rows_requested=rows,
            length=length,
            tokens_available=len(stream),
            tokens_used=taken * payload,
            tokens_truncated=len(stream) - windows * payload,
            duplicated_rows=duplicated(ids),
            digest=digest(ids),
        ),
    )


def given_rows(ids: Tensor, source: str = "self") -> Sample:
    """Wrap rows that the caller made, for example text that the model wrote itself.

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
    counts = (rows, rows, length, tokens, tokens, 0, duplicated(ids), digest(ids))
    return Sample(ids, DrawReport((source,), *counts))


def combine(samples: Sequence[Sample]) -> Sample:
    """Stack samples of one length; counts add up, duplicates and the digest are taken anew."""
    ids = torch.cat([sample.ids for sample in samples])
    images = combined([(sample.images, len(sample.ids)) for sample in samples])
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
            duplicated_rows=duplicated(ids, images),
            digest=digest(ids, images),
        ),
        images,
    )


def sample_of_images(packed: PackedImages, asked: int, source: str) -> Sample:
    """Wrap rows with images, of which ``asked`` were wanted."""
    ids, images = packed.ids, packed.images
    rows, length = ids.shape
    report = DrawReport(
        sources=(source,),
        rows=rows,
        rows_requested=asked,
        length=length,
        tokens_available=packed.available,
        tokens_used=rows * length - images.filled,
        tokens_truncated=packed.dropped,
        duplicated_rows=duplicated(ids, images),
        digest=digest(ids, images),
    )
    return Sample(ids, report, images)


def with_random_rows(sample: Sample, share: float, tokenizer: TextTokenizer, seed: int) -> Sample:
    """Replace some rows by tokens drawn evenly from the vocabulary, spread over the sample; rows with images stay.

    A quantizer that makes up for one column's error with others relies on how activations go together in the
    calibration text. On text of another kind they go together otherwise, and some of what was gained is lost. Rows in
    which tokens follow each other at random are like no text, and show what is true of the model on all of them: a few
    of these cost little on the text that was given, and take much of the loss on others away.

    Args:
        sample: rows of text.
        share: of its rows, from 0 to 1; rounded down to whole rows.
        tokenizer: of the model; its special and added tokens, and those past the embedding, are not drawn.
        seed: decides which tokens are drawn.

    Returns:
        The sample with the first id of each row as it was, where all rows begin with the same.
    """
    images = sample.images
    of_text = [i for i in range(len(sample.ids)) if images is None or images.rows[i] is None]
    count = int(len(of_text) * share)
    drawn = torch.tensor(tokenizer.ordinary_ids() if count else [])
    if not len(drawn):
        return sample
    rows = [of_text[-(-(2 * i + 1) * len(of_text) // (2 * count)) - 1] for i in range(count)]
    alike = len(sample.ids) > 1 and bool((sample.ids[:, 0] == sample.ids[0, 0]).all())
    first = int(alike or tokenizer.bos_id is not None)
    shape = count, sample.ids.shape[1] - first
    generator = torch.Generator().manual_seed(seed)
    ids = sample.ids.clone()
    ids[rows, first:] = drawn[torch.randint(len(drawn), shape, generator=generator)]
    report = replace(
        sample.report,
        random_rows=count,
        tokens_used=sample.report.tokens_used - shape[0] * shape[1],
        duplicated_rows=duplicated(ids, images),
        digest=digest(ids, images),
    )
    return replace(sample, ids=ids, report=report)


def digest(ids: Tensor, images: ImageRows | None = None) -> str:
    """Return the SHA-256 (hex) of the shape and the ids in order, as little-endian int64, then of what images make."""
    shape = torch.tensor(ids.shape, dtype=torch.int64)
    hasher = hashlib.sha256()
    for part in (shape, ids):
        hasher.update(part.contiguous().numpy().astype("<i8").tobytes())
    for row in images.rows if images is not None else ():
        hasher.update(row.digest.encode() if row is not None else b"-")
    return hasher.hexdigest()


def tokens_per_column_warning(tokens: int, in_features: int) -> str | None:
    """Return a warning when fewer than 8 tokens were seen per input column, too few for statistics; else None."""
    if tokens >= TOKENS_PER_COLUMN * in_features:
        return None
    return (
        f"{tokens} calibration tokens for {in_features} input columns, "
        f"{tokens / in_features:.1f} per column: below {TOKENS_PER_COLUMN} the statistics are "
        "mostly noise; raise --samples or --length"
    )


def _join(documents: Iterable[Sequence[int]], eos_id: int | None) -> array[int]:
    stream = array("q")
    for ids in documents:
        if stream and ids and eos_id is not None:
            stream.append(eos_id)
        stream.extend(ids)
    return stream


def _spread(windows: int, count: int, seed: int) -> list[int]:
    generator = random.Random(seed)  # of its methods, random() alone is stable across versions
    edges = [i * windows // count for i in range(count + 1)]
    return [low + int(generator.random() * (high - low)) for low, high in pairwise(edges)]


def duplicated(ids: Tensor, images: ImageRows | None = None) -> int:
    """Return how many rows repeat another."""
    seen = images.rows if images is not None else [None] * len(ids)
    pairs = zip(ids, seen, strict=True)
    return len(ids) - len({(row.numpy().tobytes(), has and has.digest) for row, has in pairs})
