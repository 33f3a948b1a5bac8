"""The strict GGUF reader refuses hostile files at once, and reads the others like gguf-py."""

from __future__ import annotations

import os
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.errors import InputError
from quantforge.formats.gguf.container import (
    GgufTensor,
    MetadataValue,
    ValueType,
    array_value,
    bool_value,
    file_plan,
    round_up_to_alignment,
    string_value,
    u32_value,
)
from quantforge.formats.gguf.parsing import read_gguf

MAGIC = b"GGUF"


def string(data: str | bytes, length: int | None = None) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return struct.pack("<Q", len(data) if length is None else length) + data


def header(tensors: int, keys: int, version: int = 3, magic: bytes = MAGIC) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors & (2**64 - 1), keys & (2**64 - 1))


def key(name: str | bytes, value_type: int, data: bytes) -> bytes:
    return string(name) + struct.pack("<i", value_type) + data


def info(
    name: str | bytes,
    dims: tuple[int, ...],
    gguf_type: int = 0,
    offset: int = 0,
    rank: int | None = None,
) -> bytes:
    sizes = b"".join(struct.pack("<Q", size & (2**64 - 1)) for size in dims)
    return (
        string(name)
        + struct.pack("<I", len(dims) if rank is None else rank)
        + sizes
        + struct.pack("<iQ", gguf_type, offset & (2**64 - 1))
    )


def file(table: list[bytes], keys: list[bytes] = [], data: int = 64) -> bytes:  # noqa: B006
    head = header(len(table), len(keys)) + b"".join(keys) + b"".join(table)
    return head + bytes(round_up_to_alignment(len(head)) - len(head) + data)


