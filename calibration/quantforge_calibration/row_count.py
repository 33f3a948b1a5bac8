"""Rows that texts give a model, counted without drawing them, and so without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from quantforge_calibration.chat import ChatTemplate, load_chat_template
from quantforge_calibration.image_documents import check_images, first_image
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.sources import Source, documents, parse_sources
from quantforge_calibration.tokenizer import TextTokenizer, load_tokenizer

BUILTIN = "builtin"
BYTES_PER_TOKEN = (
    32  # of text that is read for each token of the rows, several times what English needs
)
_FIRST = 8  # bytes per token that are looked at first: enough of most texts
_WHOLE = 1 << 40  # bytes, more than the text has
_ONLY_THE_RUN_KNOWS = ("self", "hub")


def builtin_rows(model: Path, length: int, most: int) -> int:
    """Count the rows of ``length`` ids that `draw` makes of the builtin text, which is read no further than they need.

    Args:
        model: the directory with ``tokenizer.json``.
        length: ids per row, at least 2.
        most: rows that are asked for.

    Raises:
        SourceError: as `load_tokenizer`.
    """
    tokenizer = load_tokenizer(model)
    texts = (text for source in parse_sources(BUILTIN) for text in documents(source, _WHOLE))
    payload = payload_of(length, tokenizer)
    return min(_tokens(texts, tokenizer, most * payload) // payload, most)


def check_rows(
    text: str,
    model: Path,
    rows: int,
    length: int,
    *,
    chat_template: bool = False,
    vocabulary: int | None = None,
) -> None:
    """Refuse what `draw` would refuse of the local texts of a SOURCE, reading no more of them than necessary.

    Args:
        text: the SOURCE; what of it the model writes or the hub has is left to `draw`.
        model: the directory with ``tokenizer.json``.
        rows: how many are asked for, of all sources together.
        length: ids per row, at least 2.
        chat_template: render conversations through the model's template.
        vocabulary: rows of the model's embedding.

    Raises:
        SourceError: a source is missing, malformed or too short, or names a token past the embedding.
    """
    sources = parse_sources(text)
    shares = share_rows(rows, [source.weight for source in sources])
    tokenizer = load_tokenizer(model, vocabulary)
    chat = load_chat_template(model) if chat_template else None
    for source, share in zip(sources, shares, strict=True):
        if source.kind not in _ONLY_THE_RUN_KNOWS:
            wanted = 1 if source.kind == BUILTIN else share
            if first_image(source) is None:
                _check_source(source, share, wanted, length, tokenizer, chat)
            else:
                check_images(source, share, model, chat=chat_template)


def _check_source(
    source: Source,
    share: int,
    wanted: int,
    length: int,
    tokenizer: TextTokenizer,
    chat: ChatTemplate | None,
) -> None:
    payload, tokens = payload_of(length, tokenizer), 0
    wanted_tokens = wanted * payload
    # All of the text that `draw` reads may have a token past the embedding, where there are such tokens.
    enough = _WHOLE if tokenizer.exceeds_rows else wanted_tokens
    for each in (BYTES_PER_TOKEN,) if tokenizer.exceeds_rows else (_FIRST, BYTES_PER_TOKEN):
        texts = documents(
            source,
            share * length * each,
            chat=chat,
        )
        tokens = _tokens(texts, tokenizer, enough, source.name)
        if tokens >= wanted_tokens:
            return
    raise too_short(source.name, tokens, wanted, payload)


def payload_of(length: int, tokenizer: TextTokenizer) -> int:
    """Return how many ids of a row are text."""
    return length - (tokenizer.bos_id is not None)


def share_rows(rows: int, weights: Sequence[float]) -> list[int]:
    """Share rows out by weight: largest remainder, earlier sources first; they sum to ``rows``.

    Raises:
        SourceError: a source would get no row.
    """
    exact = [rows * weight / sum(weights) for weight in weights]
    shares = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: rows - sum(shares)]:
        shares[i] += 1
    if 0 in shares:
        raise SourceError(
            f"{rows} rows are too few for {len(shares)} sources with these weights",
            "raise --samples, or give more equal weights",
        )
    return shares


def too_short(source: str, tokens: int, rows: int, payload: int) -> SourceError:
    """Return the refusal of a text of so many ``tokens`` where ``rows`` of ``payload`` ids are wanted."""
    fit = tokens // payload
    smaller = f"--samples {fit}" if fit else "a smaller --length"
    return SourceError(
        f"{source} has {tokens} tokens, and {rows} rows of {payload} need {rows * payload}",
        f"give more text, or {smaller}",
    )


def _tokens(
    texts: Iterable[str], tokenizer: TextTokenizer, enough: int, source: str = BUILTIN
) -> int:
    """Count the ids of joined texts, as the sampler joins them, until there are ``enough``."""
    tokens, between = 0, tokenizer.eos_id is not None
    for number, text in enumerate(texts, 1):
        count = len(tokenizer.encode(text, f"{source}, document {number}"))
        tokens += count + (between and tokens > 0 and count > 0)
        if tokens >= enough:
            break
    return tokens
