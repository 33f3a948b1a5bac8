"""Reading documents out of files and datasets of the hub, never more of them than asked for.

Calibration text is untrusted input like any other: it may be ten gigabytes on one line, compressed,
in another encoding, or not text at all. Every reader here holds a bounded amount in memory and
turns whatever it meets into a document or into a `SourceError` that names the file (and the line).

A *record* is what one line of JSON or one row of a table holds: a text, or a conversation.
Conversations are looked at only when the caller wants them. Columns that nothing reads are collected.

* ``.txt`` (and any suffix not listed): the whole file is **one** document. At most ``max_bytes``
  are read, in one piece, and the cut is moved back to the last line end; there are no chunks whose
  size could change the tokens.
* ``.jsonl``: one object per line, at most so many bytes of it as `quantforge_files.roles.LINE` says.
* ``.parquet``: streamed in batches of rows, with the declared size of a row group checked first.
* the hub: streamed through the optional ``datasets`` library.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge_calibration import conversations
from quantforge_calibration.conversations import Conversation, conversation
from quantforge_calibration.source_error import FILES, SourceError
from quantforge_files.roles import LINE, TABLE, TEXT

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData, ParquetFile

Record = str | Conversation

ROW_GROUP_LIMIT = 2 << 30

COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\xfd7zXZ": ("xz", "unxz -k"),
    b"PK\x03\x04": ("zip", "unzip"),
}
HEAD_BYTES = 4096


class UnusedColumns:
    """Columns that rows have and nothing uses, by file; collected while documents are read."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}

    def add(self, file: str, names: Iterable[str]) -> None:
        """Add columns of a file."""
        if more := {*names}:
            self.found.setdefault(file, set()).update(more)

    def note(self) -> str:
        """Return one sentence that lists them, "" where there are none; files with the same ones are one entry."""
        files: dict[tuple[str, ...], list[str]] = {}
        for file, columns in sorted(self.found.items()):
            files.setdefault(tuple(sorted(columns)), []).append(file)
        listed = []
        for unused, names in files.items():
            more = f" and {len(names) - 1} more files" if len(names) > 1 else ""
            listed.append(f"{', '.join(unused)} in {names[0]}{more}")
        return f"columns that are not used: {'; '.join(listed)}" if listed else ""


@dataclass(frozen=True, slots=True)
class RowReader:
    """How rows become records.

    Attributes:
        column: the field with the text.
        chat: whether a row with messages is a conversation.
        unused: takes the columns that are not read.
    """

    column: str = "text"
    chat: bool = False
    unused: UnusedColumns = field(default_factory=UnusedColumns)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that are read."""
        return (self.column, *(conversations.FIELDS if self.chat else ()))

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the names of the columns of which a row has to have one."""
        return (self.column, *((conversations.MESSAGES,) if self.chat else ()))

    def record(
        self, file: str, where: str, fields: Mapping[str, Any], also: Iterable[str] = ()
    ) -> Iterator[Record]:
        """Yield the text, or the conversation, of one row; a null yields nothing.

        Args:
            file: the name of the file, for what is not used.
            where: the file and row, for messages.
            fields: of the row.
            also: fields that the caller reads.

        Raises:
            SourceError: neither is there, or a field is of another type.
        """
        talk = conversation(where, file, fields) if self.chat else None
        read = conversations.FIELDS if talk is not None else (self.column,)
        given = {name for name, value in fields.items() if value is not None}
        self.unused.add(file, given.difference(read, also))
        if talk is not None:
            yield talk
        elif isinstance(text := fields.get(self.column), str):
            yield text
        elif text is not None or fields.keys().isdisjoint(self.texts):
            raise _no_text(where, fields, self.column)


def check_head(path: Path) -> None:
    """Refuse a file that is not a table of text, by its first bytes, before gigabytes of it are digested.

    Raises:
        SourceError: compressed, not parquet though named so, or NUL bytes where text should be.
    """
    data = FILES.head(path, TABLE, HEAD_BYTES, None)
    _refuse_compressed(path, data)
    if path.suffix == ".parquet":
        if not data.startswith(b"PAR1"):
            raise SourceError(f"{path} is no parquet", "write the file again, or use .jsonl")
    elif b"\0" in data:
        raise SourceError(f"{path} is not text: it holds NUL bytes", "give a UTF-8 text file")


def read_text(path: Path, max_bytes: int) -> str:
    """Return the text of a file, or its first ``max_bytes`` (at most `TEXT`'s limit) up to the last line end in them.

    Raises:
        SourceError: the file cannot be read, is compressed, holds NUL bytes or is not UTF-8.
    """
    max_bytes = min(max_bytes, TEXT.limit)
    data = FILES.head(path, TABLE, max_bytes + 1, None)
    _refuse_compressed(path, data)
    whole = len(data) <= max_bytes
    if not whole:
        data = data[: data.rfind(b"\n", 0, max_bytes) + 1] or data[:max_bytes]
    try:
        # Not final: a cut inside the last character of a line without end is not an error.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=whole)
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is not UTF-8 text: byte {error.start} cannot be decoded",
            f"convert it: iconv -f LATIN1 -t UTF-8 '{path}' > converted.txt",
        ) from error
    if "\0" in text:
        raise SourceError(f"{path} is not text: it holds NUL bytes", "give a UTF-8 text file")
    return text


