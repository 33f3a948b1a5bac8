"""On-disk cache of compiled programs, shared by processes.

The folder is ``QUANTFORGE_CACHE`` (empty: no cache), else ``quantforge/programs`` in the user's cache directory. Its
files are executable code, so they are used only if nobody else could have written them: the folder and the files belong
to this user, others may not write them, and no symbolic link leads to them. A file begins with a digest of its name and
contents; a file that is damaged, truncated or belongs to another user is ignored. Files are written under a temporary
name and renamed; above `MAX_BYTES` in total, the least recently used ones are deleted. If the folder does not exist or
cannot be written, programs are compiled each time: nothing here raises.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CACHE_VARIABLE = "QUANTFORGE_CACHE"
MAX_BYTES, MAX_FILES = 64 << 20, 4096
MAX_PROGRAM_BYTES = 4 << 20  # bytes of one program; they have some thousand
BEFORE_COMPILE_CALLBACKS: list[
    Callable[[], object]
] = []  # each called once, before a program is compiled
_SUFFIX = ".program"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path | None:
    """Return the folder of compiled programs, or None if they are not kept."""
    if CACHE_VARIABLE in os.environ:
        return Path(os.environ[CACHE_VARIABLE]).absolute() if os.environ[CACHE_VARIABLE] else None
    caches = os.environ.get("XDG_CACHE_HOME") or ""
    home_cache = os.path.expanduser("~/.cache")  # noqa: PTH111 - of Path it raises where there is no home
    cache_home = Path(caches if Path(caches).is_absolute() else home_cache)
    return cache_home / "quantforge" / "programs" if cache_home.is_absolute() else None


def load_program(key: str) -> bytes | None:
    """Return the cached program with a key (hexadecimal), or None."""
    with suppress(OSError), _open_folder(make=False) as folder_fd:
        if folder_fd is None:
            return None
        file_fd = os.open(
            key + _SUFFIX, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd
        )
        with os.fdopen(file_fd, "rb") as file:
            if not _is_private(os.fstat(file_fd), stat.S_ISREG):
                return None
            digest, code = file.read(32), file.read(MAX_PROGRAM_BYTES)
        if digest == _digest(key, code):
            with suppress(OSError):
                os.utime(key + _SUFFIX, dir_fd=folder_fd)
            return code
    return None


def save_program(key: str, code: bytes) -> None:
    """Save a program under a key if possible."""
    if len(code) > MAX_PROGRAM_BYTES:
        return
    with suppress(OSError), _open_folder(make=True) as folder_fd:
        if folder_fd is None:
            return
        name = f".{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        file_fd = os.open(name, flags, 0o600, dir_fd=folder_fd)
        try:
            with os.fdopen(file_fd, "wb") as file:
                file.write(_digest(key, code) + code)
            os.replace(name, key + _SUFFIX, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder_fd)
            raise
        _evict_oldest(folder_fd)


@contextmanager
def _open_folder(make: bool) -> Iterator[int | None]:
    """Open the folder and yield its descriptor, or None if it is not private to this user."""
    path = cache_folder()
    if path is None:
        yield None
        return
    if make:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield folder_fd if _is_private(os.fstat(folder_fd), stat.S_ISDIR) else None
    finally:
        os.close(folder_fd)


def _is_private(file_stat: os.stat_result, kind: Callable[[int], bool]) -> bool:
    """Return whether a file is of the expected kind, belongs to this user, and is not writable by others."""
    return (
        kind(file_stat.st_mode)
        and file_stat.st_uid == os.geteuid()
        and not file_stat.st_mode & _WRITABLE_BY_OTHERS
    )


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + code).digest()


def _evict_oldest(folder_fd: int) -> None:
    """Delete the least recently used files until the limits hold; leftovers of killed processes count too."""
    with os.scandir(folder_fd) as entries:
        files = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    total, count = sum(file_stat.st_size for _, file_stat in files), len(files)
    for name, file_stat in sorted(files, key=lambda file: file[1].st_mtime):
        if total <= MAX_BYTES and count <= MAX_FILES:
            return
        with suppress(OSError):
            os.unlink(name, dir_fd=folder_fd)
        total, count = total - file_stat.st_size, count - 1
