"""Reader of a header in order: every length and every count is first compared with the bytes that are left."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from quantforge.checkpoint.files import changed
from quantforge.errors import InputError
from quantforge_files.roles import GGUF_HEADER

MAX_HEADER_BYTES, MAX_VALUES = GGUF_HEADER.limit, GGUF_HEADER.values
_CHUNK = 1 << 20
HINT = "the file is damaged or not GGUF: fetch or export it again"


class Scan:
    """The bytes of a header, read in order, never beyond the end of the file."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self._path, self._descriptor, self._size = path, descriptor, size
        self._buffer, self._start = b"", 0
        self.position = 0
        self.values = 0  # of all arrays so far

    @property
    def left(self) -> int:
        """Return the number of bytes up to the end of the file."""
        return self._size - self.position

    def error(self, what: str, tensor: str | None = None) -> InputError:
        """Return the error for something at this place."""
        return InputError(
            f"{self._path}: {what} (at byte {self.position})",
            HINT,
            file=str(self._path),
            tensor=tensor,
        )

    def take(self, count: int) -> bytes:
        """Read the next bytes."""
        if count > self.left or self.position + count > MAX_HEADER_BYTES:
            raise self.error(f"{count} bytes expected, {self.left} left: truncated?")
        offset = self.position - self._start
        if offset + count > len(self._buffer):
            self._start, offset = self.position, 0
            self._buffer = self._pread(max(count, min(_CHUNK, self.left)))
        self.position += count
        return self._buffer[offset : offset + count]

    def _pread(self, count: int) -> bytes:
        parts, done = [], 0
        while done < count:
            part = os.pread(self._descriptor, count - done, self._start + done)
            if not part:
                raise changed(self._path)
            parts.append(part)
            done += len(part)
        return b"".join(parts)

    def number(self, code: str) -> int:
        """Read one integer."""
        value: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return value

    def string(self, what: str, limit: int | None = None) -> bytes:
        """Read a length and so many bytes."""
        length = self.number("<Q")
        if length > self.left or (limit is not None and length > limit):
            raise self.error(
                f"{what}: a string of {length} bytes, {min(self.left, limit or self.left)} possible"
            )
        return self.take(length)

    def check_array(self, count: int, least: int, what: str) -> None:
        """Refuse an array that is longer than the file, or than all arrays of a file together may be."""
        if count > min(MAX_VALUES - self.values, self.left // least):
            raise self.error(f"{what}: an array of {count} values in {self.left} bytes")
        self.values += count

    def check_count(self, count: int, least: int, limit: int, what: str) -> None:
        """Refuse a number of things that cannot be in the file."""
        if not 0 <= count <= min(limit, self.left // least):
            raise self.error(f"{count} {what} in {self.left} bytes")
