"""Hidden states that processes hand on: a file for every micro-batch in front of every block.

A worker of a shared run reads what the block before its own makes of a micro-batch, possibly while the next is still
being made, and writes what its own block makes of it. So workers follow one another through the blocks. What is in a
file depends on the source and the rows alone: it does not matter who writes it, or how often.

Files are written on a thread of their own, while the worker goes on: until a block is handed in nobody relies on
them. A worker that takes the next block, too, reads what it has kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quantforge.checkpoint.disk import folder, save, writing
from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError, IntegrityError
from quantforge_files.roles import STATES

SUM_BYTES = 8


class SteppedBackError(Exception):
    """The states that a worker waits for will not come unless it does something else first."""


def _nothing_to_wait_for() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


@dataclass(slots=True)
class _Kept:
    """States of a micro-batch: in front of which block they are, what a file holds of them, and its being written."""

    block: int
    data: Tensor  # uint8: the states, and their checksum
    written: Future[None] = field(default_factory=_nothing_to_wait_for)

    def states(self, shape: tuple[int, ...]) -> Tensor:
        return self.data[:-SUM_BYTES].view(torch.float32).view(shape)


class HandedStates:
    """Hidden states in front of one block, which are read, and behind it, which are written.

    Args:
        directory: of the files; made where it is missing.
        keeps: whether what is written stays in memory, too, until the same rows are written again.

    Attributes:
        block: in front of which states are read; -1 while rows are embedded.
        wait: called again and again while a file is missing.
        whole: tells whether all states in front of the block have been written.
    """

    def __init__(self, directory: Path, *, keeps: bool) -> None:
        self.block = -1
        self.wait: Callable[[], None] = lambda: None
        self.whole: Callable[[], bool] = lambda: False
        self._directory = directory
        self._shape: tuple[int, ...] = ()
        self._keeps = keeps
        self._kept: dict[int, _Kept] = {}
        self._writer, self._removed = ThreadPoolExecutor(1), _nothing_to_wait_for()
        with writing(directory, 0):
            folder(directory)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the rows of one micro-batch in front of the block, as soon as they are there.

        Raises:
            IntegrityError: the file is not what a worker had written.
            SteppedBackError: see `wait`.
        """
        kept = self._kept.get(start)
        if self._keeps and kept is not None and kept.block == self.block:
            return kept.states((stop - start, *self._shape))
        path = self._file(self.block, start)
        states = torch.empty(stop - start, *self._shape)
        size = states.nbytes + SUM_BYTES
        data, whole = bytearray(), False
        while not (data or whole):
            whole = self.whole()
            with suppress(InputError):  # it is removed as soon as the block is done by another
                data = bytearray(FILES.head(path, STATES, size + 1, self._directory))
            if not data:
                self.wait()
        if len(data) == size:
            found = torch.frombuffer(data, dtype=torch.float32, count=states.numel())
            if _sum(found).to_bytes(SUM_BYTES, "big") == data[-SUM_BYTES:]:
                return found.view_as(states)
        raise IntegrityError.at(
            path,
            "is not what a worker had written",
            f"start afresh: rm -r {self._directory.parents[1]}",
        )

    def write(self, start: int, states: Tensor) -> None:
        """Hand on the rows of one micro-batch behind the block, unless that was done; see `flush`.

        Raises:
            ResourceError: as `flush`, for what was written before.
        """
        self._shape = tuple(states.shape[1:])
        own = start if self._keeps else 0
        kept = self._kept.get(own)
        if kept is not None:
            kept.written.result()  # its memory is used again
        size = 4 * states.numel() + SUM_BYTES
        if kept is None or len(kept.data) != size:
            kept = self._kept[own] = _Kept(-1, torch.empty(size, dtype=torch.uint8))
        kept.block = self.block + 1
        kept.states(tuple(states.shape)).copy_(states)
        path = self._file(kept.block, start)
        if not path.exists():
            found = _sum(kept.data[:-SUM_BYTES].view(torch.float32))
            kept.data[-SUM_BYTES:] = torch.tensor([*found.to_bytes(SUM_BYTES, "big")])
            data = kept.data.numpy().data
            kept.written = self._writer.submit(save, path, data, overwrite=True)

    def flush(self) -> None:
        """Wait until everything is in its file.

        Raises:
            ResourceError: the disk is full, or the run is over and its directory gone.
        """
        for written in (*(kept.written for kept in self._kept.values()), self._removed):
            written.result()

    def forget(self, block: int) -> None:
        """Remove what lies in front of a block that is done; `flush` waits for that, too."""
        self._removed = self._writer.submit(self._remove, block)

    def _remove(self, block: int) -> None:
        for path in self._directory.glob(f"{block}.*"):
            with suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Leave the files to others."""
        self._writer.shutdown()

    def _file(self, block: int, start: int) -> Path:
        return self._directory / f"{block}.{start}"


def _sum(states: Tensor) -> int:
    """Return the sum of the words of float32 states: against accidents, in a tenth of the time of a CRC."""
    words = states.reshape(-1).view(torch.int32 if states.numel() % 2 else torch.int64)
    total = int(words.sum(dtype=torch.int64))
    return total % (1 << 8 * SUM_BYTES)
