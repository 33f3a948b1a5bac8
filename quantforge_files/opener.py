"""Open files that others made, and check that they are regular, inside the model, unchanged and not too large.

A model directory is untrusted input. A link in it could publish a private file as part of the result, a FIFO would hang
the run, an endless device would fill the memory, and a file that is replaced while it is read would give tensors of two
models. Four rules:

* a file of a model may be a link only into the model directory itself or, for a snapshot of the hub
  cache (``models--org--name/snapshots/<revision>/``), into the ``blobs/`` of the same repository;
  a path that a person names may be a link to anywhere;
* the target must be a regular file, checked on the open descriptor;
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
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identity of a file's content, known without reading it: device, inode, size and modification time."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> Stamp:
        """Return the stamp of an open file."""
        status = os.fstat(descriptor)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Opener:
    """Opens files for one package; ``error`` creates its exception from a message, a hint and the file's name.

    The argument ``inside`` of the methods is the model directory that a file is part of, which links must not leave;
    None for a path that a person named.
    """

    error: Callable[[str, str, str, str], Exception]

    def check(self, path: Path, role: FileRole, inside: Path | None) -> None:
        """Refuse a file that `read` would refuse, without reading it; errors as `open_checked`."""
        with self.open_checked(path, role, inside):
            pass

    @contextmanager
    def open_checked(self, path: Path, role: FileRole, inside: Path | None) -> Iterator[int]:
        """Open a file for reading, and yield the descriptor.

        Raises:
            error: missing, a loop of links, a link out of the model, not a regular file, or larger than its role
                allows.
        """
        real_path = self._resolve(path, inside)
        try:
            self._check_regular(path, real_path.stat())  # to open a device may do something
            descriptor = system.open_nofollow(real_path, system.READ_FLAGS)
        except OSError as error:
            raise self._unreadable_error(path, error) from error
        try:
            status = os.fstat(descriptor)
            self._check_regular(path, status)
            self._check_size(path, role, status.st_size)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def stream(self, path: Path, role: FileRole, inside: Path | None) -> Iterator[BufferedReader]:
        """Open a file as a buffered file that is read in parts; errors as `open_checked`."""
        with self.open_checked(path, role, inside) as descriptor:
            try:
                with open(descriptor, "rb", closefd=False) as file:
                    yield file
            except OSError as error:
                raise self._unreadable_error(path, error) from error

    def read(self, path: Path, role: FileRole, inside: Path | None) -> bytes:
        """Read a whole file.

        Raises:
            error: as `open_checked`, or it grew beyond what its role allows.
        """
        assert role.max_bytes < NO_LIMIT
        data = self.read_start(path, role, role.max_bytes + 1, inside)
        self._check_size(path, role, len(data))
        return data

    def text(self, path: Path, role: FileRole, inside: Path | None) -> str:
        """Read a whole text file.

        Raises:
            error: as `read`, or it is not UTF-8.
        """
        try:
            return self.read(path, role, inside).decode()
        except UnicodeDecodeError as error:
            raise self._error(
                path, f"not UTF-8 at byte {error.start}", "save it as UTF-8"
            ) from error

    def read_start(self, path: Path, role: FileRole, count: int, inside: Path | None) -> bytes:
        """Read the first ``count`` bytes of a file, or all if it is shorter; errors as `open_checked`."""
        with self.open_checked(path, role, inside) as descriptor:
            try:
                data = os.pread(descriptor, min(count, os.fstat(descriptor).st_size), 0)
                while len(data) < count and (
                    chunk := os.pread(descriptor, min(_READ_BYTES, count - len(data)), len(data))
                ):
                    data += chunk  # it has grown, or the system gives less at once
            except OSError as error:
                raise self._unreadable_error(path, error) from error
        return data

    def parse_object(
        self, data: bytes, path: Path | str, role: FileRole, *, loose: bool = False
    ) -> dict[str, Any]:
        """Parse a JSON document whose top level is an object; see `strict_json.parse`.

        ``path`` is the file (or a place in it) for messages.

        Raises:
            error: as `strict_json.parse` refuses, or it is not an object.
        """
        refuse = self._refuse(path)
        value = strict_json.parse(
            data, role.max_values, refuse, loose=loose, infinite=role.allow_infinity
        )
        if not isinstance(value, dict):
            refuse("not a JSON object", "it has to begin with {")
        document: dict[str, Any] = value
        return document

    def check_json(self, data: bytes, path: Path | str, role: FileRole) -> None:
        """Refuse JSON that is nested too deep or has too many values, before a library parses it."""
        strict_json.check(data, role.max_values, self._refuse(path))

    def list_names(self, directory: Path, inside: Path | None) -> list[str]:
        """Return the names in a directory, sorted.

        Raises:
            error: missing, not a directory, a link out of the model, unreadable, or with more than `MAX_NAMES` names.
        """
        try:
            with os.scandir(self._resolve(directory, inside)) as entries:
                names = [entry.name for entry in islice(entries, MAX_NAMES + 1)]
        except OSError as error:
            raise self._unreadable_error(directory, error) from error
        if len(names) > MAX_NAMES:
            raise self._too_many_error(directory)
        return sorted(names)

    def list_files_below(self, directory: Path) -> list[Path]:
        """Return every file below a directory, sorted; links to directories are not followed.

        Raises:
            error: there are more than `MAX_NAMES` files and directories.
        """
        files_below, num_seen = [], 0
        for directory_name, folders, files in os.walk(directory):
            num_seen += len(folders) + len(files)
            if num_seen > MAX_NAMES:
                raise self._too_many_error(directory)
            files_below += [
                path for name in files if (path := Path(directory_name, name)).is_file()
            ]
        return sorted(files_below)

    def _refuse(self, path: Path | str) -> Callable[..., NoReturn]:
        def refuse(
            what: str, hint: str = "the file is damaged: fetch or export it again"
        ) -> NoReturn:
            raise self._error(path, what, hint)

        return refuse

    def _resolve(self, path: Path, inside: Path | None) -> Path:
        try:
            real_path = Path(os.path.realpath(path, strict=True))
        except OSError as error:
            raise self._unreadable_error(path, error) from error
        except ValueError as error:  # a null in the name
            raise self.error(str(error), "check the path", ascii(str(path)), str(path)) from error
        if inside is None:
            return real_path
        if not any(real_path.is_relative_to(allowed) for allowed in _allowed_directories(inside)):
            raise self._error(
                path,
                f"is a link to {real_path}, outside of the model",
                "a model may link to its own files (or a hub snapshot to its blobs); copy the file",
            )
        return real_path

    def _check_regular(self, path: Path, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise self._error(path, "not a regular file", "give a file, no pipe or device")

    def _check_size(self, path: Path, role: FileRole, size: int) -> None:
        if size > role.max_bytes:
            raise self._error(
                path,
                f"{size} bytes, more than {role.max_bytes}",
                f"no {role.name} needs to be that large",
            )

    def _too_many_error(self, directory: Path) -> Exception:
        return self._error(
            directory,
            f"holds more than {MAX_NAMES} files",
            "give a directory that holds a model and nothing else",
        )

    def _error(self, path: Path | str, what: str, hint: str) -> Exception:
        """Return the error for a file or directory."""
        return self.error(what, hint, str(path), str(path))

    def _unreadable_error(self, path: Path, error: OSError) -> Exception:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        hint = "check the path" if is_missing else "check links and permissions"
        return self._error(path, str(error.strerror), hint)


def _allowed_directories(model_dir: Path) -> list[Path]:
    """Return the directories into which links of a model may lead."""
    root = Path(os.path.realpath(model_dir))
    return [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
