"""Records of an importance matrix in the older form, read in order."""

from __future__ import annotations

import os
import struct
from io import BufferedReader
from pathlib import Path

from quantforge.checkpoint.files import changed
from quantforge.errors import InputError

MAX_ENTRIES, MAX_TEXT = 1 << 18, 1 << 16
HINT = "write it again with llama-imatrix, or with --imatrix and a new name"


class Records:
    """The records of the older form, read in order; every length is compared with the bytes that are left."""

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self._path, self._file = path, file
        self.left = os.fstat(file.fileno()).st_size

    def take(self, count: int) -> bytes:
        """Read the next bytes."""
        self._pass(count)
        data = self._file.read(count)
        if len(data) != count:
            raise changed(self._path)
        return data

    def skip(self, count: int) -> None:
        """Pass over bytes."""
        self._pass(count)
        self._file.seek(count, os.SEEK_CUR)

    def _pass(self, count: int) -> None:
        if not 0 <= count <= self.left:
            raise InputError(
                f"{self._path}: {count} bytes expected, {self.left} left: truncated?",
                HINT,
                file=str(self._path),
            )
        self.left -= count

    def number(self) -> int:
        """Read a 32-bit integer."""
        return int(struct.unpack("<i", self.take(4))[0])

    def entries(self) -> int:
        """Read the number of entries, with which a file begins."""
        found = self.number()
        if not 0 < found <= MAX_ENTRIES:
            raise InputError(
                f"{self._path}: no importance matrix: it begins as neither form of one does",
                HINT,
                file=str(self._path),
            )
        return found

    def end(self) -> None:
        """Refuse bytes after the last record."""
        if self.left:
            raise InputError(
                f"{self._path}: {self.left} bytes after the last record", HINT, file=str(self._path)
            )

    def word(self) -> str:
        """Read a length and a text."""
        length = self.number()
        if length > MAX_TEXT:
            raise InputError(f"{self._path}: a name of {length} bytes", HINT, file=str(self._path))
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self._path}: a name that is no text", HINT, file=str(self._path)
            ) from error
