"""Rows of token ids from a SOURCE, in one call.

How much is read follows from what is wanted: `BYTES_PER_TOKEN` bytes of text for every token of the
rows, several times what English needs, so that the rows can be spread over more text than they use
and a huge file costs no more than a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from quantforge_calibration.chat import ChatTemplate, load_chat_template
from quantforge_calibration.image_documents import ImageDocument, first_image, image_documents
from quantforge_calibration.image_rows import pack_images
from quantforge_calibration.readers import UnusedColumns
from quantforge_calibration.row_count import BYTES_PER_TOKEN, share_rows
from quantforge_calibration.row_processor import load_processor
from quantforge_calibration.sampler import (
    Choice,
    Sample,
    combine,
    given_rows,
    pack_rows,
    sample_of_images,
    with_random_rows,
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
    corpus: Corpus = "calibration"
    allow_fewer: bool = False  # of other sources too; builtin always may
    random: float = 0.0  # share of the rows whose tokens are drawn at random
    offline: bool = False


def draw(
    request: Request,
    tokenizer: TextTokenizer,
    *,
    chat: ChatTemplate | None = None,
    own_rows: OwnRows | None = None,
    model: Path | None = None,
    unused: UnusedColumns | None = None,
) -> Sample:
    """Read, tokenize and sample.

    Args:
        request: source, rows, length, seed ...
        tokenizer: of the model.
        chat: renders ``messages``; None leaves them an error.
        own_rows: makes the rows of the source ``self``.
        model: the directory whose processor reads the images that rows name; None takes these rows as texts.
        unused: takes the columns that nothing uses.

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
        else _read_images(source, rows, request, tokenizer, chat, model, named, unused)
        if model and (named := first_image(source))
        else _read(source, rows, request, tokenizer, chat, unused)
        for source, rows in zip(sources, shares, strict=True)
    ]
    sample = samples[0] if len(samples) == 1 else combine(samples)
    return with_random_rows(sample, request.random, tokenizer, request.seed)


def _own(source: Source, rows: int, length: int, own_rows: OwnRows | None) -> Sample:
    if own_rows is None:
        raise SourceError(f"'{source.name}' needs a model that writes the text", "use builtin")
    return given_rows(own_rows(rows, length), source.name)


def _read_images(
    source: Source,
    rows: int,
    request: Request,
    tokenizer: TextTokenizer,
    chat: ChatTemplate | None,
    model: Path,
    named: str,
    unused: UnusedColumns | None,
) -> Sample:
    most = rows * request.length * BYTES_PER_TOKEN
    found = image_documents(source, most, chat=chat is not None, unused=unused)
    processor = load_processor(model, named)
    if chat is not None:
        chat = load_chat_template(model, processor=True)
    packed = pack_images(_rendered(found, chat, unused), rows, request.length, processor, tokenizer)
    there = len(packed.ids)
    if there < (1 if request.allow_fewer else rows):
        raise SourceError(
            f"{source.name} fills {there} rows of {request.length} tokens, {rows} are asked for",
            f"give more rows, or --samples {there}" if there else "give rows with text",
        )
    return sample_of_images(packed, rows, source.name)


def _rendered(
    documents: Iterator[ImageDocument], chat: ChatTemplate | None, unused: UnusedColumns | None
) -> Iterator[ImageDocument]:
    """Yield documents with the texts of their messages, those without any text left out."""
    for document in documents:
        text = document.record
        if not isinstance(text, str):
            assert chat is not None  # without it messages are an error
            text = chat.render(text, unused=unused)
        if text.strip():
            yield replace(document, record=text)


def _read(
    source: Source,
    rows: int,
    request: Request,
    tokenizer: TextTokenizer,
    chat: ChatTemplate | None,
    unused: UnusedColumns | None,
) -> Sample:
    texts = documents(
        source,
        rows * request.length * BYTES_PER_TOKEN,
        corpus=request.corpus,
        chat=chat,
        offline=request.offline,
        unused=unused,
    )
    ids = (
        tokenizer.encode(text, f"{source.name}, document {number}")
        for number, text in enumerate(texts, 1)
    )
    return pack_rows(
        ids,
        rows,
        request.length,
        tokenizer.bos_id,
        tokenizer.eos_id,
        request.seed,
        request.choose,
        allow_fewer=request.allow_fewer or source.kind == "builtin",
        source=source.name,
    )
