"""Opening files that somebody else made: regular, inside the model, no larger than their role allows, unchanged.

A model directory is untrusted input. A link in it could publish a private file as part of the
result, a FIFO would hang the run, an endless device would fill the memory, and a file that is
replaced while it is read would give tensors of two models. Four rules:

* a file of a model may be a link only into the model directory itself or, for a snapshot of the hub
  cache (``models--org--name/snapshots/<revision>/``), into the ``blobs/`` of the same repository;
  what a person names may be a link to anywhere;
* whatever the name leads to must be a regular file, checked on the open descriptor;
* it may have no more bytes than the limit of its role, and no more are read, even if it grows;
* device, inode, size and time of the open file make its `Stamp`; every later read compares it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from quantforge_files import strict_json, system
from quantforge_files.roles import NO_LIMIT, FileRole

MAX_NAMES = 100_000  # in a directory, or below it
_PART = 1 << 20


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identity of the content of an open file, known without reading it."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> Stamp:
        """Return the stamp of an open file."""
        found = os.fstat(descriptor)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Opener:
    """Opener of files for one package, with the exceptions of that package.

    ``error`` returns the exception for a detail, a hint, the subject that begins the message, and the file name.

    ``inside`` of every method is the model directory that a file is part of, which links must not leave; None for what
    a person named.
    """

    error: Callable[[str, str, str, str], Exception]

    def check(self, path: Path, role: FileRole, inside: Path | None) -> None:
        """Refuse, without reading it, a file that `read` would refuse; errors as `opened`."""
        with self.opened(path, role, inside):
            pass

    @contextmanager
    def opened(self, path: Path, role: FileRole, inside: Path | None) -> Iterator[int]:
        """Open a file for reading, and yield the descriptor.

        Raises:
            error: missing, a loop of links, a link out of the model, no regular file, or larger than its role allows.
        """
        real = self._resolved(path, inside)
        try:
            self._check_regular(path, real.stat())  # to open a device may do something
            descriptor = system.open_nofollow(real, system.READ)
        except OSError as error:
            raise self._unreadable(path, error) from error
        try:
            found = os.fstat(descriptor)
            self._check_regular(path, found)
            self._check_size(path, role, found.st_size)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def stream(self, path: Path, role: FileRole, inside: Path | None) -> Iterator[BufferedReader]:
        """Open a file that is read in parts, as a buffered file; errors as `opened`."""
        with self.opened(path, role, inside) as descriptor:
            try:
                with open(descriptor, "rb", closefd=False) as file:
                    yield file
            except OSError as error:
                raise self._unreadable(path, error) from error

    def read(self, path: Path, role: FileRole, inside: Path | None) -> bytes:
        """Read a file whole.

        Raises:
            error: as `opened`, or it grew beyond what its role allows.
        """
        assert role.limit < NO_LIMIT
        data = self.head(path, role, role.limit + 1, inside)
        self._check_size(path, role, len(data))
        return data

    def text(self, path: Path, role: FileRole, inside: Path | None) -> str:
        """Read a file of text whole.

        Raises:
            error: as `read`, or it is not UTF-8.
        """
        try:
            return self.read(path, role, inside).decode()
        except UnicodeDecodeError as error:
            raise self._error(
                path, f"not UTF-8 at byte {error.start}", "save it as UTF-8"
            ) from error

    def head(self, path: Path, role: FileRole, count: int, inside: Path | None) -> bytes:
        """Read the first ``count`` bytes of a file, or as many as it has; errors as `opened`."""
        with self.opened(path, role, inside) as descriptor:
            try:
                data = os.pread(descriptor, min(count, os.fstat(descriptor).st_size), 0)
                while len(data) < count and (
                    more := os.pread(descriptor, min(_PART, count - len(data)), len(data))
                ):
                    data += more  # it has grown, or the system gives less at once
            except OSError as error:
                raise self._unreadable(path, error) from error
        return data

    def parse_object(
        self, data: bytes, path: Path | str, role: FileRole, *, loose: bool = False
    ) -> dict[str, Any]:
        """Parse one JSON object, the whole content of ``path`` (or of a place in it); see `strict_json.parse`.

        Raises:
            error: as `strict_json.parse` refuses, or no object.
        """
        refuse = self._refuse(path)
        value = strict_json.parse(data, role.values, refuse, loose=loose, infinite=role.infinite)
        if not isinstance(value, dict):
            refuse("not a JSON object", "it has to begin with {")
        found: dict[str, Any] = value
        return found

    def check_json(self, data: bytes, path: Path | str, role: FileRole) -> None:
        """Refuse JSON that is too deep, or of too many values, before a library parses it."""
        strict_json.check(data, role.values, self._refuse(path))

    def listing(self, directory: Path, inside: Path | None) -> list[str]:
        """Return the names in a directory, sorted.

        Raises:
            error: missing, not a directory, a link out of the model, unreadable, or with more than `MAX_NAMES` names.
        """
        try:
            with os.scandir(self._resolved(directory, inside)) as entries:
                names = [entry.name for entry in islice(entries, MAX_NAMES + 1)]
        except OSError as error:
            raise self._unreadable(directory, error) from error
        if len(names) > MAX_NAMES:
            raise self._too_many(directory)
        return sorted(names)

    def below(self, directory: Path) -> list[Path]:
        """Return every file below a directory, sorted; links to directories are not followed.

        Raises:
            error: more than `MAX_NAMES` files and directories.
        """
        found, seen = [], 0
        for place, folders, files in os.walk(directory):
            seen += len(folders) + len(files)
            if seen > MAX_NAMES:
                raise self._too_many(directory)
            found += [path for name in files if (path := Path(place, name)).is_file()]
        return sorted(found)

    def _refuse(self, path: Path | str) -> Callable[..., NoReturn]:
        def refuse(
            what: str, hint: str = "the file is damaged: fetch or export it again"
        ) -> NoReturn:
            raise self._error(path, what, hint)

        return refuse

    def _resolved(self, path: Path, inside: Path | None) -> Path:
        try:
            real = Path(os.path.realpath(path, strict=True))
        except OSError as error:
            raise self._unreadable(path, error) from error
        except ValueError as error:  # a null in the name
            raise self.error(str(error), "check the path", ascii(str(path)), str(path)) from error
        if inside is None:
            return real
        if not any(real.is_relative_to(place) for place in _places(inside)):
            raise self._error(
                path,
                f"is a link to {real}, outside of the model",
                "a model may link to its own files (or a hub snapshot to its blobs); copy the file",
            )
        return real

    def _check_regular(self, path: Path, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise self._error(path, "not a regular file", "give a file, no pipe or device")

    def _check_size(self, path: Path, role: FileRole, size: int) -> None:
        if size > role.limit:
            raise self._error(
                path,
                f"{size} bytes, more than {role.limit}",
                f"no {role.name} needs to be that large",
            )

    def _too_many(self, directory: Path) -> Exception:
        return self._error(
            directory,
            f"holds more than {MAX_NAMES} files",
            "give a directory that holds a model and nothing else",
        )

    def _error(self, path: Path | str, what: str, hint: str) -> Exception:
        """Return the error for a file or directory."""
        return self.error(what, hint, str(path), str(path))

    def _unreadable(self, path: Path, error: OSError) -> Exception:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        hint = "check the path" if missing else "check links and permissions"
        return self._error(path, str(error.strerror), hint)


def _places(inside: Path) -> list[Path]:
    """Return the directories into which links of a model may lead."""
    home = Path(os.path.realpath(inside))
    return [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
