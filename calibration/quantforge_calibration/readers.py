"""Read documents from files and hub datasets, never more of them than requested.

Calibration text is untrusted input: it may be ten gigabytes on one line, compressed, in another encoding, or not text
at all. Every reader here holds a bounded amount in memory, and turns its input into documents or into a `SourceError`
that names the file (and the line).

A *record* is the content of one JSON line or one table row: a text, or a conversation. Conversations are parsed only on
request. Columns that are not used are collected.

* ``.txt`` (and any unknown suffix): the whole file is **one** document. At most ``max_bytes`` are read, in one piece,
  and the cut is moved back to the last line end; there are no chunks whose size could change the tokens.
* ``.jsonl``: one object per line, with the line length limited by `quantforge_files.roles.LINE`.
* ``.parquet``: streamed in batches of rows, after checking the declared size of the row groups.
* hub: streamed through the optional ``datasets`` library.
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
    """Columns of rows that are not used, collected by file while documents are read.

    Attributes:
        by_file: names of the unused columns by file name.
    """

    def __init__(self) -> None:
        self.by_file: dict[str, set[str]] = {}

    def add(self, file: str, names: Iterable[str]) -> None:
        """Record unused columns of a file."""
        if columns := {*names}:
            self.by_file.setdefault(file, set()).update(columns)

    def describe(self) -> str:
        """Return a sentence that lists the columns, "" if there are none; files with the same columns are combined."""
        files: dict[tuple[str, ...], list[str]] = {}
        for file, columns in sorted(self.by_file.items()):
            files.setdefault(tuple(sorted(columns)), []).append(file)
        entries = []
        for unused_columns, names in files.items():
            others_text = f" and {len(names) - 1} more files" if len(names) > 1 else ""
            entries.append(f"{', '.join(unused_columns)} in {names[0]}{others_text}")
        return f"columns that are not used: {'; '.join(entries)}" if entries else ""


@dataclass(frozen=True, slots=True)
class RowReader:
    """Converts rows to records.

    Attributes:
        column: name of the column with the text.
        chat: whether a row with messages is a conversation.
        unused: collects the columns that are not used.
    """

    column: str = "text"
    chat: bool = False
    unused: UnusedColumns = field(default_factory=UnusedColumns)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that are read."""
        return (self.column, *(conversations.FIELDS if self.chat else ()))

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Return the names of the columns of which a row must have at least one."""
        return (self.column, *((conversations.MESSAGES,) if self.chat else ()))

    def record(
        self, file: str, where: str, fields: Mapping[str, Any], other_columns: Iterable[str] = ()
    ) -> Iterator[Record]:
        """Yield the text or the conversation of one row; yield nothing for a null.

        Args:
            file: name of the file, to collect unused columns by.
            where: file and row, for error messages.
            fields: fields of the row.
            other_columns: columns that the caller uses.

        Raises:
            SourceError: the row has neither a text nor messages, or a field has the wrong type.
        """
        chat_record = conversation(where, file, fields) if self.chat else None
        used_columns = conversations.FIELDS if chat_record is not None else (self.column,)
        set_columns = {name for name, value in fields.items() if value is not None}
        self.unused.add(file, set_columns.difference(used_columns, other_columns))
        if chat_record is not None:
            yield chat_record
        elif isinstance(text := fields.get(self.column), str):
            yield text
        elif text is not None or fields.keys().isdisjoint(self.text_columns):
            raise _missing_text_error(where, fields, self.column)


def check_is_text(path: Path) -> None:
    """Check by its first bytes that a file is text or parquet, before reading gigabytes to compute its digest.

    Raises:
        SourceError: it is compressed, is not parquet despite its suffix, or has NUL bytes.
    """
    data = FILES.read_start(path, TABLE, HEAD_BYTES, None)
    _refuse_compressed(path, data)
    if path.suffix == ".parquet":
        if not data.startswith(b"PAR1"):
            raise SourceError(f"{path} is no parquet", "write the file again, or use .jsonl")
    elif b"\0" in data:
        raise SourceError(f"{path} is not text: it holds NUL bytes", "give a UTF-8 text file")


def read_text(path: Path, max_bytes: int) -> str:
    """Return the text of a file, or its beginning up to the last line end within ``max_bytes``.

    At most the limit of `quantforge_files.roles.TEXT` is read.

    Raises:
        SourceError: the file cannot be read, is compressed, has NUL bytes or is not UTF-8.
    """
    max_bytes = min(max_bytes, TEXT.max_bytes)
    data = FILES.read_start(path, TABLE, max_bytes + 1, None)
    _refuse_compressed(path, data)
    is_complete = len(data) <= max_bytes
    if not is_complete:
        data = data[: data.rfind(b"\n", 0, max_bytes) + 1] or data[:max_bytes]
    try:
        # Not final: a cut inside the last character of a line without end is not an error.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=is_complete)
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is not UTF-8 text: byte {error.start} cannot be decoded",
            f"convert it: iconv -f LATIN1 -t UTF-8 '{path}' > converted.txt",
        ) from error
    if "\0" in text:
        raise SourceError(f"{path} is not text: it holds NUL bytes", "give a UTF-8 text file")
    return text


def read_jsonl(path: Path, row_reader: RowReader) -> Iterator[Record]:
    """Yield the record of every line, with one line in memory at a time.

    Raises:
        SourceError: a line is too long, is not a JSON object, or lacks the column.
    """
    for where, fields in json_lines(path):
        yield from row_reader.record(path.name, where, fields)


def json_lines(path: Path, containing: bytes = b"") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield location and object of every line that contains the given bytes.

    Raises:
        SourceError: a line is too long, or is not a JSON object.
    """
    with FILES.stream(path, TABLE, None) as file:
        _refuse_compressed(path, file.read(8))
        file.seek(0)
        number = 0
        while line := file.readline(LINE.max_bytes + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > LINE.max_bytes:
                raise SourceError(
                    f"{where} is longer than {LINE.max_bytes} bytes", "write one document per line"
                )
            if line.strip() and containing in line:
                yield where, _json_object(where, line)


def read_parquet(path: Path, row_reader: RowReader) -> Iterator[Record]:
    """Yield the record of every row, with 64 rows in memory at a time.

    Raises:
        SourceError: pyarrow is not installed, or the file is malformed or lacks the column.
    """
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise SourceError(
            f"{path}: reading .parquet needs pyarrow", "pip install 'quantforge[datasets]'"
        ) from error
    try:
        with (
            FILES.stream(path, TABLE, None) as stream,
            ParquetFile(stream, buffer_size=1 << 20) as file,
        ):
            yield from _parquet_records(path, file, row_reader)
    except SourceError:
        raise
    except Exception as error:  # errors of pyarrow, or of values that Python cannot represent
        raise SourceError(
            f"{path} cannot be read as parquet: {error}", "write the file again, or use .jsonl"
        ) from error


def _parquet_records(path: Path, file: ParquetFile, row_reader: RowReader) -> Iterator[Record]:
    """Yield the records of an opened parquet file."""
    names = file.schema_arrow.names
    read_columns = [name for name in row_reader.columns if name in names]
    if {*names}.isdisjoint(row_reader.text_columns):
        raise _missing_text_error(str(path), names, row_reader.column)
    _check_row_groups(path, file.metadata)
    row_reader.unused.add(path.name, {*names}.difference(read_columns))
    number = 0
    for batch in file.iter_batches(batch_size=64, columns=read_columns):
        for row in batch.to_pylist(maps_as_pydicts="strict"):
            number += 1
            yield from row_reader.record(path.name, f"{path}, row {number}", row)


def read_hub(source: str, split: str, row_reader: RowReader, *, offline: bool) -> Iterator[Record]:
    """Yield the records of one split of a hub dataset, named ``NAME:SPLIT[:COLUMN]``.

    Raises:
        SourceError: ``offline`` is set, the datasets library is not installed, or the dataset cannot be read.
    """
    name, _, split_and_column = source.partition(":")
    download = (
        f"hf download --repo-type dataset {name} --local-dir DIR; give DIR:{split_and_column}"
    )
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
            yield from row_reader.record(source, f"{source}, row {number}", row)
    except SourceError:
        raise
    except Exception as error:  # datasets raises errors of its network and file layers
        raise SourceError(
            f"the hub dataset '{source}' cannot be read: {error}", download
        ) from error


def _missing_text_error(where: str, fields_or_names: Iterable[str], column: str) -> SourceError:
    """Return the error for a row or table without a text, with a hint that depends on its other columns."""
    field_names = sorted(fields_or_names)
    value = fields_or_names.get(column) if isinstance(fields_or_names, Mapping) else None
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        keys = " and ".join(f"'{key}'" for key in sorted(map(str, value[0]))[:4])
        rename_hint = (
            ", 'from' to role (human is user, gpt is assistant), 'value' to content"
            if "from" in value[0]
            else ""
        )
        return SourceError(
            f"{where}: '{column}' is a list of messages with {keys}, not a text",
            f"rename '{column}' to messages{rename_hint}, and give the file with --chat-template",
        )
    if value is not None:
        return SourceError(
            f"{where}: '{column}' is of the type {type(value).__name__}, not a text",
            f"name the field with the text, FILE:FIELD or DIRECTORY:SPLIT:FIELD, of: {', '.join(field_names)[:200]}",
        )
    if "messages" in field_names:
        return SourceError(
            f"{where} holds chat messages and no text in '{column}'",
            "to render them: --chat-template, or chat_template = true under [calibration] of a recipe",
        )
    return SourceError(
        f"{where} has no text in '{column}'; its fields are: {', '.join(field_names)[:200]}",
        "name the field: FILE:FIELD or DIRECTORY:SPLIT:FIELD",
    )


def _check_row_groups(path: Path, metadata: FileMetaData) -> None:
    """Raise `SourceError` if a row group of a parquet file is too large."""
    sizes = (metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    if (largest := max(sizes, default=0)) > ROW_GROUP_LIMIT:
        raise SourceError(
            f"{path} has a row group of {largest} bytes, the limit is {ROW_GROUP_LIMIT}",
            "write it again with smaller row groups, or use .jsonl",
        )


def _json_object(where: str, line: bytes) -> Mapping[str, Any]:
    """Parse a line as a JSON object."""
    return FILES.parse_object(line.removeprefix(codecs.BOM_UTF8), where, LINE, loose=True)


def _refuse_compressed(path: Path, data: bytes) -> None:
    """Raise `SourceError` if the first bytes of a file are those of a compressed format."""
    for magic, (name, command) in COMPRESSED.items():
        if data.startswith(magic):
            raise SourceError(f"{path} is compressed ({name})", f"unpack it: {command} '{path}'")
