"""Rows of token ids from a SOURCE, in one call.

How much is read follows from what is wanted: `BYTES_PER_TOKEN` bytes of text for every token of the
rows, several times what English needs, so that the rows can be spread over more text than they use
and a huge file costs no more than a small one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from quantforge_calibration.chat import ChatTemplate, render
from quantforge_calibration.row_count import BYTES_PER_TOKEN, share_rows
from quantforge_calibration.sampler import (
    Choice,
    Sample,
    combine,
    given_rows,
    pack_rows,
)
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.sources import Corpus, Source, documents, parse_sources
from quantforge_calibration.tokenizer import TextTokenizer

OwnRows = Callable[[int, int], Tensor]  # (rows, length) -> int64 [rows, length]


@dataclass(frozen=True, slots=True)
class Request:
    """Request for rows: everything that decides them, besides the files and the tokenizer."""

    source: str = "builtin"
    rows: int = 128
    length: int = 512
    seed: int = 0
    choose: Choice = "spread"
    column: str = "text"
    corpus: Corpus = "calibration"
    allow_fewer: bool = False  # of other sources too; builtin always may
    offline: bool = False


def draw(
    request: Request,
    tokenizer: TextTokenizer,
    *,
    chat: ChatTemplate | None = None,
    own_rows: OwnRows | None = None,
) -> Sample:
    """Read, tokenize and sample.

    Args:
        request: source, rows, length, seed ...
        tokenizer: of the model.
        chat: renders ``messages``; None leaves them an error.
        own_rows: makes the rows of the source ``self``.

    Returns:
        ``request.rows`` rows; fewer only where ``builtin`` (or, with ``allow_fewer``, any
        source) is used up.

    Raises:
        SourceError: a source is missing, malformed or too short.
    """
    sources = parse_sources(request.source)
    shares = share_rows(request.rows, [source.weight for source in sources])
    samples = [
        _own(source, rows, request.length, own_rows)
        if source.kind == "self"
        else _read(source, rows, request, tokenizer, chat)
        for source, rows in zip(sources, shares, strict=True)
    ]
    return samples[0] if len(samples) == 1 else combine(samples)


def _own(source: Source, rows: int, length: int, own_rows: OwnRows | None) -> Sample:
    if own_rows is None:
        raise SourceError(f"'{source.name}' needs a model that writes the text", "use builtin")
    return given_rows(own_rows(rows, length), source.name)


def _read(
    source: Source, rows: int, request: Request, tokenizer: TextTokenizer, chat: ChatTemplate | None
) -> Sample:
    texts = documents(
        source,
        rows * request.length * BYTES_PER_TOKEN,
        column=request.column,
        corpus=request.corpus,
        render=partial(render, chat) if chat else None,
        offline=request.offline,
    )
    return pack_rows(
        map(tokenizer.encode, texts),
        rows,
        request.length,
        tokenizer.bos_id,
        tokenizer.eos_id,
        request.seed,
        request.choose,
        allow_fewer=request.allow_fewer or source.kind == "builtin",
        source=source.name,
    )
