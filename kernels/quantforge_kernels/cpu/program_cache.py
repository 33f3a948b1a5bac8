"""Compiled programs on disk: what one process compiled the next one loads.

The folder is ``QUANTFORGE_CACHE`` (empty: nothing is kept), else ``quantforge/programs`` where this user's
caches are. What lies there is run, so it is used only while nobody else could have written it: a folder and
files of this user, that others may not write, reached through no link. A file begins with a digest of its
name and its contents; one that is damaged, cut short or another's is as good as none. Files appear whole, by
renaming; once `MOST_BYTES` lie there, those that were not used for longest go. Where there is no such folder,
or it cannot be written, programs are compiled: nothing here fails.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "QUANTFORGE_CACHE"
MOST_BYTES, MOST_FILES = 64 << 20, 4096
LONGEST = 4 << 20  # bytes of one program; they have some thousand
LISTENERS: list[Callable[[], object]] = []  # each called once, before a program is compiled
_SUFFIX = ".program"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def folder() -> Path | None:
    """Return the folder where programs are kept; None where they are not."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE]).absolute() if os.environ[VARIABLE] else None
    caches = os.environ.get("XDG_CACHE_HOME") or ""
    own = os.path.expanduser("~/.cache")  # noqa: PTH111 - of Path it raises where there is no home
    home = Path(caches if Path(caches).is_absolute() else own)
    return home / "quantforge" / "programs" if home.is_absolute() else None


def find(key: str) -> bytes | None:
    """Return the program that was kept under a key (hexadecimal), or None."""
    with suppress(OSError), _opened(make=False) as place:
        if place is None:
            return None
        handle = os.open(key + _SUFFIX, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
        with os.fdopen(handle, "rb") as file:
            if not _ours(os.fstat(handle), stat.S_ISREG):
                return None
            digest, code = file.read(32), file.read(LONGEST)
        if digest == _digest(key, code):
            with suppress(OSError):
                os.utime(key + _SUFFIX, dir_fd=place)
            return code
    return None


def keep(key: str, code: bytes) -> None:
    """Keep a program under a key, if that is possible."""
    if len(code) > LONGEST:
        return
    with suppress(OSError), _opened(make=True) as place:
        if place is None:
            return
        name = f".{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        handle = os.open(name, flags, 0o600, dir_fd=place)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(key, code) + code)
            os.replace(name, key + _SUFFIX, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=place)
            raise
        _limit(place)


@contextmanager
def _opened(make: bool) -> Iterator[int | None]:
    """Open the folder, as long as it is this user's alone; yield None where it is not."""
    path = folder()
    if path is None:
        yield None
        return
    if make:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield place if _ours(os.fstat(place), stat.S_ISDIR) else None
    finally:
        os.close(place)


def _ours(found: os.stat_result, kind: Callable[[int], bool]) -> bool:
    """Return whether a file is of some kind, belongs to this user, and nobody else may write it."""
    return kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + code).digest()


def _limit(place: int) -> None:
    """Remove what was not used for longest until the limits hold; what a killed process left counts too."""
    with os.scandir(place) as entries:
        files = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    total, count = sum(found.st_size for _, found in files), len(files)
    for name, found in sorted(files, key=lambda file: file[1].st_mtime):
        if total <= MOST_BYTES and count <= MOST_FILES:
            return
        with suppress(OSError):
            os.unlink(name, dir_fd=place)
        total, count = total - found.st_size, count - 1
