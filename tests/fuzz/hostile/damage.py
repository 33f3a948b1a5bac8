"""Damage a file of a tree: its bytes, its JSON document, its table, or replace it with something else.

Every damage is a function ``(path, tree, chance)`` that changes the tree; it depends on nothing else, so that a case
is found again from its seed. Sizes are sparse, devices and pipes are links, so that a case costs nothing to make.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.mutate import ODD_VALUES, WORDS, _document, mutate_bytes

Damage = Callable[[Path, Path, random.Random], None]
ODD_NAMES = (
    b"\xff\xfe", b"a\nb", b"a\x1b[31mb", "\u202egnp.exe".encode(), b"x" * 255, b" ", b"-o", b"--json", b"*", b"~",
    "\u0085".encode(), b"model-00001-of-99999.safetensors", b"tokenizer_\xff.json", b"LICENSE\x07",
    b"adapter_config.json",
)  # fmt: skip
_MANY = 200_000


def damage_bytes(path: Path, tree: Path, chance: random.Random) -> None:
    """Flip, cut, repeat, splice, or edit the document inside."""
    data = _content(path)
    _replace(
        path, mutate_bytes(data[: 1 << 20], [data[: 1 << 16]], chance, 1 << 20) + data[1 << 20 :]
    )


def damage_document(path: Path, tree: Path, chance: random.Random) -> None:
    """Change values and keys of a document that stays one."""
    data = _content(path)
    for _ in range(chance.choice((1, 1, 2, 5))):
        data = _document(data, [data], chance)
    _replace(path, data)


def damage_text(path: Path, tree: Path, chance: random.Random) -> None:
    """Put an odd word or a control sequence between the lines."""
    lines = _content(path).split(b"\n")
    odd = (
        *WORDS,
        b"\x1b]0;title\x07",
        b"\x9b31m",
        "\u202e\u2066".encode(),
        b"\r",
        b"[" * 5000,
        b"9" * 5000,
    )
    for _ in range(chance.choice((1, 2, 8))):
        lines.insert(chance.randrange(len(lines) + 1), chance.choice(odd))
    _replace(path, b"\n".join(lines))


def grow_nested(path: Path, tree: Path, chance: random.Random) -> None:
    """Write megabytes of brackets, numbers, keys or one long string."""
    size = chance.choice((1 << 12, 1 << 18, 24 << 20))
    kind = chance.randrange(7)
    text = (
        b"[" * size,
        b'{"a":' * (size // 5),
        b'{"a": [' + b"0," * (size // 2) + b"0]}",
        b'{"a": "' + b"x" * size + b'"}',
        b"9" * size,
        b'{"metadata": {}, "weight_map": {'
        + b", ".join(b'"t%d": "model.safetensors"' % n for n in range(min(size // 32, _MANY)))
        + b"}}",
        b'{"text": "' + b"\\u0041" * (size // 6) + b'"}',
    )[kind]
    if path.suffix == ".safetensors":
        text = len(text).to_bytes(8, "little") + text
    _replace(path, text)


def replace_file(path: Path, tree: Path, chance: random.Random) -> None:
    """Put something else than a regular file at the place, or nothing."""
    kind = chance.randrange(10)
    outside = tree.parent / "outside.txt"
    if kind != 0 and not outside.exists():
        outside.write_text("CANARY of another directory")
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == 0:
        return
    links = {1: "/dev/zero", 2: str(outside), 3: path.name, 4: "nowhere", 5: "/proc/self/mem"}
    if kind in links:
        path.symlink_to(links[kind])
    elif kind == 6:
        os.mkfifo(path)
    elif kind == 7:
        path.mkdir()
        (path / "a").write_text("a")
    elif kind == 8:
        path.touch()
    else:
        with path.open("wb") as file:
            file.truncate(chance.choice((1 << 30, 3 << 30, 1 << 40)))


def append_sparse(path: Path, tree: Path, chance: random.Random) -> None:
    """Let the file go on for gigabytes of zeros."""
    data = _content(path)
    _replace(path, data)
    os.truncate(path, len(data) + chance.choice((1 << 20, 2 << 30)))


def add_strays(path: Path, tree: Path, chance: random.Random) -> None:
    """Put files and directories with odd names beside it."""
    for name in chance.sample(ODD_NAMES, 3):
        stray = path.with_name(os.fsdecode(name))
        if not os.path.lexists(stray):
            (Path.mkdir if chance.random() < 0.3 else Path.touch)(stray)


def rename_odd(path: Path, tree: Path, chance: random.Random) -> None:
    """Give the file itself an odd name."""
    path.rename(path.with_name(os.fsdecode(chance.choice(ODD_NAMES))))


def damage_lists(path: Path, tree: Path, chance: random.Random) -> None:
    """Replace one entry of a document by another kind of value, everywhere it may stand."""
    try:
        value: Any = json.loads(_content(path))
    except (ValueError, RecursionError):
        damage_bytes(path, tree, chance)
        return
    if isinstance(value, dict) and value:
        key = chance.choice(list(value))
        value[key] = chance.choice(ODD_VALUES)
    _replace(path, json.dumps(value).encode())


def make_table(path: Path, tree: Path, chance: random.Random) -> None:
    """Write a sound parquet file whose columns are of other types than text."""
    import pyarrow as pa
    from pyarrow import parquet

    columns: dict[str, pa.Array] = {
        "integers": pa.array([1, 2**40, None]),
        "lists": pa.array([["a"], [], None]),
        "nested": pa.array([[["a"]], [[]], None]),
        "structs": pa.array([{"a": 1}, {"a": None}, None]),
        "maps": pa.array([[("a", "b")], [], None], pa.map_(pa.string(), pa.string())),
        "binary": pa.array([b"\xff\xfe", b"", None]),
        "broken text": pa.array([b"\xff\xfe", b"a\0b", None]).view(pa.string()),
        "large": pa.array(["a", "b", None], pa.large_string()),
        "dictionary": pa.array(["a", "b", None]).dictionary_encode(),
        "broken dictionary": pa.DictionaryArray.from_arrays(
            pa.array([0, 1, None], pa.int8()), pa.array([b"\xff", b"b"]).view(pa.string())
        ),
        "dates": pa.array([2**62, -(2**62), None], pa.timestamp("us")),
        "zoned": pa.array([0, 1, None], pa.timestamp("ns", "Nowhere/Land")),
        "days": pa.array([2**30, -(2**30), None], pa.date32()),
        "times": pa.array([2**40, 1, None], pa.duration("us")),
        "nulls": pa.array([None, None, None]),
        "decimals": pa.array([1, 2, None]).cast(pa.decimal128(38, 0)),
        "text of surrogates": pa.array([b"\xed\xa0\x80", b"a", None]).view(pa.string()),
        "messages": pa.array([[{"role": "user", "content": None}], [], None]),
    }
    first, second = chance.sample(sorted(columns), 2)
    table = pa.table(
        {"text": columns[first], "other": columns[second], "messages": columns["messages"]}
    )
    if chance.random() < 0.2:
        table = table.slice(0, 0)
    path.unlink()
    parquet.write_table(table, path, compression=chance.choice(("snappy", "zstd", "none")))
    if chance.random() < 0.3:
        damage_bytes(path, tree, chance)


def _content(path: Path) -> bytes:
    """Return what a file holds; of one that an earlier damage made large, the beginning."""
    with path.open("rb") as file:
        return file.read(1 << 26)


def _replace(path: Path, data: bytes) -> None:
    """Write a new file at the place: the tree's files are links to the sound ones."""
    path.unlink()
    path.write_bytes(data)


GENERAL: tuple[Damage, ...] = (
    damage_bytes, damage_bytes, damage_text, grow_nested, replace_file, replace_file, append_sparse, add_strays,
    rename_odd,
)  # fmt: skip
DOCUMENT: tuple[Damage, ...] = (*[damage_document] * 6, *[damage_lists] * 4)


def damages(path: Path) -> tuple[Damage, ...]:
    """Return what may be done to a file of this kind, the likelier the more often."""
    if path.suffix in {".json", ".safetensors", ".jsonl"}:
        return (*GENERAL, *DOCUMENT)
    if path.suffix == ".parquet":
        return (*GENERAL, *[make_table] * 12)
    return GENERAL
