"""What lies between two blocks for all calibration rows: hidden states, and what blocks returned beside them.

It is kept in memory, or in an unnamed file. Blocks read and overwrite hidden states micro-batch by micro-batch. The
file is unlinked as soon as it is open, so that a killed run leaves nothing behind; it is read and written by offset,
not mapped, because mapped pages count as memory.

Most models hand ``[rows, length, hidden]`` from block to block. Hyper-connections carry several streams of a token,
``[rows, length, streams, hidden]``, and some models put the streams first. Rows pass blocks one by one and wait in
between packed as ``[rows, length, width]`` (`StateLayout`).

What blocks return beside the hidden states has any structure. So a structure is kept whole, and its tensors are
replaced by where they lie (`LeafStore`). Most blocks return what the one before did, in the same sizes: the room of
what nobody refers to any more is taken by the next tensor of its size.
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
        axis: which counts rows; the next one counts tokens.
        inner: sizes of the other axes, in their order.
    """

    axis: int
    inner: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], rows: int, length: int) -> StateLayout:
        """Find the axes of so many rows and tokens.

        Raises:
            RefusedError: there are none.
        """
        sizes = tuple(shape)
        for axis in range(len(sizes) - 2):
            if sizes[axis : axis + 2] == (rows, length):
                return cls(axis, sizes[:axis] + sizes[axis + 2 :])
        raise RefusedError(f"hidden states of shape {list(sizes)} reach its blocks", "--method rtn")

    @property
    def width(self) -> int:
        """Return the number of values per token."""
        return prod(self.inner)

    def packed(self, states: Tensor) -> Tensor:
        """Return states as ``[rows, length, width]``."""
        if self.axis == 0 and len(self.inner) == 1:
            return states
        return states.movedim((self.axis, self.axis + 1), (0, 1)).flatten(2)

    def unpacked(self, states: Tensor) -> Tensor:
        """Return packed states in the layout of the blocks."""
        if self.axis == 0 and len(self.inner) == 1:
            return states
        whole = states.reshape(*states.shape[:2], *self.inner)
        return whole.movedim((0, 1), (self.axis, self.axis + 1))


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
        """Make it, with so many bytes allocated."""
        self._directory = directory
        try:
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed by close()
            if size:
                system.allocate(self._file.fileno(), size)
        except OSError as error:
            raise self._failed(error) from error

    def read_into(self, offset: int, values: Tensor) -> None:
        """Fill a contiguous tensor of the CPU from an offset on."""
        try:
            whole = system.fill(self._file.fileno(), _bytes(values), offset)
        except OSError as error:
            raise self._failed(error) from error
        if not whole:
            raise self._failed(OSError("the file ends early"))

    def write_at(self, offset: int, values: Tensor) -> None:
        """Write a tensor from an offset on."""
        view = _bytes(values.detach().cpu().contiguous())
        while view:
            try:
                count = os.pwrite(self._file.fileno(), view, offset)
            except OSError as error:
                raise self._failed(error) from error
            view, offset = view[count:], offset + count

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()

    def _failed(self, error: OSError) -> ResourceError:
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
        for start, stop, first in _runs(tokens):
            self._file.read_into(first * self._row_bytes // length, states[start:stop])
        return states

    def scatter(self, tokens: Tensor, states: Tensor) -> None:
        """Overwrite the states of tokens, given their ascending numbers."""
        for start, stop, first in _runs(tokens):
            self._file.write_at(first * self._row_bytes // self._shape[0], states[start:stop])

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()


class LeafStore:
    """Store for the tensors in nested structures, in memory or on disk; thread-safe.

    Args:
        directory: where the file is made once there is a tensor; None keeps tensors in memory.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._file: UnnamedFile | None = None
        self._lock = threading.Lock()
        self._end = 0
        self._free: dict[int, list[int]] = {}  # offsets, by size

    def put(self, structure: Any) -> Any:
        """Return a structure with its tensors on the CPU, or on disk; errors as of `UnnamedFile`."""
        return tree_map(self._put, structure)

    def take(self, leaf: Any) -> Any:
        """Return a leaf of what `put` returned in its original form, tensors on the CPU."""
        return leaf.read() if isinstance(leaf, _LeafOnDisk) else leaf

    def joined(self, device: torch.device, *leaves: Any) -> Any:
        """Return the same leaf of several rows, concatenated along the first axis if it is a tensor."""
        found = [self.take(leaf) for leaf in leaves]
        if not isinstance(found[0], Tensor):
            return found[0]
        return (torch.cat(found) if len(found) > 1 else found[0]).to(device)

    def close(self) -> None:
        """Release the file; what was put cannot be taken any more."""
        if self._file is not None:
            self._file.close()
        self._file, self._free, self._end = None, {}, 0

    def _put(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self._directory is None or not leaf.numel():
            return leaf.detach().cpu()
        with self._lock:
            if self._file is None:
                self._file = UnnamedFile(self._directory)
            free = self._free.setdefault(leaf.nbytes, [])
            offset = free.pop() if free else self._end
            self._end = max(self._end, offset + leaf.nbytes)
        self._file.write_at(offset, leaf)
        return _LeafOnDisk(self._file, offset, leaf, free)


class _LeafOnDisk:
    """Place of a tensor in the file, which is reused once nothing refers to it."""

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


def _runs(tokens: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive numbers: where they start and stop among ``tokens``, and the first number."""
    numbers = tokens.tolist()
    start = 0
    for stop in range(1, len(numbers) + 1):
        if stop == len(numbers) or numbers[stop] != numbers[stop - 1] + 1:
            yield start, stop, numbers[start]
            start = stop
