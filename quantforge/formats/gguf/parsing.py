"""GGUF files, read more strictly than llama.cpp and gguf-py do.

A header is numbers from a stranger: counts, lengths, sizes, offsets. Here each is compared with the bytes that are left
before anything is allocated or looped over, so that a hostile file costs no more time and memory than its own size.
Where the description of the format, llama.cpp and gguf-py disagree, the strictest of them is followed: what is accepted
here, both accept, and read alike (a property test). In particular the alignment is a power of two from 8 to 64 KiB, the
tensors are contiguous in the order of the table, and nothing but padding follows the last.

Strings of a vocabulary may be any bytes (there are pieces that are no UTF-8); keys, names and other strings may not.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantforge.errors import InputError
from quantforge.files.opener import FILES, changed
from quantforge.files.safetensors import TensorEntry
from quantforge.formats.gguf.container import (
    ALIGNMENT,
    BY_NUMBER,
    MAGIC,
    MAX_NAME,
    MAX_RANK,
    NUMBERS,
    TYPES,
    VERSION,
    Value,
    ValueType,
    padded,
)
from quantforge_files.opener import Stamp
from quantforge_files.roles import GGUF_HEADER, WEIGHTS

MAX_TENSORS = 1 << 18
MAX_KEYS = 1 << 16
MAX_HEADER_BYTES, MAX_VALUES = GGUF_HEADER.limit, GGUF_HEADER.values
_CHUNK = 1 << 20  # bytes that are read at a time
HINT = "the file is damaged or not GGUF: fetch or export it again"
MAX_KEY = 65535
MAX_ALIGNMENT = 1 << 16
_KEY = re.compile(r"[!-~]+")  # printable ASCII: vocabularies of templates have names of all kinds
_LEAST_KEY = 13  # bytes: length, type, one byte of value
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8
_TEXTS = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One tensor: type and shape in torch's order, absolute bytes from ``start`` to ``end``."""

    name: str
    type: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    stamp: Stamp

    def raw(self) -> TensorEntry:
        """Return its bytes as a tensor: blocks as ``U8 [rows, bytes of a row]``, plain types as they are."""
        layout = TYPES[self.type]
        if layout.columns == 1:
            return TensorEntry(
                self.name, self.type, self.shape, self.file, self.start, self.end, self.stamp
            )
        rows = (math.prod(self.shape[:-1]), layout.row_bytes(self.shape[-1]))
        return TensorEntry(self.name, "U8", rows, self.file, self.start, self.end, self.stamp)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file (or all parts of one): its keys, and its tensors in file order."""

    files: tuple[Path, ...]
    metadata: dict[str, Value]
    tensors: dict[str, TableEntry]

    def value(self, key: str, kind: type, otherwise: Any = None) -> Any:
        """Return the value of a key, checked to be of a Python type; ``otherwise`` where it is missing.

        Raises:
            InputError: another type, or missing without a default.
        """
        found = self.metadata.get(key)
        if found is None:
            if otherwise is None:
                raise InputError(
                    f"{self.files[0]}: key {key!r} is missing", HINT, file=str(self.files[0])
                )
            return otherwise
        value: Any = found.value
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InputError(
                f"{self.files[0]}: key {key!r} is {type(value).__name__}, expected {kind.__name__}",
                HINT,
                file=str(self.files[0]),
            )
        return value


def is_gguf(path: Path) -> bool:
    """Return whether a file begins like GGUF; its name does not matter."""
    try:
        return FILES.head(path, WEIGHTS, len(MAGIC), None) == MAGIC
    except InputError:
        return False


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of a file; of numbered parts, those of all parts.

    Raises:
        InputError: unreadable, or not exactly a GGUF file: the message names the key, tensor or offset.
    """
    first = _read_one(path, None)
    if "split.count" not in first.metadata:
        return first
    return _joined(path, first)


def _read_one(path: Path, inside: Path | None) -> GgufFile:
    with FILES.opened(path, WEIGHTS, inside) as descriptor:
        stamp = Stamp.of(descriptor)
        header = Header(path, descriptor, stamp.size)
        if stamp.size < 24 or header.take(4) != MAGIC:
            raise _no_gguf(path, header)
        version = header.number("<I")
        if version != VERSION:
            raise header.error(_version(version))
        tensors, keys = header.number("<q"), header.number("<q")
        header.check_count(tensors, _LEAST_TENSOR, MAX_TENSORS, "tensors")
        header.check_count(keys, _LEAST_KEY, MAX_KEYS, "keys")
        metadata = _read_keys(header, keys)
        alignment = _alignment_of(header, metadata)
        table = [_entry(header, path, stamp) for _ in range(tensors)]
        return GgufFile(
            (path,), metadata, _placed(header, table, padded(header.position, alignment), alignment)
        )


