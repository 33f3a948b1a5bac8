"""Safetensors files, read more strictly than the reference library does.

Layout (github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length N, N
bytes of JSON that begin with ``{`` and may be padded with spaces, then the data of all tensors. The
header maps each name to ``{"dtype", "shape", "data_offsets": [start, end]}``, relative to the data,
and ``__metadata__`` to strings.

Version 0.8.0 of the library accepts two entries of one name (the last one wins, even with another
type), unknown fields, names with control characters and any rank. Here a file is either read
exactly as that library reads it or refused: what is accepted here, it accepts, with identical
tensors (a property test). Limits beyond the format's own: a header as `quantforge_files.roles` limits it,
`MAX_RANK` dimensions (what torch can index), names of `MAX_NAME_BYTES` printable characters that
stay distinct under Unicode normalisation.

Data is read by ``pread`` into fresh memory, never by mapping the file: a mapping of a file that is
truncated kills the process, and its pages count as ours. All hosts that torch supports are
little-endian, like the file.
"""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from quantforge.errors import InputError
from quantforge.files.checksums import Checksums
from quantforge.files.opener import FILES, changed_error, parse_object, reopen
from quantforge.plans import DTYPE_BITS, FileTensorInfo, StoredTensor
from quantforge_files import system
from quantforge_files.opener import Stamp
from quantforge_files.roles import HEADER, WEIGHTS
from quantforge_files.strict_json import gc_paused

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = HEADER.max_bytes  # the format allows 100 MB
MAX_RANK = 64
MAX_NAME_BYTES = 4096
MAX_BYTES = 2**63 - 1
METADATA_KEY = "__metadata__"
# Names of small tensors that describe a packed weight (its shape, in JSON also its type): read along with the header.
DESCRIPTION_NAMES = (".weight_shape", ".weight.quant_state.bitsandbytes__")
_MAX_DESCRIPTION_BYTES = 1 << 16

TORCH_NAMES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32",
    "I64": "int64", "U64": "uint64", "F64": "float64",
}  # fmt: skip

