"""Importance matrices in the file formats of llama.cpp's tools: the mean squares of each input column.

Two forms. The current one is a GGUF file without an architecture: ``general.type`` is ``imatrix``, and a weight ``W``
has two F32 tensors, ``W.in_sum2`` (sums of squares, one row per matrix: several for experts) and ``W.counts`` (rows
that were summed), without the first dimension where there is one matrix. The older one (``.dat``) is a list of
records: i32 length of the name, name, i32 calls, i32 number of values, float32 means, each times calls; then i32
number of chunks, i32 length of a data set's name, and the name. What is kept of a weight is the mean: the sum by the
count, and 1 where nothing was counted.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.errors import InputError
from quantforge.files.disk import save_file
from quantforge.files.opener import FILES, changed_error
from quantforge.files.safetensors import read_tensor
from quantforge.formats.gguf.container import (
    GgufTensor,
    ValueType,
    array_value,
    file_plan,
    string_value,
    u32_value,
)
from quantforge.formats.gguf.parsing import is_gguf, read_gguf
from quantforge_files.roles import IMATRIX

if TYPE_CHECKING:
    from torch import Tensor

_WantsEntry = Callable[[str, int, int], bool]  # name, number of values, matrices
_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_ENTRIES, _MAX_TEXT = 1 << 18, 1 << 16
_HINT = "write it again with llama-imatrix, or with --imatrix and a new name"


@dataclass(frozen=True, slots=True)
class WeightImportance:
    """Importance of one weight: ``means`` ``[matrices, columns]`` float32 over ``rows`` tokens (old format: calls)."""

    means: Tensor
    rows: int


@dataclass(frozen=True, slots=True)
class Imatrix:
    """The importance of all weights by their GGUF names, and the data set it was computed from."""

    entries: Mapping[str, WeightImportance]
    dataset: str
    chunks: int
    chunk_size: int


def write_imatrix(path: Path, imatrix: Imatrix) -> None:
    """Write an importance matrix atomically, in the old format if the name ends in ``.dat``.

    Raises:
        RefusedError: the file exists.
        ResourceError: the disk is full.
    """
    data = _legacy_bytes(imatrix) if path.suffix == ".dat" else _gguf_bytes(imatrix)
    save_file(path, data)


def read_imatrix(path: Path, sizes: Mapping[str, int] | None = None) -> Imatrix:
    """Read an importance matrix in the current or the old format.

    Args:
        path: the file.
        sizes: the number of values by the names of the weights that matter, so that of a larger file nothing else is
            read; everything when left out.

    Raises:
        InputError: neither, damaged, with another number of values than is wanted, or with values that are no means of
            squares.
    """

    def asked(name: str, values: int, matrices: int) -> bool:
        _check_columns(path, name, values, matrices, sizes or {})
        return sizes is None or name in sizes

    imatrix = _read(path, asked)
    for name, entry in imatrix.entries.items():
        if not bool(entry.means.isfinite().all()) or bool((entry.means < 0).any()):
            raise InputError(
                f"{name} holds a value that is no mean of squares",
                _HINT,
                file=str(path),
                subject=str(path),
            )
    return imatrix


def is_importance_matrix(path: Path) -> bool:
    """Return whether a file is an importance matrix: a GGUF file by its ``general.type``, others by suffix."""
    if is_gguf(path):
        return bool(read_gguf(path).value("general.type", str, "model") == "imatrix")
    return path.suffix == ".dat"


def check_structure(path: Path, sizes: Mapping[str, int] | None = None) -> frozenset[str]:
    """Return the weight names of an importance matrix, checking its structure without reading values.

    Raises:
        InputError: neither form, damaged, with bytes that belong to nothing, or with another number of values than is
            ``sizes``.
    """
    names = set()

    def asked(name: str, values: int, matrices: int) -> bool:
        _check_columns(path, name, values, matrices, sizes or {})
        names.add(name)
        return False

    _read(path, asked)
    return frozenset(names)


def _check_columns(
    path: Path, name: str, values: int, matrices: int, sizes: Mapping[str, int]
) -> None:
    if sizes.get(name, values) != values:
        raise InputError(
            f"{name} has {values / matrices:g} columns, the weight {sizes[name] / matrices:g}",
            "it belongs to another model",
            file=str(path),
            subject=str(path),
        )


def _read(path: Path, wants_entry: _WantsEntry) -> Imatrix:
    return _read_gguf(path, wants_entry) if is_gguf(path) else _read_legacy(path, wants_entry)


def _gguf_bytes(imatrix: Imatrix) -> bytes:
    tensors = []
    for name, entry in sorted(imatrix.entries.items()):
        rows = entry.means.new_full((len(entry.means), 1), float(entry.rows))
        for suffix, values in ((_SUMS, entry.means * entry.rows), (_COUNTS, rows)):
            shape = tuple(values.shape if len(values) > 1 else values[0].shape)
            tensors.append(GgufTensor(name + suffix, "F32", shape, fixed=_float32_bytes(values)))
    keys = {
        "general.type": string_value("imatrix"),
        "imatrix.datasets": array_value(ValueType.STRING, [imatrix.dataset]),
        "imatrix.chunk_count": u32_value(imatrix.chunks),
        "imatrix.chunk_size": u32_value(imatrix.chunk_size),
    }
    plan = file_plan("imatrix.gguf", keys, tensors)
    data = bytearray(plan.size)
    for offset, fixed_bytes in plan.fixed:
        data[offset : offset + len(fixed_bytes)] = fixed_bytes
    return bytes(data)


def _read_gguf(path: Path, wants_entry: _WantsEntry) -> Imatrix:
    file = read_gguf(path)
    if file.value("general.type", str, "model") != "imatrix":
        raise InputError(
            "a GGUF file, but no importance matrix", _HINT, file=str(path), subject=str(path)
        )
    if len(file.files) > 1:  # one digest is of one file
        raise InputError("an importance matrix in parts", _HINT, file=str(path), subject=str(path))
    entries = {}
    for name, table in file.tensors.items():
        if not name.endswith(_SUMS):
            continue
        weight = name.removesuffix(_SUMS)
        counts_tensor = file.tensors.get(weight + _COUNTS)
        matrices = 1 if len(table.shape) == 1 else table.shape[0]
        if (
            counts_tensor is None
            or (table.type, counts_tensor.type) != ("F32", "F32")
            or len(table.shape) > 2
            or counts_tensor.shape not in ((matrices, 1), (matrices,))
        ):
            raise InputError(
                f"{weight}: sums and counts do not fit",
                _HINT,
                file=str(path),
                tensor=name,
                subject=str(path),
            )
        if not wants_entry(weight, math.prod(table.shape), matrices):
            continue
        sums, counts = (
            read_tensor(table_pair.raw()).view(matrices, -1)
            for table_pair in (table, counts_tensor)
        )
        if not bool(counts.isfinite().all()):
            raise InputError(
                f"{weight}: a count is no number",
                _HINT,
                file=str(path),
                tensor=name,
                subject=str(path),
            )
        entries[weight] = WeightImportance(
            (sums / counts.clamp(min=1)).where(counts > 0, 1.0), int(counts.max())
        )
    datasets = file.value("imatrix.datasets", list, [""]) or [""]
    return Imatrix(
        entries,
        str(datasets[0]),
        file.value("imatrix.chunk_count", int, 0),
        file.value("imatrix.chunk_size", int, 0),
    )


def _legacy_bytes(imatrix: Imatrix) -> bytes:
    pieces = [struct.pack("<i", len(imatrix.entries))]
    for name, entry in sorted(imatrix.entries.items()):
        calls = max(1, imatrix.chunks)
        values = entry.means.reshape(-1) * calls
        pieces += [
            _length_prefixed(name),
            struct.pack("<ii", calls, len(values)),
            _float32_bytes(values),
        ]
    return b"".join([*pieces, struct.pack("<i", imatrix.chunks), _length_prefixed(imatrix.dataset)])


def _read_legacy(path: Path, wants_entry: _WantsEntry) -> Imatrix:
    entries = {}
    with FILES.stream(path, IMATRIX, None) as file:
        records = _RecordReader(path, file)
        for _ in range(records.read_entry_count()):
            name, calls, count = records.read_string(), records.read_int(), records.read_int()
            if calls < 1 or count < 1:
                raise InputError(
                    f"{name}: {count} values of {calls} calls",
                    _HINT,
                    file=str(path),
                    subject=str(path),
                )
            if not wants_entry(name, count, 1):
                records.skip(4 * count)
                continue
            import torch

            values = torch.frombuffer(bytearray(records.read_field(4 * count)), dtype=torch.float32)
            entries[name] = WeightImportance((values / calls)[None], calls)
        chunks, dataset = (records.read_int(), records.read_string()) if records.left else (0, "")
        records.check_end()
    return Imatrix(entries, dataset, chunks, 0)


def _length_prefixed(name: str) -> bytes:
    data = name.encode()
    return struct.pack("<i", len(data)) + data


def _float32_bytes(values: Tensor) -> bytes:
    return values.detach().float().contiguous().numpy().tobytes()


class _RecordReader:
    """Sequential reader of the old format that checks every length against the remaining bytes."""

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self._path, self._file = path, file
        self.left = os.fstat(file.fileno()).st_size

    def read_field(self, count: int) -> bytes:
        """Read the next bytes."""
        self._pass(count)
        data = self._file.read(count)
        if len(data) != count:
            raise changed_error(self._path)
        return data

    def skip(self, count: int) -> None:
        """Skip ``count`` bytes."""
        self._pass(count)
        self._file.seek(count, os.SEEK_CUR)

    def _pass(self, count: int) -> None:
        if not 0 <= count <= self.left:
            raise InputError(
                f"{count} bytes expected, {self.left} left: truncated?",
                _HINT,
                file=str(self._path),
                subject=str(self._path),
            )
        self.left -= count

    def read_int(self) -> int:
        """Read a 32-bit integer."""
        return int(struct.unpack("<i", self.read_field(4))[0])

    def read_entry_count(self) -> int:
        """Read the number of entries at the beginning of the file."""
        count = self.read_int()
        if not 0 < count <= _MAX_ENTRIES:
            raise InputError(
                "no importance matrix: it begins as neither form of one does",
                _HINT,
                file=str(self._path),
                subject=str(self._path),
            )
        return count

    def check_end(self) -> None:
        """Raise `InputError` if bytes are left after the last record."""
        if self.left:
            raise InputError(
                f"{self.left} bytes after the last record",
                _HINT,
                file=str(self._path),
                subject=str(self._path),
            )

    def read_string(self) -> str:
        """Read a length-prefixed string."""
        length = self.read_int()
        if length > _MAX_TEXT:
            raise InputError(
                f"a name of {length} bytes", _HINT, file=str(self._path), subject=str(self._path)
            )
        try:
            return self.read_field(length).decode()
        except UnicodeDecodeError as error:
            raise InputError(
                "a name that is no text", _HINT, file=str(self._path), subject=str(self._path)
            ) from error
