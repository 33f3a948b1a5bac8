"""Parse a SOURCE of calibration text as typed by the user, and read its documents.

====================  ==========================================================================
``builtin``           the text that ships with this package (``corpus/``)
``self``              text that the model generates; its token rows are supplied by the caller
``FILE[:COLUMN]``     ``.txt`` ``.jsonl`` ``.parquet``
``DIR[:SPLIT[:COL]]`` a local directory: its files of those kinds whose path contains SPLIT
``NAME:SPLIT[:COL]``  a dataset of the hub, through the optional ``datasets`` library
``a=3,b=1``           a mixture: the rows are divided in proportion to the weights
====================  ==========================================================================

An existing path takes precedence over every other interpretation, so a file named ``builtin`` or ``a=3,b.txt`` can be
used.
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
FORMS_HINT = (
    "give FILE.txt, FILE.jsonl, FILE.parquet, DIR:SPLIT:COLUMN, HUB/NAME:SPLIT:COLUMN or builtin"
)


@dataclass(frozen=True, slots=True)
class Source:
    """One source of text.

    Attributes:
        kind: kind of the source.
        name: the source as typed, without its weight.
        path: local file or directory, if it is one.
        split: split of a dataset or directory.
        column: column with the text; "" for the default.
        weight: weight in a mixture.
    """

    kind: Kind
    name: str
    path: Path | None = None
    split: str = ""
    column: str = ""
    weight: float = 1.0


def parse_sources(text: str) -> tuple[Source, ...]:
    """Parse a SOURCE or a mixture; checks which paths exist, but reads no file and uses no network.

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
    """Yield the documents of one source, at most ``max_bytes`` of UTF-8 in total; the last one is truncated.

    Args:
        source: a source from `parse_sources`, except ``self``.
        max_bytes: where to stop; the truncation depends on nothing else.
        column: column to read if the source names none.
        corpus: which of the two texts ``builtin`` refers to.
        chat: renders conversations; None makes chat messages an error.
        offline: never access the hub.
        unused: collects the columns that are not used.

    Raises:
        SourceError: as the readers, or if there is no text at all.
    """
    rows = RowReader(source.column or column, chat is not None, unused or UnusedColumns())
    records: Iterable[Record]
    if source.kind == "builtin":
        records = builtin(corpus)
    elif source.kind == "hub":
        records = read_hub(source.name, source.split, rows, offline=offline)
    elif source.path is None:
        raise SourceError(f"'{source.name}' has no text to read", FORMS_HINT)
    else:
        records = (
            item
            for path in source_files(source.path, source)
            for item in read_file(path, max_bytes, rows)
        )
    texts = (
        record
        if isinstance(record, str)
        else cast("ChatTemplate", chat).render(record, unused=rows.unused)
        for record in records
    )
    return _limit_bytes(texts, max_bytes, source.name)


def builtin(corpus: Corpus = "calibration") -> Iterator[str]:
    """Yield the documents (one per file, by name) of a corpus that ships with this package."""
    folder = files("quantforge_calibration") / "corpus" / corpus
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        yield file.read_text(encoding="utf-8")


def _exists(text: str) -> bool:
    """Return whether a text is the path of an existing file or directory."""
    try:
        return bool(text.strip()) and Path(text).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # a name too long for a path; ~nobody; a null
        return False


def _parse_weighted(item: str) -> Source:
    """Parse a part of a mixture with an optional weight."""
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
    """Parse a source without a weight."""
    for colons in range(3):
        head, *fields = name.rsplit(":", colons)
        if len(fields) == colons and _exists(head):
            return _local_source(name, Path(head).expanduser(), fields)
    if name in ("builtin", "self"):
        return Source("builtin" if name == "builtin" else "self", name)
    head, *fields = name.split(":")
    if head.endswith(SUFFIXES) or head.startswith((".", "/", "~")) or head.count("/") > 1:
        raise SourceError(f"there is no file or directory '{head}'", FORMS_HINT)
    if not 1 <= len(fields) <= 2 or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", head):
        close_matches = get_close_matches(name, ("builtin", "self"), n=1)
        raise SourceError(
            f"'{name}' is not a source of text: no such file, and not NAME:SPLIT",
            f"did you mean '{close_matches[0]}'?" if close_matches else FORMS_HINT,
        )
    return Source("hub", name, split=fields[0], column="".join(fields[1:]))


def _local_source(name: str, path: Path, fields: list[str]) -> Source:
    """Create the source for an existing path with its split and column."""
    if path.is_dir():
        split, column = [*fields, "", ""][:2]
        return Source("directory", name, path, split, column)
    if len(fields) > 1:
        raise SourceError(f"'{path}' is a file and has no splits", f"give {path}:{fields[-1]}")
    return Source("file", name, path, column="".join(fields))


def source_files(path: Path, source: Source) -> list[Path]:
    """Return the files of a local source, sorted; raise `SourceError` if a directory has none for its split."""
    if source.kind == "file":
        return [path]
    candidates = [item for item in FILES.list_files_below(path) if item.suffix in SUFFIXES]
    matching = [item for item in candidates if source.split in str(item.relative_to(path))]
    if not matching:
        names = ", ".join(item.name for item in candidates[:8]) or "none"
        raise SourceError(
            f"'{path}' has no {'/'.join(SUFFIXES)} file for split '{source.split}'; found: {names}",
            f"give {path}:SPLIT, a part of one of those names",
        )
    return matching


def read_file(path: Path, max_bytes: int, row_reader: RowReader) -> Iterator[Record]:
    """Yield the records of a file with the reader for its suffix; raises as that reader does."""
    match path.suffix.lower():
        case ".jsonl":
            yield from read_jsonl(path, row_reader)
        case ".parquet":
            yield from read_parquet(path, row_reader)
        case ".json":
            raise SourceError(
                f"{path} is one JSON document",
                f"one object per line: jq -c '.[]' '{path}' > data.jsonl",
            )
        case _:
            yield read_text(path, max_bytes)


def _limit_bytes(texts: Iterable[str], max_bytes: int, source_name: str) -> Iterator[str]:
    """Yield non-empty texts up to ``max_bytes`` of UTF-8; the last one is truncated."""
    bytes_left = max_bytes
    for text in texts:
        if not text.strip():
            continue
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise SourceError(
                f"'{source_name}' holds half of a surrogate pair: {error.reason}",
                "remove \\ud800-like escapes",
            ) from error
        yield text if len(data) <= bytes_left else data[:bytes_left].decode(errors="ignore")
        bytes_left -= len(data)
        if bytes_left <= 0:
            return
    if bytes_left == max_bytes:
        raise SourceError(f"'{source_name}' holds no text", "give a source that is not empty")
