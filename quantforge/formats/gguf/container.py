"""Binary layout of GGUF files: header, metadata, tensor table, and the offset of every tensor's data.

Version 3, little-endian (the format's description: github.com/ggml-org/ggml, ``docs/gguf.md``):

=============  =====================================================================================
header         ``GGUF``, u32 version, i64 number of tensors, i64 number of keys
key            string, i32 value type, value; an array is i32 element type, u64 count, elements
tensor         string (under 64 bytes), u32 rank, i64 sizes (fastest first), i32 type, u64 offset
padding        zeros up to a multiple of the alignment
data           tensors in the order of the table, each padded to the alignment, the last one too
=============  =====================================================================================

A string is a u64 length and UTF-8. Sizes run the other way round than torch's shapes: ``ne[0]`` is the number of
columns. llama.cpp wants offsets to be exactly contiguous, which leaves nothing to choose: the bytes of a file are a
function of its keys and its tensors.

Number types are those of `quantforge.packers.ggml`, plain types that only tables have, and block types that files can
name but no model is stored in. Ids that were given up (4, 5, 31 to 33, 36 to 38) are in neither.

A tensor may be written in *pieces*: the experts of a mixture are separate matrices in the source and one stacked
tensor in the file. ``name#3`` is the fourth piece of ``name``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from quantforge.errors import InputError
from quantforge.packers.ggml import GGML_TYPES, GgmlType
from quantforge.plans import FilePlan, StoredTensor

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
MAX_NAME_BYTES = 63  # bytes; llama.cpp refuses 64 (GGML_MAX_NAME)
MAX_RANK = 4

TYPES: Mapping[str, GgmlType] = {
    **GGML_TYPES,
    "F64": GgmlType(28, 1, 8),
    "I8": GgmlType(24, 1, 1),
    "I16": GgmlType(25, 1, 2),
    "I32": GgmlType(26, 1, 4),
    "I64": GgmlType(27, 1, 8),
    "Q8_1": GgmlType(9, 32, 36),
    "Q8_K": GgmlType(15, 256, 292),
}
TYPE_NAMES: Mapping[int, str] = {kind.number: name for name, kind in TYPES.items()}


class ValueType(IntEnum):
    """Type codes of metadata values."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


