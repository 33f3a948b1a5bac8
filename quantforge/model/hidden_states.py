"""Store hidden states between two blocks, and other block outputs, for all calibration rows.

They are kept in memory or in an unnamed file. Blocks read and overwrite hidden states micro-batch by micro-batch. The
file is unlinked as soon as it is open, so that a killed run leaves nothing on disk; it is read and written by offset
instead of being mapped, because mapped pages count as memory.

Most models pass ``[rows, length, hidden]`` from block to block. Hyper-connections carry several streams per token,
``[rows, length, streams, hidden]``, and some models put the streams first. Rows pass blocks one by one and are stored
in between as packed ``[rows, length, width]`` (`StateLayout`).

Other outputs of a block may have any structure. The structure is kept, and its tensors are replaced by their position
in the file (`LeafStore`). Most blocks return tensors of the same sizes as the previous block, so the space of a tensor
that is no longer referenced is reused for the next tensor of its size.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from quantforge.errors import RefusedError, ResourceError
from quantforge_files import system


class StateLayout(NamedTuple):
    """Axes of hidden states.

    Attributes:
        row_axis: the axis of rows; the next axis counts tokens.
        other_sizes: sizes of the other axes, in order.
    """

    row_axis: int
    other_sizes: tuple[int, ...]

    @classmethod
    def find(cls, shape: Sequence[int], rows: int, length: int) -> StateLayout:
        """Find the axes of rows and tokens in a shape.

        Raises:
            RefusedError: no two neighbouring axes have these sizes.
        """
        sizes = tuple(shape)
        for row_axis in range(len(sizes) - 2):
            if sizes[row_axis : row_axis + 2] == (rows, length):
                return cls(row_axis, sizes[:row_axis] + sizes[row_axis + 2 :])
        raise RefusedError(f"hidden states of shape {list(sizes)} reach its blocks", "--method rtn")

    @property
    def values_per_token(self) -> int:
        """Return the number of values per token."""
        return prod(self.other_sizes)

    def pack(self, states: Tensor) -> Tensor:
        """Return states as ``[rows, length, values_per_token]``."""
        if self.row_axis == 0 and len(self.other_sizes) == 1:
            return states
        return states.movedim((self.row_axis, self.row_axis + 1), (0, 1)).flatten(2)

    def unpack(self, states: Tensor) -> Tensor:
        """Return packed states in the layout of the blocks."""
        if self.row_axis == 0 and len(self.other_sizes) == 1:
            return states
        reshaped = states.reshape(*states.shape[:2], *self.other_sizes)
        return reshaped.movedim((0, 1), (self.row_axis, self.row_axis + 1))


class HiddenStates(Protocol):
    """Float32 ``[rows, length, hidden]``, read and written some rows at a time."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return rows ``start:stop``; the caller must not change them in place."""

    def write(self, start: int, states: Tensor) -> None:
        """Overwrite the rows from ``start`` on with ``[rows, length, hidden]``."""

    def close(self) -> None:
        """Release memory or disk."""


class TokenStates(HiddenStates, Protocol):
    """Hidden states that can be read and written by token, numbered ``row * length + position``."""

    def gather(self, tokens: Tensor) -> Tensor:
        """Return the states ``[tokens, hidden]`` of tokens, given their ascending numbers."""

    def scatter(self, tokens: Tensor, states: Tensor) -> None:
        """Overwrite the states of tokens, given their ascending numbers, with ``[tokens, hidden]``."""


class InMemory:
    """Hidden states in one tensor in memory."""

    def __init__(self, rows: int, length: int, hidden: int) -> None:
        self._states = torch.empty(rows, length, hidden)

    def read(self, start: int, stop: int) -> Tensor:
        """Return rows ``start:stop`` (a view)."""
        return self._states[start:stop]

    def write(self, start: int, states: Tensor) -> None:
        """Overwrite the rows from ``start`` on."""
        self._states[start : start + len(states)].copy_(states)

    def gather(self, tokens: Tensor) -> Tensor:
        """Return the states of tokens, given their ascending numbers."""
        return self._states.flatten(0, 1).index_select(0, tokens)

    def scatter(self, tokens: Tensor, states: Tensor) -> None:
        """Overwrite the states of tokens, given their ascending numbers."""
        self._states.flatten(0, 1)[tokens] = states.to(self._states)

    def close(self) -> None:
        """Release the memory."""
        self._states = torch.empty(0)


