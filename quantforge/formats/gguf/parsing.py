"""Strict parser of GGUF files, stricter than those of llama.cpp and gguf-py.

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
from quantforge.files.opener import FILES, changed_error
from quantforge.files.safetensors import TensorEntry
from quantforge.formats.gguf.container import (
    ALIGNMENT,
    MAGIC,
    MAX_NAME_BYTES,
    MAX_RANK,
    STRUCT_CODES,
    TYPE_NAMES,
    TYPES,
    VERSION,
    MetadataValue,
    ValueType,
    round_up_to_alignment,
)
from quantforge_files.opener import Stamp
from quantforge_files.roles import GGUF_HEADER, WEIGHTS

MAX_TENSORS = 1 << 18
MAX_KEYS = 1 << 16
MAX_HEADER_BYTES, MAX_VALUES = GGUF_HEADER.max_bytes, GGUF_HEADER.max_values
_READ_BYTES = 1 << 20  # bytes that are read at a time
DAMAGED_HINT = "the file is damaged or not GGUF: fetch or export it again"
MAX_KEY_BYTES = 65535
MAX_ALIGNMENT = 1 << 16
# Printable ASCII: vocabularies of templates have names of all kinds
_KEY_PATTERN = re.compile(r"[!-~]+")
_MIN_KEY_BYTES = 13  # bytes: length, type, one byte of value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One tensor of the file: type, shape in torch's order, absolute byte range ``start`` to ``end``."""

    name: str
    type: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    stamp: Stamp

    def raw(self) -> TensorEntry:
        """Return its data as a tensor entry: blocks as ``U8 [rows, bytes per row]``, plain types unchanged."""
        layout = TYPES[self.type]
        if layout.columns == 1:
            return TensorEntry(
                self.name, self.type, self.shape, self.file, self.start, self.end, self.stamp
            )
        rows = (math.prod(self.shape[:-1]), layout.row_bytes(self.shape[-1]))
        return TensorEntry(self.name, "U8", rows, self.file, self.start, self.end, self.stamp)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed GGUF file (all parts of a split one): its metadata, and its tensors in file order."""

    files: tuple[Path, ...]
    metadata: dict[str, MetadataValue]
    tensors: dict[str, TableEntry]

    def value(self, key: str, kind: type, otherwise: Any = None) -> Any:
        """Return the value of a key, checked to have a Python type; ``otherwise`` if the key is missing.

        Raises:
            InputError: another type, or missing without a default.
        """
        entry = self.metadata.get(key)
        if entry is None:
            if otherwise is None:
                raise InputError(
                    f"key {key!r} is missing",
                    DAMAGED_HINT,
                    file=str(self.files[0]),
                    subject=str(self.files[0]),
                )
            return otherwise
        value: Any = entry.value
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InputError(
                f"key {key!r} is {type(value).__name__}, expected {kind.__name__}",
                DAMAGED_HINT,
                file=str(self.files[0]),
                subject=str(self.files[0]),
            )
        return value


def is_gguf(path: Path) -> bool:
    """Return whether a file begins with GGUF's magic number."""
    try:
        return FILES.read_start(path, WEIGHTS, len(MAGIC), None) == MAGIC
    except InputError:
        return False


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of a file, or the headers of all parts of a split one.

    Raises:
        InputError: unreadable, or not exactly a GGUF file: the message names the key, tensor or offset.
    """
    first = _read_part(path, None)
    if "split.count" not in first.metadata:
        return first
    return _join_parts(path, first)


def _read_part(path: Path, inside: Path | None) -> GgufFile:
    with FILES.open_checked(path, WEIGHTS, inside) as descriptor:
        stamp = Stamp.of(descriptor)
        header = HeaderReader(path, descriptor, stamp.size)
        if stamp.size < 24 or header.take(4) != MAGIC:
            raise _not_gguf_error(path, header)
        version = header.number("<I")
        if version != VERSION:
            raise header.error(_version_error(version))
        tensors, keys = header.number("<q"), header.number("<q")
        header.check_count(tensors, _MIN_TENSOR_BYTES, MAX_TENSORS, "tensors")
        header.check_count(keys, _MIN_KEY_BYTES, MAX_KEYS, "keys")
        metadata = _read_keys(header, keys)
        alignment = _alignment_of(header, metadata)
        table = [_read_tensor_entry(header, path, stamp) for _ in range(tensors)]
        return GgufFile(
            (path,),
            metadata,
            _check_offsets(
                header, table, round_up_to_alignment(header.position, alignment), alignment
            ),
        )


def _not_gguf_error(path: Path, header: HeaderReader) -> InputError:
    """Return the error for a file that is not GGUF, with a hint for other file types."""
    hints = {
        ".toml": "a recipe, not a model: quantforge quantize MODEL --recipe FILE, then name its result",
        ".safetensors": "the weights alone: name the directory that holds them and config.json",
        **dict.fromkeys(
            _TEXT_SUFFIXES,
            "a text, not a model: quantforge eval MODEL --text FILE, quantforge quantize MODEL --calibration FILE",
        ),
        ".json": "no model: name the directory that holds it, or a GGUF file",
    }
    if hint := hints.get(path.suffix.lower()):
        return InputError("no model, and no GGUF file", hint, file=str(path), subject=str(path))
    return header.error("does not begin like a GGUF file")


def _version_error(version: int) -> str:
    if version & 0xFFFF == 0:
        return f"version {version}: a big-endian file; convert it to little-endian first"
    return f"version {version}, only {VERSION} is read"


def _read_tensor_entry(header: HeaderReader, path: Path, stamp: Stamp) -> TableEntry:
    name = _decoded_text(header, header.string("a tensor name", MAX_NAME_BYTES), "a tensor name")
    if not name.isprintable() or not name:
        raise header.error(f"tensor name {name!a} is empty or not printable")
    rank = header.number("<I")
    if not 1 <= rank <= MAX_RANK:
        raise header.error(f"tensor {name!r}: {rank} dimensions", name)
    sizes = struct.unpack(f"<{rank}q", header.take(8 * rank))
    if any(not 0 < size < 1 << 48 for size in sizes) or math.prod(sizes) >= 1 << 56:
        raise header.error(f"tensor {name!r}: sizes {list(sizes)}", name)
    number = header.number("<i")
    if number not in TYPE_NAMES:
        raise header.error(f"tensor {name!r}: unknown type {number}", name)
    layout = TYPES[TYPE_NAMES[number]]
    if sizes[0] % layout.columns:
        raise header.error(
            f"tensor {name!r}: {sizes[0]} columns are no multiple of {layout.columns} ({TYPE_NAMES[number]})",
            name,
        )
    offset = header.number("<Q")
    nbytes = layout.row_bytes(sizes[0]) * math.prod(sizes[1:])
    return TableEntry(name, TYPE_NAMES[number], sizes[::-1], path, offset, offset + nbytes, stamp)


def _check_offsets(
    header: HeaderReader, table: list[TableEntry], data: int, alignment: int
) -> dict[str, TableEntry]:
    """Check that the tensors are contiguous up to the end of the file; return them with absolute offsets."""
    checked: dict[str, TableEntry] = {}
    size = header.position + header.left
    expected = 0
    for entry in table:
        if entry.name in checked:
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
        checked[entry.name] = replace(entry, start=data + entry.start, end=data + entry.end)
        expected = round_up_to_alignment(entry.end, alignment)
    last = max((entry.end for entry in checked.values()), default=data)
    if size not in {last, data + expected} and not (not checked and size < data):
        raise header.error(f"{size - last} bytes after the last tensor")
    return checked


def _join_parts(path: Path, first: GgufFile) -> GgufFile:
    """Join all parts of a split file, given any one of them."""
    count = first.value("split.count", int)
    match = re.search(r"-(\d{5})-of-(\d{5})(\.[^.]*)?$", path.name)
    if not 1 <= count <= MAX_KEYS or match is None or int(match[2]) != count:
        raise InputError(
            f"one of {count} parts, but not named so",
            f"parts are named NAME-00001-of-{count:05}.gguf",
            file=str(path),
            subject=str(path),
        )
    files = [
        path.with_name(f"{path.name[: match.start()]}-{n:05}-of-{count:05}{match[3] or ''}")
        for n in range(1, count + 1)
    ]
    tensors: dict[str, TableEntry] = {}
    metadata: dict[str, MetadataValue] = {}
    for number, entry in enumerate(_read_parts(files)):
        if entry.value("split.no", int) != number or entry.value("split.count", int) != count:
            raise InputError(
                "says to be another part",
                DAMAGED_HINT,
                file=str(files[number]),
                subject=str(files[number]),
            )
        if tensors.keys() & entry.tensors.keys():
            raise InputError(
                "holds a tensor of another part",
                DAMAGED_HINT,
                file=str(files[number]),
                subject=str(files[number]),
            )
        tensors |= entry.tensors
        metadata = metadata or entry.metadata
    declared_count = first.value("split.tensors.count", int, len(tensors))
    if declared_count != len(tensors):
        raise InputError(
            f"{len(tensors)} tensors in all parts, {declared_count} stated",
            DAMAGED_HINT,
            file=str(path),
            subject=str(path),
        )
    return GgufFile(tuple(files), metadata, tensors)


def _read_parts(files: list[Path]) -> Iterator[GgufFile]:
    for file in files:
        yield _read_part(file, file.parent)


# The header in order


class HeaderReader:
    """Sequential reader of header bytes that checks lengths and counts against the remaining bytes."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self._path, self._descriptor, self._size = path, descriptor, size
        self._buffer, self._start = b"", 0
        self.position = 0
        self.values = 0  # of all arrays so far

    @property
    def left(self) -> int:
        """Return the number of bytes left in the file."""
        return self._size - self.position

    def error(self, message: str, tensor: str | None = None) -> InputError:
        """Return the error for invalid data at the current position."""
        return InputError(
            f"{message} (at byte {self.position})",
            DAMAGED_HINT,
            file=str(self._path),
            tensor=tensor,
            subject=str(self._path),
        )

    def take(self, count: int) -> bytes:
        """Read the next ``count`` bytes."""
        if count > self.left or self.position + count > MAX_HEADER_BYTES:
            raise self.error(f"{count} bytes expected, {self.left} left: truncated?")
        offset = self.position - self._start
        if offset + count > len(self._buffer):
            self._start, offset = self.position, 0
            self._buffer = self._pread(max(count, min(_READ_BYTES, self.left)))
        self.position += count
        return self._buffer[offset : offset + count]

    def _pread(self, count: int) -> bytes:
        pieces, num_read = [], 0
        while num_read < count:
            piece = os.pread(self._descriptor, count - num_read, self._start + num_read)
            if not piece:
                raise changed_error(self._path)
            pieces.append(piece)
            num_read += len(piece)
        return b"".join(pieces)

    def number(self, code: str) -> int:
        """Read one integer with a struct format."""
        value: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return value

    def string(self, label: str, limit: int | None = None) -> bytes:
        """Read a length-prefixed string as bytes."""
        length = self.number("<Q")
        if length > self.left or (limit is not None and length > limit):
            raise self.error(
                f"{label}: a string of {length} bytes, {min(self.left, limit or self.left)} possible"
            )
        return self.take(length)

    def check_array(self, count: int, min_bytes: int, label: str) -> None:
        """Raise `InputError` if an array is longer than the rest of the file or the limit for all arrays."""
        if count > min(MAX_VALUES - self.values, self.left // min_bytes):
            raise self.error(f"{label}: an array of {count} values in {self.left} bytes")
        self.values += count

    def check_count(self, count: int, min_bytes: int, limit: int, label: str) -> None:
        """Raise `InputError` if a count is negative, above its limit, or too large for the rest of the file."""
        if not 0 <= count <= min(limit, self.left // min_bytes):
            raise self.error(f"{count} {label} in {self.left} bytes")


# Keys


def _read_keys(header: HeaderReader, count: int) -> dict[str, MetadataValue]:
    """Read ``count`` metadata keys with their values; raise `InputError` for a duplicate key."""
    metadata: dict[str, MetadataValue] = {}
    for _ in range(count):
        key = _decoded_text(header, header.string("a key", MAX_KEY_BYTES), "a key")
        if not _KEY_PATTERN.fullmatch(key):
            raise header.error(f"key {key[:80]!a} is empty or not printable ASCII")
        if key in metadata:
            raise header.error(f"key {key[:80]!r} twice")
        metadata[key] = _read_value(header, key)
    return metadata


def _read_value(header: HeaderReader, key: str) -> MetadataValue:
    kind = _read_type(header, key)
    if kind is ValueType.ARRAY:
        return _read_array(header, key)
    if kind is ValueType.STRING:
        return MetadataValue(
            kind, _decoded_text(header, header.string(f"key {key!r}"), f"key {key!r}")
        )
    (value,) = _read_numbers(header, kind, 1, key)
    return MetadataValue(kind, value)


def _read_array(header: HeaderReader, key: str) -> MetadataValue:
    element = _read_type(header, key)
    count = header.number("<Q")
    if element is ValueType.ARRAY:
        raise header.error(f"key {key!r}: an array of arrays")
    min_bytes = 8 if element is ValueType.STRING else struct.calcsize(STRUCT_CODES[element])
    header.check_array(count, min_bytes, f"key {key!r}")
    if element is ValueType.STRING:
        items = [_decode_piece(header.string(f"key {key!r}")) for _ in range(count)]
        return MetadataValue(ValueType.ARRAY, items, element)
    return MetadataValue(ValueType.ARRAY, list(_read_numbers(header, element, count, key)), element)


def _read_numbers(header: HeaderReader, kind: ValueType, count: int, key: str) -> tuple[Any, ...]:
    code = STRUCT_CODES[kind][1]
    data = header.take(struct.calcsize(f"<{code}") * count)
    if kind is ValueType.BOOL and data.strip(b"\x00\x01"):
        raise header.error(f"key {key!r}: a truth value that is neither 0 nor 1")
    return struct.unpack(f"<{count}{code}", data)


def _read_type(header: HeaderReader, key: str) -> ValueType:
    number = header.number("<i")
    if number not in set(ValueType):
        raise header.error(f"key {key!r}: unknown type {number}")
    return ValueType(number)


def _decoded_text(header: HeaderReader, data: bytes, label: str) -> str:
    """Decode UTF-8; raise `InputError` for invalid bytes, naming them ``label``."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise header.error(f"{label} is not UTF-8") from error


def _decode_piece(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _alignment_of(header: HeaderReader, metadata: dict[str, MetadataValue]) -> int:
    """Return the alignment of tensors in bytes; raise `InputError` unless it is a power of two within limits."""
    entry = metadata.get("general.alignment", MetadataValue(ValueType.U32, ALIGNMENT))
    value = entry.value
    is_valid = (
        entry.type is ValueType.U32 and isinstance(value, int) and 8 <= value <= MAX_ALIGNMENT
    )
    if not is_valid or not isinstance(value, int) or value & (value - 1):
        raise header.error(
            f"general.alignment = {value!r}: a power of two from 8 to {MAX_ALIGNMENT} of type u32"
        )
    return value
