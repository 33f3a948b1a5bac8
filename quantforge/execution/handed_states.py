"""Hidden states that processes hand on: a file for every micro-batch in front of every block.

A rank of a shared run reads what the block before its own makes of a micro-batch, possibly while the next is still
being made, and writes what its own block makes of it. So ranks follow one another through the blocks. What is in a
file depends on the source and the rows alone: it does not matter who writes it, or how often.

Files are written on a thread of their own, one after the other, while the rank goes on: until a block is handed in
nobody relies on them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from quantforge.checkpoint.disk import folder, save, writing
from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError, IntegrityError
from quantforge_files.roles import STATES

SUM_BYTES = 8


class SteppedBackError(Exception):
    """The states that a rank waits for will not come unless it does something else first."""


class HandedStates:
    """Hidden states in front of one block, which are read, and after it, which are written.

    Args:
        directory: of the files; made where it is missing.

    Attributes:
        block: in front of which states are read; -1 while rows are embedded.
        wait: called again and again while a file is missing.
        whole: tells whether all states in front of the block have been written.
    """

    def __init__(self, directory: Path) -> None:
        self.block = -1
        self.wait: Callable[[], None] = lambda: None
        self.whole: Callable[[], bool] = lambda: False
        self._directory = directory
        self._shape: tuple[int, ...] = ()
        self._writer = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None
        with writing(directory, 0):
            folder(directory)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the rows of one micro-batch in front of the block, as soon as they are there.

        Raises:
            IntegrityError: the file is not what a rank had written.
            SteppedBackError: see `wait`.
        """
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
            if _checksum(found) == data[-SUM_BYTES:]:
                return found.view_as(states)
        raise IntegrityError.at(
            path,
            "is not what a worker had written",
            f"start afresh: rm -r {self._directory.parents[1]}",
        )

    def write(self, start: int, states: Tensor) -> None:
        """Hand on the rows of one micro-batch after the block, unless that was done; see `flush`.

        Raises:
            ResourceError: as `flush`, for what was written before.
        """
        self.flush()  # one micro-batch at a time waits in memory
        self._shape = tuple(states.shape[1:])
        path = self._file(self.block + 1, start)
        if not path.exists():
            words = states.detach().to("cpu", torch.float32).contiguous()
            data = words.numpy().tobytes() + _checksum(words)
            self._written = self._writer.submit(save, path, data, overwrite=True)

    def flush(self) -> None:
        """Wait until everything is in its file.

        Raises:
            ResourceError: the disk is full, or the run is over and its directory gone.
        """
        if self._written is not None:
            self._written.result()

    def forget(self, block: int) -> None:
        """Remove what lies in front of a block that is done."""
        for path in self._directory.glob(f"{block}.*"):
            with suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Leave the files to others."""
        self._writer.shutdown()

    def _file(self, block: int, start: int) -> Path:
        return self._directory / f"{block}.{start}"


def _checksum(states: Tensor) -> bytes:
    """Return the sum of the words of float32 states: against accidents, in a tenth of the time of a CRC."""
    words = states.reshape(-1).view(torch.int32 if states.numel() % 2 else torch.int64)
    total = int(words.sum(dtype=torch.int64))
    return (total % (1 << 8 * SUM_BYTES)).to_bytes(SUM_BYTES, "big")
