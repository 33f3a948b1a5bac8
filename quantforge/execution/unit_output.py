"""Output of a unit of work: stored tensors on their way into weight files and back, with checksums for the journal."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from quantforge.errors import IntegrityError
from quantforge.files.safetensors import TensorEntry, read_rows, read_tensor, torch_dtype
from quantforge.files.writer import WeightsWriter
from quantforge.formats.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from quantforge.plans import StoredTensor, TensorPlan

COPY_BYTES = 1 << 25  # of the strips in which tensors are only copied or checked


class UnitOutput:
    """Tensors that the current unit writes.

    Attributes:
        storage: how the format stores the tensors of a plan.
        sums: checksums of what the current unit has written, by the name of the stored tensor.
    """

    def __init__(self, storage: Storage, writer: WeightsWriter) -> None:
        self.storage = storage
        self.sums: dict[str, int] = {}
        self._writer = writer

    def begin(self) -> None:
        """Begin a unit."""
        self.sums = {}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Begin another unit inside of the current one, which goes on afterwards."""
        before, self.sums = self.sums, {}
        try:
            yield
        finally:
            self.sums = before

    def finish(self) -> dict[str, int]:
        """Make what the unit has written durable, and return its checksums."""
        self._writer.sync()
        return self.sums

    def write(self, name: str, value: Tensor) -> None:
        """Write a stored tensor."""
        self.sums[name] = checksum(value, 0)
        self._writer.write(name, value)

    def rewrite(self, name: str, value: Tensor) -> None:
        """Write a stored tensor over what an earlier unit has written of it."""
        self.sums[name] = checksum(value, 0)
        self._writer.rewrite(name, value)

    def write_rows(self, name: str, first: int, value: Tensor) -> None:
        """Write the next rows of a stored tensor, which begin with row ``first``."""
        self.sums[name] = checksum(value, self.sums.get(name, 0))
        self._writer.write_rows(name, first, value)

    def write_kept(self, tensor: TensorPlan, value: Tensor) -> None:
        """Write a tensor that is kept; each stored one, where its last dimension alternates between several."""
        for position, output in enumerate(tensor.outputs):
            count = len(tensor.outputs)
            mine = value[..., position::count] if count > 1 else value
            self.write(output.name, self._as_written(tensor, mine))

    def write_kept_rows(self, tensor: TensorPlan, read: Callable[[int, int], Tensor]) -> None:
        """Write a tensor that is kept, strip by strip; ``read`` takes the first row and the one after the last."""
        (output,) = tensor.outputs
        for first, last in runs(output):
            self.write_rows(output.name, first, self._as_written(tensor, read(first, last)))

    def _as_written(self, tensor: TensorPlan, value: Tensor) -> Tensor:
        """Return what is stored of a kept tensor; computed values are float32, whatever type their tensor has."""
        return self.storage.convert_unquantized(tensor, value.to(torch_dtype(tensor.dtype)))

    def read(self, tensor: TensorPlan) -> dict[str, Tensor]:
        """Read back what was written for a tensor, by the names of the stored tensors."""
        return {item.name: read_tensor(self._writer.entry(item.name)) for item in tensor.outputs}

    def copy(self, name: str, source: TensorEntry) -> None:
        """Write a stored tensor that another process has written, strip by strip."""
        if not source.shape:
            self.write(name, read_tensor(source))
            return
        for first, last in runs(source.header()):
            self.write_rows(name, first, read_rows(source, first, last))

    def entry(self, name: str) -> StoredTensor:
        """Return a stored tensor by its name."""
        return self._writer.entry(name).header()

    def check(self, name: str, expected: int, hint: str) -> None:
        """Compare a stored tensor that an interrupted run has written with its checksum.

        Raises:
            IntegrityError: they differ; ``hint`` says what to do.
        """
        entry = self._writer.entry(name)
        found = 0
        for first, last in runs(entry.header()):
            value = read_rows(entry, first, last) if entry.shape else read_tensor(entry)
            found = checksum(value, found)
        if found != expected:
            raise IntegrityError(
                f"{entry.file}: {name} is not what the interrupted run had written",
                hint,
                file=str(entry.file),
                tensor=name,
            )


def runs(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield strips of rows of about `COPY_BYTES` as ``(first, last)``; a scalar is one strip."""
    rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, COPY_BYTES * rows // max(1, tensor.nbytes))
    for first in range(0, max(rows, 1), step):
        yield first, min(first + step, rows)


def checksum(value: Tensor, before: int) -> int:
    """Return the CRC-32 of the bytes of a tensor, continued from ``before``: against accidents, not attackers."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data, before)
