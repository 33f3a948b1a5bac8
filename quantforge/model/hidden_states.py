"""Store for the hidden states of all calibration rows between two blocks: in memory, or in an unnamed file.

Blocks read and overwrite them micro-batch by micro-batch. The file is unlinked as soon as it is open, so that a
killed run leaves nothing behind; it is read and written by offset, not mapped, because mapped pages count as memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quantforge.errors import ResourceError
from quantforge_files import system


class HiddenStates(Protocol):
    """Float32 ``[rows, length, hidden]``, read and written some rows at a time."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return rows ``start:stop``; the caller must not change them in place."""

    def write(self, start: int, states: Tensor) -> None:
        """Overwrite the rows from ``start`` on with ``[rows, length, hidden]``."""

    def close(self) -> None:
        """Release memory or disk."""


class TokenStates(HiddenStates, Protocol):
    """Hidden states that are reached by token too: numbered over all rows, ``row * length + position``."""

    def gather(self, tokens: Tensor) -> Tensor:
        """Return the states ``[tokens, hidden]`` of tokens, given their ascending numbers."""

    def scatter(self, tokens: Tensor, states: Tensor) -> None:
        """Overwrite the states of tokens, given their ascending numbers, with ``[tokens, hidden]``."""


class InMemory:
    """Hidden states as one tensor."""

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
    """File of a directory that has no name there, for tensors of any type by their offsets; safe on several threads.

    Raises:
        ResourceError: the file cannot be made or written.
    """

    def __init__(self, directory: Path, size: int = 0) -> None:
        """Make it, with so many bytes allocated."""
        self._directory = directory
        try:
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed by close()
            if size:
                system.allocate(self._file.fileno(), 0, size)
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