ONE = info("w", (8,))
ALIGNMENT = "general.alignment"
BAD: dict[str, bytes] = {
    "empty": b"",
    "7 bytes": b"GGUF\x03\x00\x00",
    "magic": file([ONE]).replace(MAGIC, b"GGML"),
    "version 1": header(0, 0, 1) + bytes(40),
    "version 4": header(0, 0, 4) + bytes(40),
    "big-endian": MAGIC + struct.pack(">IQQ", 3, 0, 0) + bytes(40),
    "2^64-1 keys": header(0, -1) + bytes(40),
    "2^31 keys": header(0, 2**31) + bytes(40),
    "2^64-1 tensors": header(-1, 0) + bytes(40),
    "2^31 tensors": header(2**31, 0) + bytes(40),
    "key of 2^63 bytes": header(0, 1) + string(b"a", 2**63) + bytes(40),
    "string of 2^63 bytes": header(0, 1) + key("a", 8, string(b"", 2**63)) + bytes(40),
    "string beyond the file": header(0, 1) + key("a", 8, string(b"x", 100)) + bytes(40),
    "array of 2^31": header(0, 1) + key("a", 9, struct.pack("<iQ", 0, 2**31)) + bytes(8),
    "array of 2^63": header(0, 1) + key("a", 9, struct.pack("<iQ", 8, 2**63)) + bytes(8),
    "array of 2^64-1 numbers": header(0, 1) + key("a", 9, struct.pack("<iQ", 6, 2**64 - 1)) + bytes(8),
    "nested arrays": header(0, 1) + string("a") + struct.pack("<i", 9) + struct.pack("<iQ", 9, 1) * 3000 + bytes(40),
    "unknown value type": file([ONE], [key("a", 13, bytes(8))]),
    "negative value type": file([ONE], [key("a", -1, bytes(8))]),
    "truth value 7": file([ONE], [key("a", 7, b"\x07")]),
    "truth values 0 and 2": file([ONE], [key("a", 9, struct.pack("<iQ", 7, 2) + b"\x00\x02")]),
    "empty key": file([ONE], [key("", 4, bytes(4))]),
    "key with a newline": file([ONE], [key("a\nb", 4, bytes(4))]),
    "key that is no UTF-8": file([ONE], [key(b"\xff", 4, bytes(4))]),
    "key twice": file([ONE], [key("a", 4, bytes(4)), key("a", 4, bytes(4))]),
    "string that is no UTF-8": file([ONE], [key("a", 8, string(b"\xff\xfe"))]),
    "alignment 0": file([ONE], [key(ALIGNMENT, 4, struct.pack("<I", 0))]),
    "alignment 1": file([ONE], [key(ALIGNMENT, 4, struct.pack("<I", 1))]),
    "alignment 13": file([ONE], [key(ALIGNMENT, 4, struct.pack("<I", 13))]),
    "alignment 2^31": file([ONE], [key(ALIGNMENT, 4, struct.pack("<I", 2**31))]),
    "alignment of type i32": file([ONE], [key(ALIGNMENT, 5, struct.pack("<i", 32))]),
    "alignment of type string": file([ONE], [key(ALIGNMENT, 8, string("32"))]),
    "0 dimensions": file([info("w", ())]),
    "5 dimensions": file([info("w", (1, 1, 1, 1, 8))]),
    "2^32-1 dimensions": file([info("w", (8,), rank=2**32 - 1)]),
    "dimension 0": file([info("w", (8, 0))]),
    "dimension -1": file([info("w", (8, -1))]),
    "sizes that overflow": file([info("w", (2**32, 2**32))]),
    "sizes that wrap": file([info("w", (2**62 + 8, 4))]),
    "sizes that wrap to 8": file([info("w", (8, 2**61 + 1))]),
    "columns that blocks do not divide": file([info("w", (33,), 8)]),
    "columns that superblocks do not divide": file([info("w", (128,), 12)], data=4096),
    "type 4, which was given up": file([info("w", (32,), 4)]),
    "type 999": file([info("w", (32,), 999)]),
    "type -1": file([info("w", (32,), -1)]),
    "offset 4": file([info("w", (8,), offset=4)]),
    "offset 32 of the first": file([info("w", (8,), offset=32)], data=96),
    "offset -64": file([info("w", (8,), offset=-64)]),
    "offset beyond the file": file([info("w", (8,), offset=2**40)]),
    "overlap": file([info("v", (16,)), info("w", (16,), offset=32)], data=256),
    "hole": file([info("v", (8,)), info("w", (8,), offset=64)], data=256),
    "wrong order": file([info("v", (8,), offset=32), info("w", (8,))]),
    "tensor twice": file([info("w", (8,)), info("w", (8,), offset=32)]),
    "name of 64 bytes": file([info("w" * 64, (8,))]),
    "empty name": file([info("", (8,))]),
    "name with an escape": file([info("w\x1b[31m", (8,))]),
    "name with NUL": file([info("w\x00", (8,))]),
    "larger than the file": file([info("w", (1 << 20,))]),
    "cut by one byte": file([info("w", (8, 16))], data=511),
    "bytes after the last tensor": file([ONE], data=4096),
    "cut in the table": file([ONE])[:30],
    "cut in a key": file([ONE], [key("a" * 40, 4, bytes(4))])[:40],
}  # fmt: skip
EXPECTED_MESSAGES: dict[str, str] = {
    "empty": "does not begin like", "7 bytes": "does not begin like", "magic": "does not begin like",
    "version 1": "version 1, only 3", "version 4": "version 4, only 3", "big-endian": "big-endian",
    "2^64-1 keys": "-1 keys in 40 bytes", "2^31 keys": "2147483648 keys in 40",
    "2^64-1 tensors": "-1 tensors in 40", "2^31 tensors": "2147483648 tensors in 40",
    "key of 2^63 bytes": "a key: a string of 9223372036854775808 bytes, 41 possible",
    "string of 2^63 bytes": "key 'a': a string of 9223372036854775808 bytes, 40 possible",
    "string beyond the file": "key 'a': a string of 100 bytes, 41 possible",
    "array of 2^31": "an array of 2147483648 values in 8",
    "array of 2^63": "an array of 9223372036854775808 values in 8",
    "array of 2^64-1 numbers": "an array of 18446744073709551615 values in 8", "nested arrays": "an array of arrays",
    "unknown value type": "key 'a': unknown type 13", "negative value type": "key 'a': unknown type -1",
    "truth value 7": "neither 0 nor 1", "truth values 0 and 2": "neither 0 nor 1",
    "empty key": "key '' is empty", "key with a newline": "not printable", "key that is no UTF-8": "a key is not UTF-8",
    "key twice": "key 'a' twice", "string that is no UTF-8": "key 'a' is not UTF-8",
    "alignment 0": "general.alignment = 0", "alignment 1": "general.alignment = 1:",
    "alignment 13": "general.alignment = 13", "alignment 2^31": "general.alignment = 2147483648",
    "alignment of type i32": "general.alignment = 32: ", "alignment of type string": "general.alignment = '32'",
    "0 dimensions": "'w': 0 dimensions", "5 dimensions": "'w': 5 dimensions",
    "2^32-1 dimensions": "4294967295 dimensions",
    "dimension 0": "sizes [8, 0]", "dimension -1": "sizes [8, -1]", "sizes that overflow": "sizes [4294967296, ",
    "sizes that wrap": "sizes [4611686018427387912, 4]", "sizes that wrap to 8": "sizes [8, 2305843009213693953]",
    "columns that blocks do not divide": "33 columns are no multiple of 32 (Q8_0)",
    "columns that superblocks do not divide": "128 columns are no multiple of 256 (Q4_K)",
    "type 4, which was given up": "unknown type 4", "type 999": "unknown type 999", "type -1": "unknown type -1",
    "offset 4": "at offset 4, the one before it ends at 0", "offset 32 of the first": "at offset 32, ",
    "offset -64": "at offset 18446744073709551552", "offset beyond the file": "at offset 1099511627776",
    "overlap": "at offset 32, the one before it ends at 64", "hole": "at offset 64, the one before it ends at 32",
    "wrong order": "'v' at offset 32, the one before it ends at 0", "tensor twice": "'w' twice",
    "name of 64 bytes": "a string of 64 bytes, 63 possible", "empty name": "'' is empty",
    "name with an escape": "tensor name 'w\\x1b[31m' is", "name with NUL": "tensor name 'w\\x00' is",
    "larger than the file": "'w' ends at byte 4194368 of a file of 128",
    "cut by one byte": "ends at byte 608 of a file of 607",
    "bytes after the last tensor": "4064 bytes after", "cut in the table": "1 tensors in 6 bytes",
    "cut in a key": "1 tensors in 16 bytes",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_damaged_or_hostile_gguf_files_are_refused_at_once(name, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(BAD[name])
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(InputError) as caught:
        read_gguf(path)
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB
    assert caught.value.file == str(path)
    assert str(path) in caught.value.message
    assert EXPECTED_MESSAGES[name] in caught.value.message
    assert "\x1b" not in caught.value.message


def test_a_string_may_end_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(0, 1) + key("a", 8, string("to the last byte")))
    assert read_gguf(path).metadata["a"].value == "to the last byte"


def test_short_preads_of_a_gguf_header_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file([ONE], [key("a", 8, string("text")), key("b", 4, bytes(4))], data=32))
    expected, pread = read_gguf(path), os.pread
    monkeypatch.setattr(
        os, "pread", lambda descriptor, count, at: pread(descriptor, count // 2 + 1, at)
    )
    assert read_gguf(path) == expected


def test_links_pipes_and_missing_gguf_files_are_refused(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name in ("pipe", "link", "missing", "."):
        with pytest.raises(InputError):
            read_gguf(tmp_path / name)


def test_tensor_names_are_limited_to_63_bytes(tmp_path):
    write(tmp_path / "x", {}, [GgufTensor("w" * 63, "F32", (8,))])
    assert list(read_gguf(tmp_path / "x").tensors) == ["w" * 63]
    with pytest.raises(InputError, match="64 bytes"):
        file_plan("x", {}, [GgufTensor("w" * 64, "F32", (8,))])
    with pytest.raises(InputError, match="twice"):
        file_plan("x", {}, [GgufTensor("w", "F32", (8,))] * 2)


def write(
    path: Path, keys: dict[str, MetadataValue], tensors: list[GgufTensor], fill: int = 0
) -> None:
    plan = file_plan(path.name, keys, tensors)
    data = bytearray([fill]) * plan.size
    for offset, fixed in plan.fixed:
        data[offset : offset + len(fixed)] = fixed
    path.write_bytes(bytes(data))


SCALARS: list[tuple[ValueType, Callable[[], st.SearchStrategy[object]]]] = [
    (ValueType.U8, lambda: st.integers(0, 255)), (ValueType.I8, lambda: st.integers(-128, 127)),
    (ValueType.U16, lambda: st.integers(0, 2**16 - 1)), (ValueType.I16, lambda: st.integers(-(2**15), 2**15 - 1)),
    (ValueType.U32, lambda: st.integers(0, 2**32 - 1)), (ValueType.I32, lambda: st.integers(-(2**31), 2**31 - 1)),
    (ValueType.U64, lambda: st.integers(0, 2**64 - 1)), (ValueType.I64, lambda: st.integers(-(2**63), 2**63 - 1)),
    (ValueType.F32, lambda: st.floats(width=32, allow_nan=False)), (ValueType.F64, lambda: st.floats(allow_nan=False)),
    (ValueType.BOOL, st.booleans), (ValueType.STRING, lambda: st.text(st.characters(codec="utf-8"), max_size=20)),
]  # fmt: skip


@st.composite
def values(draw: st.DrawFn) -> MetadataValue:
    value_type, strategy = draw(st.sampled_from(SCALARS))
    if draw(st.booleans()):
        return array_value(value_type, draw(st.lists(strategy(), max_size=5)))
    return MetadataValue(value_type, draw(strategy()))


KEYS = st.dictionaries(
    st.from_regex(r"[a-z][a-z0-9_.]{0,20}", fullmatch=True), values(), max_size=5
)
SHAPES = st.tuples(
    st.sampled_from(["F32", "F16", "BF16", "I8", "Q4_0", "Q8_0", "Q4_K", "IQ2_XS", "MXFP4"]),
    st.lists(st.integers(1, 3), max_size=2), st.integers(1, 2),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    keys=KEYS,
    shapes=st.dictionaries(st.from_regex(r"[a-z0-9._]{1,63}", fullmatch=True), SHAPES, max_size=5),
)
def test_written_files_are_read_alike_by_gguf_py(keys, shapes, tmp_path_factory):
    keys.pop("general.alignment", None)
    keys.pop("split.count", None)
    tensors = []
    for name, (gguf_type, outer, blocks) in shapes.items():
        width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[gguf_type]][0]
        tensors.append(GgufTensor(name, gguf_type, (*outer, blocks * width)))
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    write(path, keys, tensors, fill=7)
    gguf_file = read_gguf(path)
    peer = gguf.GGUFReader(path)
    assert {name: value.value for name, value in gguf_file.metadata.items()} == {
        name: value.value for name, value in keys.items()
    }
    for name, value in gguf_file.metadata.items():
        other = peer.fields[name].contents() if value.value != [] else []
        assert np.array_equal(np.asarray(other), np.asarray(value.value)), name
    assert [tensor.name for tensor in peer.tensors] == list(gguf_file.tensors)
    for tensor in peer.tensors:
        entry = gguf_file.tensors[tensor.name]
        assert tuple(reversed(tensor.shape.tolist())) == entry.shape
        assert tensor.tensor_type.name == entry.type
        assert (tensor.data_offset, tensor.n_bytes) == (entry.start, entry.end - entry.start)


def test_files_written_by_gguf_py_are_read(tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a", 3)
    writer.add_array("tokens", ["x", "y"])
    writer.add_custom_alignment(64)
    data = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("w", data)
    writer.add_tensor("q", gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gguf_file = read_gguf(path)
    assert gguf_file.value("a", int) == 3
    assert gguf_file.value("tokens", list) == ["x", "y"]
    assert (gguf_file.tensors["w"].shape, gguf_file.tensors["q"].type) == ((2, 32), "Q8_0")
    with pytest.raises(InputError, match="'missing' is missing"):
        gguf_file.value("missing", int)
    with pytest.raises(InputError, match="expected str"):
        gguf_file.value("a", str)


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 600))
def test_damaged_files_are_refused_or_read_like_gguf_py(position, value, cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    keys = {"general.architecture": string_value("llama"), "n": u32_value(5), "b": bool_value(True),
            "t": array_value(ValueType.STRING, ["a", "bc"])}  # fmt: skip
    write(path, keys, [GgufTensor("w", "F32", (2, 16)), GgufTensor("q", "Q8_0", (2, 32))])
    data = bytearray(path.read_bytes())
    data[position % len(data)] = value
    path.write_bytes(bytes(data[: len(data) - cut] if cut < 64 else data))
    try:
        gguf_file = read_gguf(path)
    except InputError:
        return
    peer = gguf.GGUFReader(path)
    assert [tensor.name for tensor in peer.tensors] == list(gguf_file.tensors)
    for tensor in peer.tensors:
        assert tuple(reversed(tensor.shape.tolist())) == gguf_file.tensors[tensor.name].shape
        assert tensor.data_offset == gguf_file.tensors[tensor.name].start


def test_split_parts_are_read_as_one_and_must_be_complete(tmp_path):
    def part(number: int, count: int, name: str, total: int = 2) -> dict[str, MetadataValue]:
        keys = {"split.no": MetadataValue(ValueType.U16, number), "split.count": MetadataValue(ValueType.U16, count),
                "split.tensors.count": MetadataValue(ValueType.I32, total)}  # fmt: skip
        keys |= {"general.name": string_value("m")} if number == 0 else {}
        write(
            tmp_path / f"m-{number + 1:05}-of-{count:05}.gguf",
            keys,
            [GgufTensor(name, "F32", (8,))],
        )
        return keys

    part(0, 2, "a")
    with pytest.raises(InputError, match="m-00002-of-00002"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")
    part(1, 2, "b")
    for number in (1, 2):
        gguf_file = read_gguf(tmp_path / f"m-0000{number}-of-00002.gguf")
        assert list(gguf_file.tensors) == ["a", "b"]
        assert gguf_file.value("general.name", str) == "m"
    part(1, 2, "a")
    with pytest.raises(InputError, match="another part"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")
    part(1, 2, "b", 3)
    part(0, 2, "a", 3)
    with pytest.raises(InputError, match="3 stated"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "other.gguf")
    with pytest.raises(InputError, match="not named so"):
        read_gguf(tmp_path / "other.gguf")
