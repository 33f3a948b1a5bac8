"""Weight files: which tensor lies where in them, a pure function of what they hold, and writing them tensor by tensor.

The reference library writes metadata in random order, leaves files readable by their owner only and never syncs them.
Here the header has sorted keys and is known before any tensor exists, so that a plan gives the exact bytes of every
file, and every file is allocated before the work begins (a full disk shows at once). Tensors arrive in any order,
strips of one from its first row on.

Names are sorted naturally (``layers.2`` before ``layers.10``), so that a shard holds a run of blocks; within a shard
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
from quantforge.files.disk import DISK, Disk, create_fresh, open_existing, writing
from quantforge.files.safetensors import MAX_HEADER_BYTES, METADATA, TensorEntry, torch_dtype
from quantforge.plans import DTYPE_BITS, FilePlan, StoredTensor

if TYPE_CHECKING:
    import torch

# transformers before 5 refuses files without it
PT_METADATA: Mapping[str, str] = {"format": "pt"}
_DIGITS = re.compile(r"([0-9]+)")
Shards = Sequence[Sequence[StoredTensor]]


def natural(name: str) -> tuple[list[int | str], str]:
    """Return a sort key: runs of digits compare as numbers; ``01`` comes before ``1``."""
    parts = _DIGITS.split(name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name


def plan_shards(
    tensors: Sequence[StoredTensor], max_bytes: int
) -> tuple[tuple[StoredTensor, ...], ...]:
    """Distribute tensors over files of at most ``max_bytes`` of data, in file order.

    A tensor that is larger than the limit has a file of its own. The result depends on nothing but
    the set of tensors and the limit.
    """
    shards: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in sorted(tensors, key=lambda tensor: natural(tensor.name)):
        size = tensor.nbytes
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
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
    """Return the first bytes of a file that holds ``tensors`` in this order: length and padded header.

    Raises:
        ValueError: a tensor is twice in it, or the header is longer than `MAX_HEADER_BYTES`.
    """
    table: dict[str, object] = {METADATA: dict(metadata)}
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


def file_plans(shards: Shards) -> tuple[FilePlan, ...]:
    """Plan where everything goes in the safetensors files of these shards; errors as `header_bytes`."""
    plans = []
    for name, shard in zip(shard_names(len(shards)), shards, strict=True):
        header = header_bytes(shard)
        offset, places = len(header), []
        for tensor in shard:
            places.append((tensor, offset))
            offset += tensor.nbytes
        plans.append(FilePlan(name, offset, ((0, header),), tuple(places)))
    return tuple(plans)


def index_json(shards: Shards) -> bytes:
    """Return ``model.safetensors.index.json`` of several shards."""
    names = shard_names(len(shards))
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard)},
        "weight_map": {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        },
    }
    return json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


class WeightsWriter:
    """Write planned tensors, in any order and the rows of each in theirs, into the weight files of a stage directory.

    All files are created and allocated at once; afterwards at most one is open. Leaving the
    ``with`` block without an error calls `close`. To go on with an interrupted run, name the
    tensors that are already ``done``: the files are then taken as they are.
    """

    def __init__(
        self, stage: Path, files: Sequence[FilePlan], *, done: Iterable[str] = (), disk: Disk = DISK
    ) -> None:
        """Make the files, or take those that are there.

        Args:
            stage: the directory.
            files: what goes where.
            done: names of tensors that an interrupted run has written.
            disk: what writes.

        Raises:
            ValueError: a tensor is in two files.
            ResourceError: the files do not fit.
            IntegrityError: with ``done``, a file is missing or has another size.
        """
        self._disk, self._stage, self._plans = disk, stage, files
        self._files = [stage / file.name for file in files]
        self._planned: dict[str, tuple[int, int, StoredTensor]] = {}  # shard, offset, tensor
        self._open = (-1, -1)  # shard, descriptor
        self._touched: set[int] = set()  # shards written to, headers too, since the last sync
        for number, file in enumerate(files):
            for tensor, offset in file.places:
                if tensor.name in self._planned:
                    raise ValueError(f"tensor {tensor.name!r} in two shards")
                self._planned[tensor.name] = (number, offset, tensor)
        self._written = {name: self._planned[name][2].nbytes for name in done}
        if self._written:
            for path, file in zip(self._files, files, strict=True):
                _check_size(path, file.size)
        elif files:
            self._allocate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor.

        Raises:
            ValueError: not planned, planned with another type or shape, or written before.
            ResourceError: the disk is full.
        """
        planned = self._planned_as(name, tensor)
        if tuple(tensor.shape) != planned.shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, planned {planned.shape}")
        self._put(name, 0, tensor)

    def rewrite(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor in place of what was written of it before; errors as `write`."""
        self._written.pop(name, None)
        self.write(name, tensor)

    def write_rows(self, name: str, first_row: int, tensor: torch.Tensor) -> None:
        """Write the next rows of a planned tensor ``[rows, ...]``, from ``first_row`` on; errors as `write`."""
        planned = self._planned_as(name, tensor)
        rows = tensor.shape[0]
        if (rows, *planned.shape[1:]) != tuple(tensor.shape) or first_row < 0:
            raise ValueError(
                f"{name}: rows of shape {tuple(tensor.shape)}, planned {planned.shape}"
            )
        if first_row + rows > planned.shape[0]:
            raise ValueError(f"{name}: {first_row + rows} rows, planned {planned.shape[0]}")
        self._put(name, first_row * (planned.nbytes // max(planned.shape[0], 1)), tensor)

    def entry(self, name: str) -> TensorEntry:
        """Return the place of a planned tensor, to read back what was written of it."""
        number, offset, tensor = self._planned[name]
        end = offset + tensor.nbytes
        return TensorEntry(name, tensor.dtype, tensor.shape, self._files[number], offset, end)

    def sync(self) -> None:
        """Make what was written so far durable.

        Raises:
            ResourceError: the disk failed to take it.
        """
        self._release()
        for number in sorted(self._touched):
            with writing(self._files[number], 0):
                self._disk.sync(self._files[number])
        self._touched.clear()

    def close(self) -> None:
        """Check that every byte of every tensor was written, and make the files durable.

        Raises:
            ValueError: tensors are missing.
            ResourceError: the disk failed to take what was written.
        """
        self._release()
        missing = [
            name
            for name, (_, _, tensor) in self._planned.items()
            if self._written.get(name) != tensor.nbytes
        ]
        if missing:
            raise ValueError(f"{len(missing)} tensors were not written: {', '.join(missing[:5])}")
        for file in self._files:
            with writing(file, 0):
                self._disk.sync(file)

    def _allocate(self) -> None:
        """Make all files, with what is known of them beforehand."""
        with writing(self._stage, sum(plan.size for plan in self._plans)):
            try:
                for path, plan in zip(self._files, self._plans, strict=True):
                    descriptor = create_fresh(path)
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
        self._touched.update(range(len(self._files)))

    def _planned_as(self, name: str, tensor: torch.Tensor) -> StoredTensor:
        if name not in self._planned:
            raise ValueError(f"{name}: not planned")
        planned = self._planned[name][2]
        if tensor.dtype != torch_dtype(planned.dtype):
            raise ValueError(f"{name}: {tensor.dtype}, planned {planned.dtype}")
        return planned

    def _put(self, name: str, start: int, tensor: torch.Tensor) -> None:
        import torch

        number, offset, planned = self._planned[name]
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data = memoryview(flat.view(torch.uint8).numpy().data)
        done = self._written.get(name, 0)
        if start < done or (name in self._written and done == planned.nbytes):
            raise ValueError(f"{name}: bytes {start} to {done} were written before")
        if start > done:
            raise ValueError(f"{name}: bytes {done} to {start} are not written yet")
        self._written[name] = done + len(data)
        self._touched.add(number)
        with writing(self._files[number], planned.nbytes):
            self._disk.write_at(self._descriptor(number), data, offset + start)

    def _descriptor(self, number: int) -> int:
        if self._open[0] != number:
            self._release()
            self._open = (number, open_existing(self._files[number]))
        return self._open[1]

    def _release(self) -> None:
        if self._open[1] >= 0:
            os.close(self._open[1])
        self._open = (-1, -1)


def _check_size(file: Path, size: int) -> None:
    if file.is_symlink() or not file.is_file() or file.stat().st_size != size:
        raise IntegrityError.at(
            file,
            "not the file that the interrupted run had begun",
            f"start afresh: rm -r {file.parent.parent}",
        )