_FIELDS = {"dtype", "shape", "data_offsets"}
_DAMAGED_HINT = "the file is damaged or not safetensors: fetch or export it again"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a safetensors file; ``start`` and ``end`` are absolute byte offsets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    # of the file when its header was read
    stamp: Stamp | None = field(default=None, repr=False, compare=False)
    # of the file when it was digested
    checksums: Checksums | None = field(default=None, repr=False, compare=False)
    # content of a small tensor that describes another
    data: bytes = field(default=b"", repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Return the size of its data in bytes."""
        return self.end - self.start

    def to_stored_tensor(self) -> StoredTensor:
        """Return name, type, shape and known content, without the position in a file."""
        return StoredTensor(self.name, self.dtype, self.shape, self.data)

    def to_tensor_info(self) -> FileTensorInfo:
        """Return the tensor as its file describes it."""
        return FileTensorInfo(self.name, self.dtype, self.shape, self.nbytes)


def read_header(path: Path, root: Path | None = None) -> dict[str, TensorEntry]:
    """Read and check the header of a safetensors file; return its tensors by name, in the order of their data.

    Args:
        path: the file.
        root: the model directory that the file is part of; None for a file that a person named.

    Raises:
        InputError: unreadable or not exactly a safetensors file; names file and tensor.
        IntegrityError: it shrank while it was read.
    """
    with FILES.open_checked(path, WEIGHTS, root) as descriptor:
        stamp = Stamp.of(descriptor)
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if not 2 <= length <= stamp.size - 8:
            raise _header_error(path, f"a header of {length} bytes in a file of {stamp.size}")
        if length > MAX_HEADER_BYTES:
            raise _header_error(path, f"a header of {length} bytes, more than {MAX_HEADER_BYTES}")
        text = os.pread(descriptor, length, 8)
        if len(text) != length:
            raise changed_error(path)
        # The reference library skips any whitespace around the object; its description does not.
        if not text.startswith(b"{") or not text.rstrip(b" ").endswith(b"}"):
            raise _header_error(path, "the header is not a JSON object padded with spaces")
        with gc_paused():
            entries = _check_header(path, parse_object(text, path, HEADER), 8 + length, stamp)
        for name, entry in entries.items():
            if entry.nbytes <= _MAX_DESCRIPTION_BYTES and any(
                description in name for description in DESCRIPTION_NAMES
            ):
                data = os.pread(descriptor, entry.nbytes, entry.start)
                if len(data) != entry.nbytes:
                    raise changed_error(path, name)
                entries[name] = replace(entry, data=data)
        return entries


def read_tensor(entry: TensorEntry) -> torch.Tensor:
    """Read one tensor into new memory.

    Raises:
        IntegrityError: the file has changed since its header was read.
        InputError: a BOOL is neither 0 nor 1.
    """
    return _read(entry, entry.start, entry.end, entry.shape)


def read_rows(entry: TensorEntry, first: int, last: int) -> torch.Tensor:
    """Read rows ``first:last`` of a tensor ``[rows, ...]``; ValueError if there are none, else as `read_tensor`."""
    if not entry.shape or not 0 <= first <= last <= entry.shape[0]:
        raise ValueError(f"{entry.name}: no rows {first}:{last} in a tensor of shape {entry.shape}")
    row_bytes = entry.nbytes // max(entry.shape[0], 1)
    start = entry.start + first * row_bytes
    return _read(entry, start, start + (last - first) * row_bytes, (last - first, *entry.shape[1:]))


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of a safetensors type name."""
    import torch

    dtype = getattr(torch, TORCH_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _read(entry: TensorEntry, start: int, end: int, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    data = torch.empty(end - start, dtype=torch.uint8)
    view = memoryview(data.numpy().data)
    with reopen(entry.file, entry.stamp, entry.name) as descriptor:
        read_into = system.read_into if entry.checksums is None else entry.checksums.read
        if not read_into(descriptor, view, start):
            raise changed_error(entry.file, entry.name)
    if entry.dtype == "BOOL" and bool((data > 1).any()):
        raise _header_error(
            entry.file, f"tensor {entry.name!r}: a BOOL that is neither 0 nor 1", entry.name
        )
    return data.view(torch_dtype(entry.dtype)).reshape(shape)


def _check_header(
    path: Path, header: dict[str, Any], data_start: int, stamp: Stamp
) -> dict[str, TensorEntry]:
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise _header_error(path, f"{METADATA_KEY} is not a table of strings")
    _check_names(path, header)
    entries = [
        _parse_entry(path, name, fields, data_start, stamp) for name, fields in header.items()
    ]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    _check_layout(path, entries, data_start, stamp.size)
    return {entry.name: entry for entry in entries}


def _check_names(path: Path, names: Iterable[str]) -> None:
    normalized: dict[str, str] = {}
    for name in names:
        size = len(name.encode())
        if not 0 < size <= MAX_NAME_BYTES or not name.isprintable():
            shown_name = repr(name[:80]) + (f" ({size} bytes)" if size > 80 else "")
            raise _header_error(
                path,
                f"tensor name {shown_name}: expected 1 to {MAX_NAME_BYTES} bytes, all printable",
            )
        if not name.isascii():
            other = normalized.setdefault(unicodedata.normalize("NFC", name), name)
            if other != name:
                raise _header_error(
                    path, f"tensor names {other!a} and {name!a} look the same", name
                )


def _parse_entry(
    path: Path, name: str, item_fields: object, data_start: int, stamp: Stamp
) -> TensorEntry:
    def refuse(problem: str) -> InputError:
        return _header_error(path, f"tensor {name[:80]!r}: {problem}", name)

    if not isinstance(item_fields, dict) or item_fields.keys() != _FIELDS:
        raise refuse("exactly dtype, shape and data_offsets expected")
    dtype, shape, offsets = item_fields["dtype"], item_fields["shape"], item_fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise refuse(f"dtype {str(dtype)[:40]!r} is not one of {', '.join(DTYPE_BITS)}")
    if not _is_size_list(shape) or len(shape) > MAX_RANK:
        raise refuse(f"the shape is not a list of at most {MAX_RANK} sizes")
    size = math.prod(shape)
    # Sizes of 0 count as 1: [0, 2^62, 2^62] holds nothing, but no library can compute its strides.
    if (size or math.prod(max(length, 1) for length in shape)) * DTYPE_BITS[dtype] // 8 > MAX_BYTES:
        raise refuse(f"the shape {shape[:8]} overflows")
    if not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse("data_offsets is not [start, end]")
    start, end = data_start + offsets[0], data_start + offsets[1]
    if end > stamp.size:
        raise refuse(f"ends at byte {end} of a file of {stamp.size}: truncated?")
    if end - start != size * DTYPE_BITS[dtype] // 8:
        raise refuse(f"{end - start} bytes do not hold {dtype} of shape {shape}")
    return TensorEntry(name, dtype, tuple(shape), path, start, end, stamp)


def _is_size_list(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and not [
        item for item in value if type(item) is not int or not 0 <= item <= MAX_BYTES
    ]


def _check_layout(path: Path, entries: list[TensorEntry], data_start: int, size: int) -> None:
    expected_start, previous = data_start, "the header"
    for entry in entries:
        if entry.start != expected_start:
            problem = "overlaps" if entry.start < expected_start else "leaves a hole after"
            raise _header_error(
                path,
                f"tensor {entry.name!r} at byte {entry.start} {problem} {previous}, which ends at {expected_start}",
                entry.name,
            )
        expected_start, previous = entry.end, f"tensor {entry.name!r}"
    if expected_start != size:
        raise _header_error(
            path, f"{size - expected_start} bytes after {previous}, which ends the data"
        )


def _header_error(path: Path, message: str, tensor: str | None = None) -> InputError:
    return InputError(f"{message}", _DAMAGED_HINT, file=str(path), tensor=tensor, subject=str(path))