class UnnamedFile:
    """Temporary file without a name that stores tensors of any type at offsets; thread-safe.

    Raises:
        ResourceError: the file cannot be made or written.
    """

    def __init__(self, directory: Path, size: int = 0) -> None:
        """Create the file, with ``size`` bytes allocated."""
        self._directory = directory
        try:
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed by close()
            if size:
                system.allocate(self._file.fileno(), size)
        except OSError as error:
            raise self._storage_error(error) from error

    def read_into(self, offset: int, values: Tensor) -> None:
        """Fill a contiguous CPU tensor from the file, starting at an offset."""
        try:
            is_complete = system.read_into(self._file.fileno(), _bytes(values), offset)
        except OSError as error:
            raise self._storage_error(error) from error
        if not is_complete:
            raise self._storage_error(OSError("the file ends early"))

    def write_at(self, offset: int, values: Tensor) -> None:
        """Write a tensor to the file, starting at an offset."""
        view = _bytes(values.detach().cpu().contiguous())
        while view:
            try:
                count = os.pwrite(self._file.fileno(), view, offset)
            except OSError as error:
                raise self._storage_error(error) from error
            view, offset = view[count:], offset + count

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()

    def _storage_error(self, error: OSError) -> ResourceError:
        return ResourceError(
            f"{self._directory}: activations cannot be kept on disk: {error}",
            "free some space, or choose --activations memory",
        )


class OnDisk:
    """Hidden states in an unnamed file of a directory; errors as of `UnnamedFile`."""

    def __init__(self, rows: int, length: int, hidden: int, directory: Path) -> None:
        self._shape = (length, hidden)
        self._row_bytes = 4 * length * hidden
        self._file = UnnamedFile(directory, rows * self._row_bytes)

    def read(self, start: int, stop: int) -> Tensor:
        """Return rows ``start:stop``."""
        states = torch.empty(stop - start, *self._shape)
        self._file.read_into(start * self._row_bytes, states)
        return states

    def write(self, start: int, states: Tensor) -> None:
        """Overwrite the rows from ``start`` on."""
        self._file.write_at(start * self._row_bytes, states)

    def gather(self, tokens: Tensor) -> Tensor:
        """Return the states of tokens, given their ascending numbers."""
        length, width = self._shape
        states = torch.empty(len(tokens), width)
        for start, stop, first in _consecutive_runs(tokens):
            self._file.read_into(first * self._row_bytes // length, states[start:stop])
        return states

    def scatter(self, tokens: Tensor, states: Tensor) -> None:
        """Overwrite the states of tokens, given their ascending numbers."""
        for start, stop, first in _consecutive_runs(tokens):
            self._file.write_at(first * self._row_bytes // self._shape[0], states[start:stop])

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()


class LeafStore:
    """Store for the tensors inside nested structures, in memory or on disk; thread-safe.

    Args:
        directory: where the file is created with the first tensor; None keeps tensors in memory.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._file: UnnamedFile | None = None
        self._lock = threading.Lock()
        self._file_end = 0
        self._free_offsets: dict[int, list[int]] = {}  # offsets, by size

    def put(self, structure: Any) -> Any:
        """Return the structure with its tensors moved to the CPU or to disk; errors as `UnnamedFile`."""
        return tree_map(self._put, structure)

    def load(self, leaf: Any) -> Any:
        """Return a leaf of a structure from `put` in its original form, tensors on the CPU."""
        return leaf.read() if isinstance(leaf, _TensorOnDisk) else leaf

    def load_joined(self, device: torch.device, *leaves: Any) -> Any:
        """Load the same leaf of several rows; tensors are concatenated along the first axis and moved to a device."""
        loaded = [self.load(leaf) for leaf in leaves]
        if not isinstance(loaded[0], Tensor):
            return loaded[0]
        return (torch.cat(loaded) if len(loaded) > 1 else loaded[0]).to(device)

    def close(self) -> None:
        """Close the file; stored leaves cannot be loaded any more."""
        if self._file is not None:
            self._file.close()
        self._file, self._free_offsets, self._file_end = None, {}, 0

    def _put(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self._directory is None or not leaf.numel():
            return leaf.detach().cpu()
        with self._lock:
            if self._file is None:
                self._file = UnnamedFile(self._directory)
            free_offsets = self._free_offsets.setdefault(leaf.nbytes, [])
            offset = free_offsets.pop() if free_offsets else self._file_end
            self._file_end = max(self._file_end, offset + leaf.nbytes)
        self._file.write_at(offset, leaf)
        return _TensorOnDisk(self._file, offset, leaf, free_offsets)


class _TensorOnDisk:
    """Position of a tensor in the file; the space is reused once nothing refers to it."""

    def __init__(self, file: UnnamedFile, offset: int, tensor: Tensor, free: list[int]) -> None:
        self._file, self._offset, self._free = file, offset, free
        self._shape, self._dtype = tensor.shape, tensor.dtype

    def read(self) -> Tensor:
        values = torch.empty(self._shape, dtype=self._dtype)
        self._file.read_into(self._offset, values)
        return values

    def __del__(self) -> None:
        self._free.append(self._offset)


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.reshape(-1).view(torch.uint8).numpy().data)


def _consecutive_runs(tokens: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive token numbers: start and stop index in ``tokens``, and the first number."""
    numbers = tokens.tolist()
    start = 0
    for stop in range(1, len(numbers) + 1):
        if stop == len(numbers) or numbers[stop] != numbers[stop - 1] + 1:
            yield start, stop, numbers[start]
            start = stop