STRUCT_CODES: Mapping[ValueType, str] = {
    ValueType.U8: "<B", ValueType.I8: "<b", ValueType.U16: "<H", ValueType.I16: "<h", ValueType.U32: "<I",
    ValueType.I32: "<i", ValueType.F32: "<f", ValueType.BOOL: "<?", ValueType.U64: "<Q", ValueType.I64: "<q",
    ValueType.F64: "<d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MetadataValue:
    """One metadata value; for an array, ``value`` is a sequence and ``element_type`` its element type."""

    type: ValueType
    value: object
    element_type: ValueType | None = None


Metadata = Mapping[str, MetadataValue]


def string_value(value: str) -> MetadataValue:
    """Return a string as a metadata value."""
    return MetadataValue(ValueType.STRING, value)


def u32_value(value: int) -> MetadataValue:
    """Return an unsigned 32-bit integer as a metadata value."""
    return MetadataValue(ValueType.U32, value)


def f32_value(value: float) -> MetadataValue:
    """Return a 32-bit float as a metadata value."""
    return MetadataValue(ValueType.F32, value)


def bool_value(value: bool) -> MetadataValue:
    """Return a boolean as a metadata value."""
    return MetadataValue(ValueType.BOOL, value)


def array_value(element: ValueType, values: Sequence[object]) -> MetadataValue:
    """Return a sequence as a metadata value of array type."""
    return MetadataValue(ValueType.ARRAY, values, element)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a GGUF file: ``shape`` in torch's order, number of ``num_pieces`` in which it is written.

    ``fixed`` are its bytes where they are known beforehand (computed tables such as rope frequencies).
    """

    name: str
    type: str
    shape: tuple[int, ...]
    num_pieces: int = 1
    fixed: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Return the size of its data in bytes, without padding."""
        kind = TYPES[self.type]
        return kind.row_bytes(self.shape[-1]) * math.prod(self.shape[:-1])

    def outputs(self) -> tuple[StoredTensor, ...]:
        """Return the headers of the pieces in which it is written; blocks are ``U8`` ``[rows, bytes per row]``."""
        kind = TYPES[self.type]
        dtype, shape = self.type, self.shape
        if self.num_pieces > 1:
            shape = shape[1:]
        if kind.columns > 1:
            dtype, shape = "U8", (math.prod(shape[:-1]), kind.row_bytes(shape[-1]))
        if self.num_pieces == 1:
            return (StoredTensor(self.name, dtype, shape),)
        return tuple(
            StoredTensor(piece_name(self.name, number), dtype, shape)
            for number in range(self.num_pieces)
        )


def piece_name(name: str, number: int) -> str:
    """Return the name of one piece of a stacked tensor."""
    return f"{name}#{number}"


def header_bytes(metadata: Metadata, tensors: Sequence[GgufTensor]) -> bytes:
    """Return all bytes before the tensor data, padded to the alignment.

    Raises:
        InputError: a tensor name is too long for llama.cpp, or two are equal.
    """
    _check_names(tensors)
    pieces = [MAGIC, struct.pack("<Iqq", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        pieces += [_string_bytes(key), struct.pack("<i", value.type), _value_bytes(value)]
    offset = 0
    for tensor in tensors:
        sizes = tensor.shape[::-1]
        pieces += [
            _string_bytes(tensor.name),
            struct.pack(f"<I{len(sizes)}q", len(sizes), *sizes),
            struct.pack("<iQ", TYPES[tensor.type].number, offset),
        ]
        offset += round_up_to_alignment(tensor.nbytes)
    data = b"".join(pieces)
    return data + bytes(round_up_to_alignment(len(data)) - len(data))


def file_plan(name: str, metadata: Metadata, tensors: Sequence[GgufTensor]) -> FilePlan:
    """Compute the offsets of all parts of one file."""
    header = header_bytes(metadata, tensors)
    fixed_bytes, tensor_offsets = [(0, header)], []
    offset = len(header)
    for tensor in tensors:
        if tensor.fixed is not None:
            fixed_bytes.append((offset, tensor.fixed))
        else:
            start = offset
            for piece in tensor.outputs():
                tensor_offsets.append((piece, start))
                start += piece.nbytes
        offset += round_up_to_alignment(tensor.nbytes)
    return FilePlan(name, offset, tuple(fixed_bytes), tuple(tensor_offsets))


def round_up_to_alignment(size: int, alignment: int = ALIGNMENT) -> int:
    """Return the size rounded up to a multiple of the alignment."""
    return -(-size // alignment) * alignment


def _check_names(tensors: Iterable[GgufTensor]) -> None:
    seen_names: set[str] = set()
    for tensor in tensors:
        if len(tensor.name.encode()) > MAX_NAME_BYTES:
            raise InputError(
                f"{tensor.name}: a name of {len(tensor.name.encode())} bytes, llama.cpp takes {MAX_NAME_BYTES}",
                "the tensor cannot be stored under this name",
                tensor=tensor.name,
            )
        if tensor.name in seen_names:
            raise InputError(f"{tensor.name}: twice in one file", tensor=tensor.name)
        seen_names.add(tensor.name)


def _string_bytes(value: str) -> bytes:
    data = value.encode("utf-8", "surrogateescape")  # a piece may be any bytes
    return struct.pack("<Q", len(data)) + data


def _value_bytes(value: MetadataValue) -> bytes:
    if value.type is not ValueType.ARRAY:
        return _scalar_bytes(value.type, value.value)
    assert value.element_type is not None
    assert isinstance(value.value, Sequence)
    head = struct.pack("<iQ", value.element_type, len(value.value))
    if value.element_type is ValueType.STRING:
        return head + b"".join(_string_bytes(str(item)) for item in value.value)
    code = STRUCT_CODES[value.element_type]
    return head + struct.pack(f"<{len(value.value)}{code[1]}", *value.value)


def _scalar_bytes(kind: ValueType, value: object) -> bytes:
    return (
        _string_bytes(str(value))
        if kind is ValueType.STRING
        else struct.pack(STRUCT_CODES[kind], value)
    )