def _no_gguf(path: Path, header: Header) -> InputError:
    """Return the error for a file that does not begin like one: by its name, what it is instead."""
    hints = {
        ".toml": "a recipe, not a model: quantforge quantize MODEL --recipe FILE, then name its result",
        ".safetensors": "the weights alone: name the directory that holds them and config.json",
        **dict.fromkeys(
            _TEXTS,
            "a text, not a model: quantforge eval MODEL --text FILE, quantforge quantize MODEL --calibration FILE",
        ),
        ".json": "no model: name the directory that holds it, or a GGUF file",
    }
    if hint := hints.get(path.suffix.lower()):
        return InputError(f"{path}: no model, and no GGUF file", hint, file=str(path))
    return header.error("does not begin like a GGUF file")


def _version(version: int) -> str:
    if version & 0xFFFF == 0:
        return f"version {version}: a big-endian file; convert it to little-endian first"
    return f"version {version}, only {VERSION} is read"


def _entry(header: Header, path: Path, stamp: Stamp) -> TableEntry:
    name = _decoded_text(header, header.string("a tensor name", MAX_NAME), "a tensor name")
    if not name.isprintable() or not name:
        raise header.error(f"tensor name {name!a} is empty or not printable")
    rank = header.number("<I")
    if not 1 <= rank <= MAX_RANK:
        raise header.error(f"tensor {name!r}: {rank} dimensions", name)
    sizes = struct.unpack(f"<{rank}q", header.take(8 * rank))
    if any(not 0 < size < 1 << 48 for size in sizes) or math.prod(sizes) >= 1 << 56:
        raise header.error(f"tensor {name!r}: sizes {list(sizes)}", name)
    number = header.number("<i")
    if number not in BY_NUMBER:
        raise header.error(f"tensor {name!r}: unknown type {number}", name)
    layout = TYPES[BY_NUMBER[number]]
    if sizes[0] % layout.columns:
        raise header.error(
            f"tensor {name!r}: {sizes[0]} columns are no multiple of {layout.columns} ({BY_NUMBER[number]})",
            name,
        )
    offset = header.number("<Q")
    nbytes = layout.row_bytes(sizes[0]) * math.prod(sizes[1:])
    return TableEntry(name, BY_NUMBER[number], sizes[::-1], path, offset, offset + nbytes, stamp)


def _placed(
    header: Header, table: list[TableEntry], data: int, alignment: int
) -> dict[str, TableEntry]:
    """Check that tensors follow each other without holes up to the end of the file."""
    found: dict[str, TableEntry] = {}
    size = header.position + header.left
    expected = 0
    for entry in table:
        if entry.name in found:
            raise header.error(f"tensor {entry.name!r} twice", entry.name)
        if entry.start != expected:
            raise header.error(
                f"tensor {entry.name!r} at offset {entry.start}, the one before it ends at {expected}",
                entry.name,
            )
        if data + entry.end > size:
            raise header.error(
                f"tensor {entry.name!r} ends at byte {data + entry.end} of a file of {size}: truncated?",
                entry.name,
            )
        found[entry.name] = replace(entry, start=data + entry.start, end=data + entry.end)
        expected = padded(entry.end, alignment)
    last = max((entry.end for entry in found.values()), default=data)
    if size not in {last, data + expected} and not (not found and size < data):
        raise header.error(f"{size - last} bytes after the last tensor")
    return found


def _joined(path: Path, first: GgufFile) -> GgufFile:
    """Return all parts of a numbered file as one, whichever part was named."""
    count = first.value("split.count", int)
    part = re.search(r"-(\d{5})-of-(\d{5})(\.[^.]*)?$", path.name)
    if not 1 <= count <= MAX_KEYS or part is None or int(part[2]) != count:
        raise InputError(
            f"{path}: one of {count} parts, but not named so",
            f"parts are named NAME-00001-of-{count:05}.gguf",
            file=str(path),
        )
    files = [
        path.with_name(f"{path.name[: part.start()]}-{n:05}-of-{count:05}{part[3] or ''}")
        for n in range(1, count + 1)
    ]
    tensors: dict[str, TableEntry] = {}
    metadata: dict[str, Value] = {}
    for number, entry in enumerate(_parts(files)):
        if entry.value("split.no", int) != number or entry.value("split.count", int) != count:
            raise InputError(
                f"{files[number]}: says to be another part", HINT, file=str(files[number])
            )
        if tensors.keys() & entry.tensors.keys():
            raise InputError(
                f"{files[number]}: holds a tensor of another part", HINT, file=str(files[number])
            )
        tensors |= entry.tensors
        metadata = metadata or entry.metadata
    stated = first.value("split.tensors.count", int, len(tensors))
    if stated != len(tensors):
        raise InputError(
            f"{path}: {len(tensors)} tensors in all parts, {stated} stated", HINT, file=str(path)
        )
    return GgufFile(tuple(files), metadata, tensors)


def _parts(files: list[Path]) -> Iterator[GgufFile]:
    for file in files:
        yield _read_one(file, file.parent)


# The header in order


