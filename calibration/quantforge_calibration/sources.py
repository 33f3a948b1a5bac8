"""A SOURCE, as it is typed, and the documents that it names.

====================  ==========================================================================
``builtin``           the text that ships with this package (``corpus/``)
``self``              text that the model writes itself; its token rows are made by the caller
``FILE[:COLUMN]``     ``.txt`` ``.jsonl`` ``.parquet``
``DIR[:SPLIT[:COL]]`` a local directory: its files of those kinds whose path contains SPLIT
``NAME:SPLIT[:COL]``  a dataset of the hub, through the optional ``datasets`` library
``a=3,b=1``           a mixture: the rows are shared out by weight
====================  ==========================================================================

A path that exists wins over every other reading, so a file called ``builtin`` or ``a=3,b.txt`` can
be used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from quantforge_calibration.readers import (
    Record,
    RowReader,
    UnusedColumns,
    read_hub,
    read_jsonl,
    read_parquet,
    read_text,
)
from quantforge_calibration.source_error import FILES, SourceError

if TYPE_CHECKING:
    from quantforge_calibration.chat import ChatTemplate

Kind = Literal["builtin", "self", "file", "directory", "hub"]
Corpus = Literal["calibration", "evaluation"]


SUFFIXES = (".txt", ".jsonl", ".parquet")
FORMS = (
    "give FILE.txt, FILE.jsonl, FILE.parquet, DIR:SPLIT:COLUMN, HUB/NAME:SPLIT:COLUMN or builtin"
)


@dataclass(frozen=True, slots=True)
class Source:
    """One source of text. ``name`` is what was typed, without the weight."""

    kind: Kind
    name: str
    path: Path | None = None
    split: str = ""
    column: str = ""
    weight: float = 1.0


def parse_sources(text: str) -> tuple[Source, ...]:
    """Parse a SOURCE or a mixture of them; looks at the disk, reads nothing, asks no network.

    Raises:
        SourceError: a part is empty, missing, or not understood.
    """
    if _exists(text):
        return (_parse_one(text),)
    return tuple(_parse_weighted(item.strip()) for item in text.split(","))


def documents(
    source: Source,
    max_bytes: int,
    *,
    column: str = "text",
    corpus: Corpus = "calibration",
    chat: ChatTemplate | None = None,
    offline: bool = False,
    unused: UnusedColumns | None = None,
) -> Iterator[str]:
    """Yield the documents of one source, ``max_bytes`` of UTF-8 in all; the last one is cut there.

    Args:
        source: from `parse_sources`; not ``self``.
        max_bytes: where to stop; nothing else about the reading decides the cut.
        column: the field to read where the source names none.
        corpus: which of the two texts ``builtin`` means.
        chat: renders conversations; without it, chat messages are an error.
        offline: refuse to ask the hub.
        unused: takes the columns that are not used, while documents are read.

    Raises:
        SourceError: as the readers do, or when there is no text at all.
    """
    rows = RowReader(source.column or column, chat is not None, unused or UnusedColumns())
    records: Iterable[Record]
    if source.kind == "builtin":
        records = builtin(corpus)
    elif source.kind == "hub":
        records = read_hub(source.name, source.split, rows, offline=offline)
    elif source.path is None:
        raise SourceError(f"'{source.name}' has no text to read", FORMS)
    else:
        records = (
            item
            for path in files_of(source.path, source)
            for item in read_file(path, max_bytes, rows)
        )
    texts = (
        record
        if isinstance(record, str)
        else cast("ChatTemplate", chat).render(record, unused=rows.unused)
        for record in records
    )
    return _bounded(texts, max_bytes, source.name)


def builtin(corpus: Corpus = "calibration") -> Iterator[str]:
    """Yield the documents (one per file, by name) of a corpus that ships here."""
    folder = files("quantforge_calibration") / "corpus" / corpus
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        yield file.read_text(encoding="utf-8")


def _exists(text: str) -> bool:
    try:
        return bool(text.strip()) and Path(text).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # a name too long for a path; ~nobody; a null
        return False


def _parse_weighted(item: str) -> Source:
    name, equals, weight = item.rpartition("=")
    if not equals or _exists(item):
        return _parse_one(item)
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise SourceError(
            f"'{weight}' is not a weight (in '{item}')",
            "weights are positive numbers: a.txt=3,builtin=1",
        )
    return replace(_parse_one(name.strip()), weight=value)


def _parse_one(name: str) -> Source:
    for colons in range(3):
        head, *fields = name.rsplit(":", colons)
        if len(fields) == colons and _exists(head):
            return _local(name, Path(head).expanduser(), fields)
    if name in ("builtin", "self"):
        return Source("builtin" if name == "builtin" else "self", name)
    head, *fields = name.split(":")
    if head.endswith(SUFFIXES) or head.startswith((".", "/", "~")) or head.count("/") > 1:
        raise SourceError(f"there is no file or directory '{head}'", FORMS)
    if not 1 <= len(fields) <= 2 or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", head):
        close = get_close_matches(name, ("builtin", "self"), n=1)
        raise SourceError(
            f"'{name}' is not a source of text: no such file, and not NAME:SPLIT",
            f"did you mean '{close[0]}'?" if close else FORMS,
        )
    return Source("hub", name, split=fields[0], column="".join(fields[1:]))


def _local(name: str, path: Path, fields: list[str]) -> Source:
    if path.is_dir():
        split, column = [*fields, "", ""][:2]
        return Source("directory", name, path, split, column)
    if len(fields) > 1:
        raise SourceError(f"'{path}' is a file and has no splits", f"give {path}:{fields[-1]}")
    return Source("file", name, path, column="".join(fields))


def files_of(path: Path, source: Source) -> list[Path]:
    """Return the files of a local source, sorted; `SourceError` when a directory has none for its split."""
    if source.kind == "file":
        return [path]
    found = [item for item in FILES.below(path) if item.suffix in SUFFIXES]
    chosen = [item for item in found if source.split in str(item.relative_to(path))]
    if not chosen:
        names = ", ".join(item.name for item in found[:8]) or "none"
        raise SourceError(
            f"'{path}' has no {'/'.join(SUFFIXES)} file for split '{source.split}'; found: {names}",
            f"give {path}:SPLIT, a part of one of those names",
        )
    return chosen


def read_file(path: Path, max_bytes: int, rows: RowReader) -> Iterator[Record]:
    """Yield the records of a file of text, by its suffix; errors as of its reader."""
    match path.suffix.lower():
        case ".jsonl":
            yield from read_jsonl(path, rows)
        case ".parquet":
            yield from read_parquet(path, rows)
        case ".json":
            raise SourceError(
                f"{path} is one JSON document",
                f"one object per line: jq -c '.[]' '{path}' > data.jsonl",
            )
        case _:
            yield read_text(path, max_bytes)


def _bounded(texts: Iterable[str], max_bytes: int, name: str) -> Iterator[str]:
    left = max_bytes
    for text in texts:
        if not text.strip():
            continue
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise SourceError(
                f"'{name}' holds half of a surrogate pair: {error.reason}",
                "remove \\ud800-like escapes",
            ) from error
        yield text if len(data) <= left else data[:left].decode(errors="ignore")
        left -= len(data)
        if left <= 0:
            return
    if left == max_bytes:
        raise SourceError(f"'{name}' holds no text", "give a source that is not empty")
