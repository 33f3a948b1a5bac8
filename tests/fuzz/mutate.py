"""Mutations that get past a magic number: bytes, lengths and words; in JSON, values, keys and nesting.

Random bytes die at the first check of a parser. Half of the mutations of a JSON document therefore keep it JSON, and a
document inside of a container (the header of a safetensors file) is damaged there and packed again with a true length.
Everything is a function of the generator that is handed in, so that a failure is found again from its seed.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Sequence
from typing import Any

ODD_NUMBERS = (0, -1, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 4096, 65535, 2**31 - 1, 2**31, 2**32, 2**53,
               2**63 - 1, 2**63, 2**64 - 1, 10**12, 10**30)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    *ODD_NUMBERS, None, True, False, 0.5, -0.0, 1e308, "", "0", "nan", "../x.safetensors", "/etc/passwd", "C:\\x", "\0",
    "\u202e", "\ud800", "é", "e\u0301", "a" * 300, [], {}, [[]], [0], [-1], [2**63], {"": ""}, {"a": {"a": {}}},
)  # fmt: skip
WORDS = (
    b"\0", b"\xff" * 8, b"\xef\xbb\xbf", b"NaN", b"1e400", b"-0", b"\\ud800", b"[" * 200, b"{" * 70, b'"',
    b"\n", b"\r\n", b"GGUF", b"re:", b"(a+)+", b"=", b":", b"+", b",", b"\xf0\x9f\x92\xa5", b"\x80", b"9" * 25,
    b"int4", b"g128", b"[[", b"]]",
)  # fmt: skip


def mutate_bytes(
    seed: bytes, others: Sequence[bytes], chance: random.Random, limit: int = 1 << 16
) -> bytes:
    """Return a damaged copy of ``seed`` of at most ``limit`` bytes; ``others`` lend pieces."""
    data = seed
    for _ in range(1 + int(chance.expovariate(0.7))):
        change = chance.choice(_CHANGES)
        data = change(data, others, chance)[:limit]
    return data


def _flip(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    if not data:
        return b"\0"
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def _cut(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    first, last = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:first] if chance.random() < 0.3 else data[:first] + data[min(last, first + 64) :]


def _repeat(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    first, last = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:last] + data[first:last][:256] * chance.choice((1, 1, 2, 50)) + data[last:]


def _insert(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(WORDS) + data[at + chance.choice((0, 0, 1, 4)) :]


def _splice(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    other = chance.choice(others)
    first, last = sorted(chance.randrange(len(other) + 1) for _ in range(2))
    at = chance.randrange(len(data) + 1)
    return data[:at] + other[first:last] + data[at:]


def _integer(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """An odd number in place of the bytes at some place, or of a number that is written there."""
    number = chance.choice(ODD_NUMBERS)
    numbers = list(re.finditer(rb"-?[0-9]+", data)) if len(data) < 1 << 15 else []
    if numbers and chance.random() < 0.5:
        match = chance.choice(numbers)
        return data[: match.start()] + str(number).encode() + data[match.end() :]
    size = chance.choice((1, 2, 4, 8))
    at = chance.randrange(len(data) + 1)
    packed = struct.pack("<Q", number % 2**64)[:size]
    return data[:at] + packed + data[at + size :]


def _document(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Mutate the JSON document in the data, which may follow its 8-byte length."""
    length = int.from_bytes(data[:8], "little")
    framed = 8 < length + 8 <= len(data) and data[8:9] == b"{"
    text, rest = (data[8 : 8 + length], data[8 + length :]) if framed else (data, b"")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _integer(data, others, chance)
    value = _edited(value, chance)
    out = json.dumps(value).encode()
    if chance.random() < 0.05:
        out = out.replace(b'": ', b'": 0, "a": ', 1)
    return struct.pack("<Q", len(out)) + out + rest if framed else out


def _edited(value: Any, chance: random.Random) -> Any:
    """Replace, remove, copy or wrap something at a random depth."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        turn = chance.random()
        if turn < 0.65:
            return {**value, key: _edited(value[key], chance)}
        if turn < 0.75:
            return {name: item for name, item in value.items() if name != key}
        if turn < 0.85:
            return {**value, str(chance.choice(ODD_VALUES)): value[key]}
        return {**value, key: value[chance.choice(list(value))]}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        turn = chance.random()
        if turn < 0.6:
            return [*value[:at], _edited(value[at], chance), *value[at + 1 :]]
        return value[:at] + value[at + 1 :] if turn < 0.8 else [*value, value[at]]
    if isinstance(value, int | float) and not isinstance(value, bool) and chance.random() < 0.5:
        return value + chance.choice((-1, 1, 8, -value * 2))
    return [value] if chance.random() < 0.1 else chance.choice(ODD_VALUES)


_CHANGES = (_flip, _flip, _cut, _repeat, _insert, _splice, _integer, _integer, *[_document] * 8)