def read_jsonl(path: Path, rows: RowReader) -> Iterator[Record]:
    """Yield the record of every line, one line in memory at a time.

    Raises:
        SourceError: a line is too long, is not a JSON object, or lacks the field.
    """
    for where, fields in json_lines(path):
        yield from rows.record(path.name, where, fields)


def json_lines(path: Path, having: bytes = b"") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the object of every line that holds some bytes, with the words for its place.

    Raises:
        SourceError: a line is too long, or is not a JSON object.
    """
    with FILES.stream(path, TABLE, None) as file:
        _refuse_compressed(path, file.read(8))
        file.seek(0)
        number = 0
        while line := file.readline(LINE.limit + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > LINE.limit:
                raise SourceError(
                    f"{where} is longer than {LINE.limit} bytes", "write one document per line"
                )
            if line.strip() and having in line:
                yield where, _json_object(where, line)


def read_parquet(path: Path, rows: RowReader) -> Iterator[Record]:
    """Yield the record of every row, 64 rows in memory at a time.

    Raises:
        SourceError: pyarrow is missing, or the file is malformed or lacks the column.
    """
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise SourceError(
            f"{path}: reading .parquet needs pyarrow", "pip install 'quantforge[datasets]'"
        ) from error
    try:
        with (
            FILES.stream(path, TABLE, None) as opened,
            ParquetFile(opened, buffer_size=1 << 20) as file,
        ):
            yield from _records(path, file, rows)
    except SourceError:
        raise
    except Exception as error:  # pyarrow's own, and what values raise that Python cannot hold
        raise SourceError(
            f"{path} cannot be read as parquet: {error}", "write the file again, or use .jsonl"
        ) from error


def _records(path: Path, file: ParquetFile, rows: RowReader) -> Iterator[Record]:
    names = file.schema_arrow.names
    wanted = [name for name in rows.columns if name in names]
    if {*names}.isdisjoint(rows.texts):
        raise _no_text(str(path), names, rows.column)
    _check_row_groups(path, file.metadata)
    rows.unused.add(path.name, {*names}.difference(wanted))
    number = 0
    for batch in file.iter_batches(batch_size=64, columns=wanted):
        for row in batch.to_pylist(maps_as_pydicts="strict"):
            number += 1
            yield from rows.record(path.name, f"{path}, row {number}", row)


def read_hub(source: str, split: str, rows: RowReader, *, offline: bool) -> Iterator[Record]:
    """Yield the records of one split of a dataset, named ``NAME:SPLIT[:COLUMN]``.

    Raises:
        SourceError: ``offline``, no library for it, or the dataset cannot be read.
    """
    name, _, rest = source.partition(":")
    download = f"hf download --repo-type dataset {name} --local-dir DIR; give DIR:{rest}"
    if offline:
        raise SourceError(
            f"'{name}' is no local path, and --offline forbids asking the hub", download
        )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise SourceError(
            f"'{name}' is not a local path, and reading from the hub needs the datasets library",
            f"pip install 'quantforge[datasets]', or {download}",
        ) from error
    try:
        for number, row in enumerate(load_dataset(name, split=split, streaming=True), 1):
            yield from rows.record(source, f"{source}, row {number}", row)
    except SourceError:
        raise
    except Exception as error:  # datasets passes on whatever its network and file layers raise
        raise SourceError(
            f"the hub dataset '{source}' cannot be read: {error}", download
        ) from error


def _no_text(where: str, names: Iterable[str], column: str) -> SourceError:
    fields, value = sorted(names), names.get(column) if isinstance(names, Mapping) else None
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        keys = " and ".join(f"'{key}'" for key in sorted(map(str, value[0]))[:4])
        renamed = (
            ", 'from' to role (human is user, gpt is assistant), 'value' to content"
            if "from" in value[0]
            else ""
        )
        return SourceError(
            f"{where}: '{column}' is a list of messages with {keys}, not a text",
            f"rename '{column}' to messages{renamed}, and give the file with --chat-template",
        )
    if value is not None:
        return SourceError(
            f"{where}: '{column}' is of the type {type(value).__name__}, not a text",
            f"name the field with the text, FILE:FIELD or DIRECTORY:SPLIT:FIELD, of: {', '.join(fields)[:200]}",
        )
    if "messages" in fields:
        return SourceError(
            f"{where} holds chat messages and no text in '{column}'",
            "to render them: --chat-template, or chat_template = true under [calibration] of a recipe",
        )
    return SourceError(
        f"{where} has no text in '{column}'; its fields are: {', '.join(fields)[:200]}",
        "name the field: FILE:FIELD or DIRECTORY:SPLIT:FIELD",
    )


def _check_row_groups(path: Path, metadata: FileMetaData) -> None:
    sizes = (metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    if (largest := max(sizes, default=0)) > ROW_GROUP_LIMIT:
        raise SourceError(
            f"{path} has a row group of {largest} bytes, the limit is {ROW_GROUP_LIMIT}",
            "write it again with smaller row groups, or use .jsonl",
        )


def _json_object(where: str, line: bytes) -> Mapping[str, Any]:
    return FILES.parse_object(line.removeprefix(codecs.BOM_UTF8), where, LINE, loose=True)


def _refuse_compressed(path: Path, data: bytes) -> None:
    for magic, (name, command) in COMPRESSED.items():
        if data.startswith(magic):
            raise SourceError(f"{path} is compressed ({name})", f"unpack it: {command} '{path}'")
