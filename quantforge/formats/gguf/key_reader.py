"""Keys of a GGUF file, read with their types; what a vocabulary holds may be any bytes."""

from __future__ import annotations

import re
import struct
from typing import Any

from quantforge.formats.gguf.container import ALIGNMENT, NUMBERS, Value, ValueType
from quantforge.formats.gguf.scan import Scan

MAX_KEY = 65535
MAX_ALIGNMENT = 1 << 16
_KEY = re.compile(r"[!-~]+")  # printable ASCII: vocabularies of templates have names of all kinds


def read_keys(source: Scan, count: int) -> dict[str, Value]:
    """Read ``count`` keys with their values, each key once."""
    found: dict[str, Value] = {}
    for _ in range(count):
        key = decoded_text(source, source.string("a key", MAX_KEY), "a key")
        if not _KEY.fullmatch(key):
            raise source.error(f"key {key[:80]!a} is empty or not printable ASCII")
        if key in found:
            raise source.error(f"key {key[:80]!r} twice")
        found[key] = _value(source, key)
    return found


def _value(source: Scan, key: str) -> Value:
    kind = _kind(source, key)
    if kind is ValueType.ARRAY:
        return _array(source, key)
    if kind is ValueType.STRING:
        return Value(kind, decoded_text(source, source.string(f"key {key!r}"), f"key {key!r}"))
    (value,) = _numbers(source, kind, 1, key)
    return Value(kind, value)


def _array(source: Scan, key: str) -> Value:
    element = _kind(source, key)
    count = source.number("<Q")
    if element is ValueType.ARRAY:
        raise source.error(f"key {key!r}: an array of arrays")
    least = 8 if element is ValueType.STRING else struct.calcsize(NUMBERS[element])
    source.check_array(count, least, f"key {key!r}")
    if element is ValueType.STRING:
        items = [_piece(source.string(f"key {key!r}")) for _ in range(count)]
        return Value(ValueType.ARRAY, items, element)
    return Value(ValueType.ARRAY, list(_numbers(source, element, count, key)), element)


def _numbers(source: Scan, kind: ValueType, count: int, key: str) -> tuple[Any, ...]:
    code = NUMBERS[kind][1]
    data = source.take(struct.calcsize(f"<{code}") * count)
    if kind is ValueType.BOOL and data.strip(b"\x00\x01"):
        raise source.error(f"key {key!r}: a truth value that is neither 0 nor 1")
    return struct.unpack(f"<{count}{code}", data)


def _kind(source: Scan, key: str) -> ValueType:
    number = source.number("<i")
    if number not in set(ValueType):
        raise source.error(f"key {key!r}: unknown type {number}")
    return ValueType(number)


def decoded_text(source: Scan, data: bytes, what: str) -> str:
    """Return bytes as text; raise `InputError`, which calls them ``what``, where they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise source.error(f"{what} is not UTF-8") from error


def _piece(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def alignment_of(source: Scan, metadata: dict[str, Value]) -> int:
    """Return the alignment of tensors in bytes; raise `InputError` unless it is a power of two within limits."""
    found = metadata.get("general.alignment", Value(ValueType.U32, ALIGNMENT))
    value = found.value
    good = found.type is ValueType.U32 and isinstance(value, int) and 8 <= value <= MAX_ALIGNMENT
    if not good or not isinstance(value, int) or value & (value - 1):
        raise source.error(
            f"general.alignment = {value!r}: a power of two from 8 to {MAX_ALIGNMENT} of type u32"
        )
    return value