class Header:
    """The bytes of a header, read in order: lengths and counts are compared with the bytes that are left first."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self._path, self._descriptor, self._size = path, descriptor, size
        self._buffer, self._start = b"", 0
        self.position = 0
        self.values = 0  # of all arrays so far

    @property
    def left(self) -> int:
        """Return the number of bytes up to the end of the file."""
        return self._size - self.position

    def error(self, what: str, tensor: str | None = None) -> InputError:
        """Return the error for something at this place."""
        return InputError(
            f"{self._path}: {what} (at byte {self.position})",
            HINT,
            file=str(self._path),
            tensor=tensor,
        )

    def take(self, count: int) -> bytes:
        """Read the next bytes."""
        if count > self.left or self.position + count > MAX_HEADER_BYTES:
            raise self.error(f"{count} bytes expected, {self.left} left: truncated?")
        offset = self.position - self._start
        if offset + count > len(self._buffer):
            self._start, offset = self.position, 0
            self._buffer = self._pread(max(count, min(_CHUNK, self.left)))
        self.position += count
        return self._buffer[offset : offset + count]

    def _pread(self, count: int) -> bytes:
        parts, done = [], 0
        while done < count:
            part = os.pread(self._descriptor, count - done, self._start + done)
            if not part:
                raise changed(self._path)
            parts.append(part)
            done += len(part)
        return b"".join(parts)

    def number(self, code: str) -> int:
        """Read one integer."""
        value: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return value

    def string(self, what: str, limit: int | None = None) -> bytes:
        """Read a length and so many bytes."""
        length = self.number("<Q")
        if length > self.left or (limit is not None and length > limit):
            raise self.error(
                f"{what}: a string of {length} bytes, {min(self.left, limit or self.left)} possible"
            )
        return self.take(length)

    def check_array(self, count: int, least: int, what: str) -> None:
        """Refuse an array that is longer than the file, or than all arrays of a file together may be."""
        if count > min(MAX_VALUES - self.values, self.left // least):
            raise self.error(f"{what}: an array of {count} values in {self.left} bytes")
        self.values += count

    def check_count(self, count: int, least: int, limit: int, what: str) -> None:
        """Refuse a number of things that cannot be in the file."""
        if not 0 <= count <= min(limit, self.left // least):
            raise self.error(f"{count} {what} in {self.left} bytes")


# Keys


def _read_keys(header: Header, count: int) -> dict[str, Value]:
    """Read ``count`` keys with their values, each key once."""
    found: dict[str, Value] = {}
    for _ in range(count):
        key = _decoded_text(header, header.string("a key", MAX_KEY), "a key")
        if not _KEY.fullmatch(key):
            raise header.error(f"key {key[:80]!a} is empty or not printable ASCII")
        if key in found:
            raise header.error(f"key {key[:80]!r} twice")
        found[key] = _read_value(header, key)
    return found


def _read_value(header: Header, key: str) -> Value:
    kind = _kind(header, key)
    if kind is ValueType.ARRAY:
        return _array(header, key)
    if kind is ValueType.STRING:
        return Value(kind, _decoded_text(header, header.string(f"key {key!r}"), f"key {key!r}"))
    (value,) = _numbers(header, kind, 1, key)
    return Value(kind, value)


def _array(header: Header, key: str) -> Value:
    element = _kind(header, key)
    count = header.number("<Q")
    if element is ValueType.ARRAY:
        raise header.error(f"key {key!r}: an array of arrays")
    least = 8 if element is ValueType.STRING else struct.calcsize(NUMBERS[element])
    header.check_array(count, least, f"key {key!r}")
    if element is ValueType.STRING:
        items = [_piece(header.string(f"key {key!r}")) for _ in range(count)]
        return Value(ValueType.ARRAY, items, element)
    return Value(ValueType.ARRAY, list(_numbers(header, element, count, key)), element)


def _numbers(header: Header, kind: ValueType, count: int, key: str) -> tuple[Any, ...]:
    code = NUMBERS[kind][1]
    data = header.take(struct.calcsize(f"<{code}") * count)
    if kind is ValueType.BOOL and data.strip(b"\x00\x01"):
        raise header.error(f"key {key!r}: a truth value that is neither 0 nor 1")
    return struct.unpack(f"<{count}{code}", data)


def _kind(header: Header, key: str) -> ValueType:
    number = header.number("<i")
    if number not in set(ValueType):
        raise header.error(f"key {key!r}: unknown type {number}")
    return ValueType(number)


def _decoded_text(header: Header, data: bytes, what: str) -> str:
    """Return bytes as text; raise `InputError`, which calls them ``what``, where they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise header.error(f"{what} is not UTF-8") from error


def _piece(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _alignment_of(header: Header, metadata: dict[str, Value]) -> int:
    """Return the alignment of tensors in bytes; raise `InputError` unless it is a power of two within limits."""
    found = metadata.get("general.alignment", Value(ValueType.U32, ALIGNMENT))
    value = found.value
    good = found.type is ValueType.U32 and isinstance(value, int) and 8 <= value <= MAX_ALIGNMENT
    if not good or not isinstance(value, int) or value & (value - 1):
        raise header.error(
            f"general.alignment = {value!r}: a power of two from 8 to {MAX_ALIGNMENT} of type u32"
        )
    return value
