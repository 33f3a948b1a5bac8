"""The bytes of a GGUF header and the placement of tensor data follow the specification."""

from __future__ import annotations

import struct

import pytest

from quantforge.errors import InputError
from quantforge.formats.gguf.container import (
    GgufTensor,
    MetadataValue,
    ValueType,
    array_value,
    bool_value,
    f32_value,
    file_plan,
    header_bytes,
    string_value,
    u32_value,
)
from quantforge.plans import StoredTensor

VALUES = {
    "a": (MetadataValue(ValueType.U8, 255), "00000000 ff"),
    "b": (MetadataValue(ValueType.I8, -2), "01000000 fe"),
    "c": (MetadataValue(ValueType.U16, 65534), "02000000 feff"),
    "d": (MetadataValue(ValueType.I16, -2), "03000000 feff"),
    "e": (u32_value(2**32 - 2), "04000000 feffffff"),
    "f": (MetadataValue(ValueType.I32, -2), "05000000 feffffff"),
    "g": (f32_value(-1.5), "06000000 0000c0bf"),
    "h": (bool_value(True), "07000000 01"),
    "i": (string_value("é"), "08000000 0200000000000000 c3a9"),
    "j": (array_value(ValueType.I16, [1, -2]), "09000000 03000000 0200000000000000 0100 feff"),
    "k": (array_value(ValueType.STRING, ["x", "", "\udcff"]), "09000000 08000000 0300000000000000"
          "0100000000000000 78 0000000000000000 0100000000000000 ff"),
    "l": (MetadataValue(ValueType.U64, 2**64 - 2), "0a000000 feffffffffffffff"),
    "m": (MetadataValue(ValueType.I64, -2), "0b000000 feffffffffffffff"),
    "n": (MetadataValue(ValueType.F64, -1.5), "0c000000 000000000000f8bf"),
    "o": (array_value(ValueType.BOOL, []), "09000000 07000000 0000000000000000"),
}  # fmt: skip


def test_the_bytes_of_every_metadata_value_type() -> None:
    expected = bytes.fromhex("47475546 03000000 0000000000000000 0f00000000000000")
    for name, (_, data) in VALUES.items():
        expected += bytes.fromhex("0100000000000000") + name.encode() + bytes.fromhex(data)
    expected += bytes(-len(expected) % 32)
    assert header_bytes({name: value for name, (value, _) in VALUES.items()}, []) == expected
    assert len(ValueType) == 13


TENSORS = [
    GgufTensor("t", "F32", (3,), fixed=b"0123456789ab"),
    GgufTensor("e", "Q8_0", (2, 3, 64), num_pieces=2),
    GgufTensor("h", "F16", (3, 2, 5), num_pieces=3),
    GgufTensor("w", "BF16", (2, 4)),
    GgufTensor("q", "Q4_0", (4, 2, 32)),
]


def test_tensor_infos_have_reversed_sizes_and_aligned_offsets() -> None:
    expected = b"GGUF" + struct.pack("<IQQ", 3, 5, 0)
    for name, sizes, type_number, offset in (
        (b"t", (3,), 0, 0), (b"e", (64, 3, 2), 8, 32), (b"h", (5, 2, 3), 1, 448), (b"w", (4, 2), 30, 512),
        (b"q", (32, 2, 4), 2, 544),
    ):  # fmt: skip
        rank = len(sizes)
        expected += struct.pack(f"<Q1sI{rank}QIQ", 1, name, rank, *sizes, type_number, offset)
    assert header_bytes({}, TENSORS) == expected + bytes(-len(expected) % 32)


def test_an_aligned_header_gets_no_padding() -> None:
    assert len(header_bytes({"k" * 27: MetadataValue(ValueType.U8, 1)}, [])) == 64
    assert len(header_bytes({"k" * 28: MetadataValue(ValueType.U8, 1)}, [])) == 96


def test_pieces_are_contiguous_and_tensors_aligned_to_32_bytes() -> None:
    plan = file_plan("x.gguf", {}, TENSORS)
    header = header_bytes({}, TENSORS)
    start = len(header)
    assert plan.name == "x.gguf"
    assert plan.fixed == ((0, header), (start, b"0123456789ab"))
    assert [(tensor, offset - start) for tensor, offset in plan.places] == [
        (StoredTensor("e#0", "U8", (3, 68)), 32),
        (StoredTensor("e#1", "U8", (3, 68)), 236),
        (StoredTensor("h#0", "F16", (2, 5)), 448),
        (StoredTensor("h#1", "F16", (2, 5)), 468),
        (StoredTensor("h#2", "F16", (2, 5)), 488),
        (StoredTensor("w", "BF16", (2, 4)), 512),
        (StoredTensor("q", "U8", (8, 18)), 544),
    ]
    assert plan.size == start + 704


def test_the_tensor_name_limit_counts_bytes() -> None:
    assert file_plan("x", {}, [GgufTensor("é" * 31 + "w", "F32", (8,))]).places
    with pytest.raises(InputError, match=r"a name of 64 bytes, llama\.cpp takes 63"):
        file_plan("x", {}, [GgufTensor("é" * 32, "F32", (8,))])
