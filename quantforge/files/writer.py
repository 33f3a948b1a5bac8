"""Plan weight files down to the byte, and write them tensor by tensor.

The layout of a file depends only on the tensors in it. The reference library writes metadata in random order, makes
files readable by their owner only and never syncs them. Here the header has sorted keys and is known before any tensor
exists, so that a plan gives the exact bytes of every file, and every file is allocated before the work begins (a full
disk shows at once). Tensors arrive in any order, the rows of each in sequence.

Names are sorted naturally (``layers.2`` before ``layers.10``), so that a shard has a run of blocks; within a shard
wider types come first, so that every tensor is aligned to its item size although the format allows no padding between
tensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from quantforge.errors import IntegrityError
from quantforge.files.disk import DISK, Disk, open_existing, recreate_file, write_errors
from quantforge.files.safetensors import MAX_HEADER_BYTES, METADATA_KEY, TensorEntry, torch_dtype
from quantforge.plans import DTYPE_BITS, FilePlan, StoredTensor

if TYPE_CHECKING:
    import torch

# transformers before 5 refuses files without it
PT_METADATA: Mapping[str, str] = {"format": "pt"}
_DIGIT_RUN = re.compile(r"([0-9]+)")
Shards = Sequence[Sequence[StoredTensor]]


def natural_sort_key(name: str) -> tuple[list[int | str], str]:
    """Return a sort key under which runs of digits compare as numbers; ``01`` comes before ``1``."""
    name_parts = _DIGIT_RUN.split(name)
    return [
        int(name_part) if index % 2 else name_part for index, name_part in enumerate(name_parts)
    ], name


def plan_shards(
    tensors: Sequence[StoredTensor], max_bytes: int
) -> tuple[tuple[StoredTensor, ...], ...]:
    """Distribute tensors over files of at most ``max_bytes`` of data, in file order.

    A tensor that is larger than the limit gets a file of its own. The result depends only on the set of tensors and the
    limit.
    """
    shards: list[list[StoredTensor]] = [[]]
    shard_bytes = 0
    for tensor in sorted(tensors, key=lambda tensor: natural_sort_key(tensor.name)):
        size = tensor.nbytes
        if shards[-1] and shard_bytes + size > max_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(tensor)
        shard_bytes += size
    return tuple(
        tuple(sorted(shard, key=lambda tensor: -DTYPE_BITS[tensor.dtype])) for shard in shards
    )


def shard_names(count: int) -> tuple[str, ...]:
    """Return the file names of ``count`` shards, as every loader expects them."""
    if count == 1:
        return ("model.safetensors",)
    return tuple(f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1))


def header_bytes(
    tensors: Sequence[StoredTensor], metadata: Mapping[str, str] = PT_METADATA
) -> bytes:
    """Return the start of a file with ``tensors`` in this order: the length and the padded header.

    Raises:
        ValueError: a tensor occurs twice, or the header is longer than `MAX_HEADER_BYTES`.
    """
    table: dict[str, object] = {METADATA_KEY: dict(metadata)}
    start = 0
    for tensor in tensors:
        if tensor.name in table:
            raise ValueError(f"tensor {tensor.name!r} twice in one file")
        end = start + tensor.nbytes
        shape = list(tensor.shape)
        table[tensor.name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes: plan smaller shards")
    return len(text).to_bytes(8, "little") + text


def plan_files(shards: Shards) -> tuple[FilePlan, ...]:
    """Plan the safetensors files of these shards, with the offset of each tensor; errors as `header_bytes`."""
    plans = []
    for name, shard in zip(shard_names(len(shards)), shards, strict=True):
        header = header_bytes(shard)
        offset, placements = len(header), []
        for tensor in shard:
            placements.append((tensor, offset))
            offset += tensor.nbytes
        plans.append(FilePlan(name, offset, ((0, header),), tuple(placements)))
    return tuple(plans)


def index_json(shards: Shards) -> bytes:
    """Return ``model.safetensors.index.json`` for several shards."""
    names = shard_names(len(shards))
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard)},
        "weight_map": {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        },
    }
    return json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


class WeightsWriter:
    """Write planned tensors into the weight files of a stage directory.

    Tensors may come in any order, the rows of each in sequence. All files are created and allocated at once; afterwards
    at most one is open. Leaving the ``with`` block without an error calls `close`. To resume an interrupted run, pass
    the names of the tensors that are already ``done``: the existing files are then continued.
    """

    def __init__(
        self,
        stage: Path,
        files: Sequence[FilePlan],
        *,
        finished_names: Iterable[str] = (),
        disk: Disk = DISK,
    ) -> None:
        """Create the files, or continue existing ones.

        Args:
            stage: the directory.
            files: the planned files.
            finished_names: names of tensors that an interrupted run has written.
            disk: the system calls to write with.

        Raises:
            ValueError: a tensor is in two files.
            ResourceError: the files do not fit.
            IntegrityError: with ``finished_names``, a file is missing or has another size.
        """
        self._disk, self._stage, self._plans = disk, stage, files
        self._files = [stage / file.name for file in files]
        self._planned: dict[str, tuple[int, int, StoredTensor]] = {}  # shard, offset, tensor
        self._open_file = (-1, -1)  # shard, descriptor
        self._unsynced: set[int] = set()  # shards written to, headers too, since the last sync
        for number, file in enumerate(files):
            for tensor, offset in file.places:
                if tensor.name in self._planned:
                    raise ValueError(f"tensor {tensor.name!r} in two shards")
                self._planned[tensor.name] = (number, offset, tensor)
        self._written = {name: self._planned[name][2].nbytes for name in finished_names}
        if self._written:
            for path, file in zip(self._files, files, strict=True):
                _check_file_size(path, file.size)
        elif files:
            self._allocate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._close_open_file()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor.

        Raises:
            ValueError: it is not planned, has another type or shape than planned, or was written before.
            ResourceError: the disk is full.
        """
        planned = self._planned_tensor(name, tensor)
        if tuple(tensor.shape) != planned.shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, planned {planned.shape}")
        self._write_bytes(name, 0, tensor)

    def rewrite(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor again, replacing what was written before; errors as `write`."""
        self._written.pop(name, None)
        self.write(name, tensor)

    def write_rows(self, name: str, first_row: int, tensor: torch.Tensor) -> None:
        """Write the next rows of a planned tensor ``[rows, ...]``, starting at ``first_row``; errors as `write`."""
        planned = self._planned_tensor(name, tensor)
        rows = tensor.shape[0]
        if (rows, *planned.shape[1:]) != tuple(tensor.shape) or first_row < 0:
            raise ValueError(
                f"{name}: rows of shape {tuple(tensor.shape)}, planned {planned.shape}"
            )
        if first_row + rows > planned.shape[0]:
            raise ValueError(f"{name}: {first_row + rows} rows, planned {planned.shape[0]}")
        self._write_bytes(name, first_row * (planned.nbytes // max(planned.shape[0], 1)), tensor)

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a planned tensor, with which it can be read back."""
        number, offset, tensor = self._planned[name]
        end = offset + tensor.nbytes
        return TensorEntry(name, tensor.dtype, tensor.shape, self._files[number], offset, end)

    def sync(self) -> None:
        """Make everything written so far durable.

        Raises:
            ResourceError: the disk failed.
        """
        self._close_open_file()
        for number in sorted(self._unsynced):
            with write_errors(self._files[number], 0):
                self._disk.sync(self._files[number])
        self._unsynced.clear()

    def close(self) -> None:
        """Check that every byte of every tensor was written, and make the files durable.

        Raises:
            ValueError: tensors are missing.
            ResourceError: the disk failed.
        """
        self._close_open_file()
        unwritten = [
            name
            for name, (_, _, tensor) in self._planned.items()
            if self._written.get(name) != tensor.nbytes
        ]
        if unwritten:
            raise ValueError(
                f"{len(unwritten)} tensors were not written: {', '.join(unwritten[:5])}"
            )
        for file in self._files:
            with write_errors(file, 0):
                self._disk.sync(file)

    def _allocate(self) -> None:
        """Create all files with their planned sizes, and write the parts that are known in advance."""
        with write_errors(self._stage, sum(plan.size for plan in self._plans)):
            try:
                for path, plan in zip(self._files, self._plans, strict=True):
                    descriptor = recreate_file(path)
                    try:
                        self._disk.allocate(descriptor, plan.size)
                        for offset, data in plan.fixed:
                            self._disk.write_at(descriptor, memoryview(data), offset)
                    finally:
                        os.close(descriptor)
                self._disk.sync(self._stage)
            except OSError:  # free the space, so that the message tells what is free without us
                for path in self._files:
                    path.unlink(missing_ok=True)
                raise
        self._unsynced.update(range(len(self._files)))

    def _planned_tensor(self, name: str, tensor: torch.Tensor) -> StoredTensor:
        if name not in self._planned:
            raise ValueError(f"{name}: not planned")
        planned = self._planned[name][2]
        if tensor.dtype != torch_dtype(planned.dtype):
            raise ValueError(f"{name}: {tensor.dtype}, planned {planned.dtype}")
        return planned

    def _write_bytes(self, name: str, start: int, tensor: torch.Tensor) -> None:
        import torch

        number, offset, planned = self._planned[name]
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data = memoryview(flat.view(torch.uint8).numpy().data)
        num_written = self._written.get(name, 0)
        if start < num_written or (name in self._written and num_written == planned.nbytes):
            raise ValueError(f"{name}: bytes {start} to {num_written} were written before")
        if start > num_written:
            raise ValueError(f"{name}: bytes {num_written} to {start} are not written yet")
        self._written[name] = num_written + len(data)
        self._unsynced.add(number)
        with write_errors(self._files[number], planned.nbytes):
            self._disk.write_at(self._open_shard(number), data, offset + start)

    def _open_shard(self, number: int) -> int:
        if self._open_file[0] != number:
            self._close_open_file()
            self._open_file = (number, open_existing(self._files[number]))
        return self._open_file[1]

    def _close_open_file(self) -> None:
        if self._open_file[1] >= 0:
            os.close(self._open_file[1])
        self._open_file = (-1, -1)


def _check_file_size(path: Path, size: int) -> None:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
        raise IntegrityError.at(
            path,
            "not the file that the interrupted run had begun",
            f"start afresh: rm -r {path.parent.parent}",
        )
