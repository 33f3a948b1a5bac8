"""Limits of the strict GGUF reader: the last value accepted and the first refused."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from quantforge.errors import InputError, IntegrityError
from quantforge.formats.gguf import parsing as reader
from quantforge.formats.gguf.container import (
    GgufTensor,
    MetadataValue,
    ValueType,
    bool_value,
    u32_value,
)
from quantforge.formats.gguf.parsing import is_gguf, read_gguf
from tests.unit.formats.gguf.test_gguf_reader import (
    ALIGNMENT,
    file,
    header,
    info,
    key,
    string,
    write,
)


def read(path: Path, data: bytes, size: int = 0) -> reader.GgufFile:
    """Read ``data``, extended with sparse zeros to ``size`` bytes."""
    path.write_bytes(data)
    os.truncate(path, max(size, len(data)))
    return read_gguf(path)


def error_message(path: Path, data: bytes, size: int = 0) -> str:
    with pytest.raises(InputError) as caught:
        read(path, data, size)
    return caught.value.message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def test_a_gguf_file_may_be_empty(path):
    """A header alone, with or without the padding that writers add."""
    for size in (24, 32):
        assert read(path, header(0, 0), size).tensors == {}
    assert "bytes after" in error_message(path, header(0, 0), 33)
    assert "does not begin" in error_message(path, header(0, 0)[:23])


@pytest.mark.parametrize(
    ("tensors", "keys", "size", "refused"),
    [
        (1 << 18, 0, 32 << 18, False), ((1 << 18) + 1, 0, 33 << 18, True),
        (0, 1 << 16, 13 << 16, False), (0, (1 << 16) + 1, 14 << 16, True),
        (1000, 0, 32_000, False), (1000, 0, 31_999, True), (0, 1000, 13_000, False), (0, 1000, 12_999, True),
    ],
)  # fmt: skip
def test_tensor_and_key_counts_are_limited_by_the_file_size(path, tensors, keys, size, refused):
    """If the counts are accepted, the zeros after the header are read as an empty first name."""
    message = f"{tensors} tensors in" if tensors else f"{keys} keys in"
    assert (message in error_message(path, header(tensors, keys), 24 + size)) == refused


def test_the_key_length_limit_is_65535_bytes(path):
    longest = "k" * 65535
    assert list(read(path, header(0, 1) + key(longest, 4, bytes(4))).metadata) == [longest]
    message = error_message(path, header(0, 1) + key(longest + "k", 4, bytes(4)))
    assert "a string of 65536 bytes, 65535 possible" in message


@pytest.mark.parametrize(("element_type", "width"), [(8, 8), (0, 1), (5, 4), (11, 8)])
def test_an_array_must_fit_into_the_file(path, element_type, width):
    def data(count: int) -> bytes:
        return (
            header(0, 1) + key("a", 9, struct.pack("<iQ", element_type, count)) + bytes(width * 3)
        )

    assert len(read(path, data(3)).value("a", list)) == 3
    assert f"an array of 4 values in {3 * width} bytes" in error_message(path, data(4))


def test_the_total_of_array_values_is_limited(path, monkeypatch):
    assert reader.MAX_VALUES == 6_000_000
    monkeypatch.setattr(reader, "MAX_VALUES", 1000)
    two = [
        key(name, 9, struct.pack("<iQ", 0, count)) + bytes(count)
        for name, count in (("a", 600), ("b", 400))
    ]
    gguf_file = read(path, header(0, 2) + b"".join(two))
    assert [len(gguf_file.value(name, list)) for name in "ab"] == [600, 400]
    two[1] = key("b", 9, struct.pack("<iQ", 0, 401)) + bytes(401)
    assert "'b': an array of 401 values" in error_message(path, header(0, 2) + b"".join(two))


def test_the_gguf_header_size_is_limited(path, monkeypatch):
    assert reader.MAX_HEADER_BYTES == 1 << 27
    data = header(0, 1) + key("a", 8, string("x" * 100))
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", len(data))
    assert read(path, data, len(data) + 7).value("a", str) == "x" * 100
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", len(data) - 1)
    assert "100 bytes expected" in error_message(path, data)


def test_strings_across_read_chunks_are_read(path, monkeypatch):
    """Strings that end at, cross, exceed and begin at a chunk boundary."""
    monkeypatch.setattr(reader, "_READ_BYTES", 64)
    texts = ["a" * n for n in (*range(40), 63, 64, 65, 200, 3)]
    keys = b"".join(key(f"k{n}", 8, string(text)) for n, text in enumerate(texts))
    gguf_file = read(path, header(0, len(texts)) + keys)
    assert [value.value for value in gguf_file.metadata.values()] == texts


def test_a_gguf_file_truncated_while_being_read_is_noticed(path, monkeypatch):
    path.write_bytes(header(0, 1) + key("a", 8, string("text")))
    pread = os.pread
    monkeypatch.setattr(
        os, "pread", lambda descriptor, count, at: pread(descriptor, count, at)[: 40 - at]
    )
    with pytest.raises(IntegrityError, match="changed while it was being read"):
        read_gguf(path)


@pytest.mark.parametrize("alignment", [8, 32, 1 << 16])
def test_valid_alignments_are_honored(path, alignment):
    table = [info("v", (8,)), info("w", (8,), offset=max(alignment, 32))]
    head = header(2, 1) + key(ALIGNMENT, 4, struct.pack("<I", alignment)) + b"".join(table)
    data = -(-len(head) // alignment) * alignment
    gguf_file = read(path, head, data + max(alignment, 32) + 32)
    assert [entry.start for entry in gguf_file.tensors.values()] == [
        data,
        data + max(alignment, 32),
    ]


@pytest.mark.parametrize("alignment", [4, 24, 1 << 17])
def test_invalid_alignments_are_refused(path, alignment):
    data = file([info("w", (8,))], [key(ALIGNMENT, 4, struct.pack("<I", alignment))])
    assert f"general.alignment = {alignment}" in error_message(path, data)


def test_limits_of_gguf_tensor_sizes(path):
    assert read(path, file([info("w", (2, 1, 2, 4))])).tensors["w"].shape == (4, 2, 1, 2)
    for last, message in (((1 << 48) - 1, "ends at byte"), (1 << 48, "sizes [281474976710656]")):
        assert message in error_message(path, file([info("w", (last,), 24)]))
    for last, message in (
        ((1 << 28) - 1, "ends at byte"),
        (1 << 28, "sizes [268435456, 268435456]"),
    ):
        assert message in error_message(path, file([info("w", (1 << 28, last), 24)]))


def test_metadata_values_are_checked_against_the_requested_type(path):
    write(
        path, {"n": u32_value(5), "b": bool_value(True), "f": MetadataValue(ValueType.F32, 0.5)}, []
    )
    gguf_file = read_gguf(path)
    assert (
        gguf_file.value("n", float),
        gguf_file.value("f", float),
        gguf_file.value("b", bool),
    ) == (
        5.0,
        0.5,
        True,
    )
    assert type(gguf_file.value("n", float)) is float
    assert gguf_file.value("m", str, "otherwise") == "otherwise"
    for name, python_type in (("f", int), ("b", int), ("b", float), ("n", str)):
        with pytest.raises(InputError, match=f"expected {python_type.__name__}"):
            gguf_file.value(name, python_type)


def test_raw_entries_are_bytes_for_block_types(path):
    write(
        path, {}, [GgufTensor("w", "F32", (2, 3, 8)), GgufTensor("q", "Q8_0", (2, 3, 64))], fill=1
    )
    entries = read_gguf(path).tensors
    assert [(entries[n].raw().dtype, entries[n].raw().shape) for n in "wq"] == [
        ("F32", (2, 3, 8)), ("U8", (6, 68)),
    ]  # fmt: skip


def test_gguf_files_are_recognized_by_their_header(path):
    path.write_bytes(header(0, 0))
    assert is_gguf(path)
    path.write_bytes(b"GGU")
    assert not is_gguf(path)
    assert not is_gguf(path.with_name("missing"))


def write_parts(path: Path, *splits: tuple[int, int]) -> Path:
    """Write one numbered file for each (``split.no``, ``split.count``)."""
    for n, (number, count) in enumerate(splits):
        keys = {"split.no": u32_value(number), "split.count": u32_value(count)}
        name = f"m-{n + 1:05}-of-{len(splits):05}.gguf"
        write(path.with_name(name), keys, [GgufTensor(f"w{n}", "F32", (8,))])
    return path.with_name(f"m-00001-of-{len(splits):05}.gguf")


def test_split_gguf_parts_are_checked(path):
    assert list(read_gguf(write_parts(path, (0, 1))).tensors) == ["w0"]
    for splits in (((0, 2), (0, 2)), ((0, 2), (1, 3))):
        with pytest.raises(InputError, match=r"00002-of-00002.*: says to be another part"):
            read_gguf(write_parts(path, *splits))
    for count, message in (
        (0, "not named so"),
        (1 << 16, "00002-of-65536"),
        ((1 << 16) + 1, "not named so"),
    ):
        name = path.with_name(f"m-00001-of-{count:05}.gguf")
        write(name, {"split.no": u32_value(0), "split.count": u32_value(count)}, [])
        with pytest.raises(InputError, match=message):
            read_gguf(name)
