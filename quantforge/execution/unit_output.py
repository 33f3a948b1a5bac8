"""Output of a unit of work: writes stored tensors to the weight files, reads them back, and records their checksums."""

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

COPY_STRIP_BYTES = 1 << 25  # size of strips when tensors are only copied or checked


class UnitOutput:
    """Writer of the stored tensors of the current unit.

    Attributes:
        storage: how the format stores the tensors of a plan.
        sums: checksums of the tensors written by the current unit, by stored name.
    """

    def __init__(self, storage: Storage, writer: WeightsWriter) -> None:
        self.storage = storage
        self.sums: dict[str, int] = {}
        self._writer = writer

    def begin_unit(self) -> None:
        """Begin a new unit with an empty set of checksums."""
        self.sums = {}

    @contextmanager
    def nested_unit(self) -> Iterator[None]:
        """Begin a unit nested in the current one; the outer unit continues when the context ends."""
        outer_sums, self.sums = self.sums, {}
        try:
            yield
        finally:
            self.sums = outer_sums

    def finish(self) -> dict[str, int]:
        """Flush the tensors of the unit to disk; return their checksums."""
        self._writer.sync()
        return self.sums

    def write(self, name: str, value: Tensor) -> None:
        """Write a stored tensor."""
        self.sums[name] = checksum(value, 0)
        self._writer.write(name, value)

    def rewrite(self, name: str, value: Tensor) -> None:
        """Overwrite a stored tensor that an earlier unit has written."""
        self.sums[name] = checksum(value, 0)
        self._writer.rewrite(name, value)

    def write_rows(self, name: str, first: int, value: Tensor) -> None:
        """Write the next rows of a stored tensor, starting at row ``first``."""
        self.sums[name] = checksum(value, self.sums.get(name, 0))
        self._writer.write_rows(name, first, value)

    def write_unquantized(self, tensor: TensorPlan, value: Tensor) -> None:
        """Write an unquantized tensor; with several outputs, its last dimension is distributed over them in turn."""
        for position, output in enumerate(tensor.outputs):
            count = len(tensor.outputs)
            output_value = value[..., position::count] if count > 1 else value
            self.write(output.name, self._to_stored(tensor, output_value))

    def write_unquantized_rows(
        self, tensor: TensorPlan, read_rows: Callable[[int, int], Tensor]
    ) -> None:
        """Write an unquantized tensor strip by strip; ``read_rows(first, last)`` returns rows ``first:last``."""
        (output,) = tensor.outputs
        for first, last in copy_strips(output):
            self.write_rows(output.name, first, self._to_stored(tensor, read_rows(first, last)))

    def _to_stored(self, tensor: TensorPlan, value: Tensor) -> Tensor:
        """Convert an unquantized tensor to its stored form; computed values are float32 whatever the tensor's type."""
        return self.storage.convert_unquantized(tensor, value.to(torch_dtype(tensor.dtype)))

    def read(self, tensor: TensorPlan) -> dict[str, Tensor]:
        """Read back the stored tensors of a planned tensor, by stored name."""
        return {item.name: read_tensor(self._writer.entry(item.name)) for item in tensor.outputs}

    def copy(self, name: str, source: TensorEntry) -> None:
        """Copy a stored tensor from a file that another process wrote, strip by strip."""
        if not source.shape:
            self.write(name, read_tensor(source))
            return
        for first, last in copy_strips(source.to_stored_tensor()):
            self.write_rows(name, first, read_rows(source, first, last))

    def entry(self, name: str) -> StoredTensor:
        """Return the header of a stored tensor."""
        return self._writer.entry(name).to_stored_tensor()

    def check(self, name: str, expected: int, hint: str) -> None:
        """Verify the checksum of a stored tensor that an interrupted run wrote.

        Raises:
            IntegrityError: the checksums differ; ``hint`` says what to do.
        """
        entry = self._writer.entry(name)
        actual = 0
        for first, last in copy_strips(entry.to_stored_tensor()):
            value = read_rows(entry, first, last) if entry.shape else read_tensor(entry)
            actual = checksum(value, actual)
        if actual != expected:
            raise IntegrityError(
                f"{entry.file}: {name} is not what the interrupted run had written",
                hint,
                file=str(entry.file),
                tensor=name,
            )


def copy_strips(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield strips of rows of about `COPY_STRIP_BYTES` as ``(first, last)``; a scalar is one strip."""
    rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, COPY_STRIP_BYTES * rows // max(1, tensor.nbytes))
    for first in range(0, max(rows, 1), step):
        yield first, min(first + step, rows)


def checksum(value: Tensor, before: int) -> int:
    """Return the CRC-32 of the bytes of a tensor, continued from ``before``; detects accidents, not tampering."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data, before)
