"""System calls that differ between Linux and macOS, with those of macOS replaced by fakes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantforge_files import system


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", system.CREATE_FLAGS)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("reserved", [True, False])
def test_allocate_and_read_into_work_without_fallocate(
    file: int, reserved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reserved:
        monkeypatch.delattr(os, "posix_fallocate")
    system.allocate(file, 10)
    assert os.fstat(file).st_size == 10
    system.allocate(file, 5)
    assert os.fstat(file).st_size == 10
    os.pwrite(file, b"firstlater", 0)
    data = bytearray(6)
    assert system.read_into(file, memoryview(data), 4)
    assert bytes(data) == b"tlater"
    assert not system.read_into(file, memoryview(data), 5)


def test_symbolic_links_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    for flags in (system.READ_FLAGS, system.EXISTING_FLAGS | os.O_WRONLY):
        os.close(system.open_nofollow(tmp_path / "file", flags))
        with pytest.raises(OSError, match="symbolic") as raised:
            system.open_nofollow(tmp_path / "link", flags)
        assert raised.value.errno == errno.ELOOP
    with pytest.raises(FileExistsError):
        system.open_nofollow(tmp_path / "link", system.CREATE_FLAGS)


def test_sync_file_uses_fullfsync_where_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def refused(_descriptor: int, _command: int) -> None:
        raise OSError(errno.ENOTSUP, "a network file system")

    monkeypatch.setattr(os, "fsync", lambda _: calls.append("system"))
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    for call, expected in (((lambda *_: calls.append("drive")), ["drive"]), (refused, ["system"])):
        calls.clear()
        monkeypatch.setattr(fcntl, "fcntl", call)
        system.sync_file(0)
        assert calls == expected


def test_peak_memory_is_in_bytes_on_linux_and_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = system.peak_memory()
    assert 1 << 24 < peak < 1 << 40
    usage = SimpleNamespace(ru_maxrss=peak >> 10)
    monkeypatch.setattr(system.resource, "getrusage", lambda _: usage)
    assert system.peak_memory() == peak >> 10 << 10
    monkeypatch.setattr(sys, "platform", "darwin")
    assert system.peak_memory() == peak >> 10


def test_swap_paths_uses_the_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    system.swap_paths(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a/b").exists()
    seen: list[tuple[object, ...]] = []
    mac = SimpleNamespace(renamex_np=lambda *arguments: seen.append(arguments) or 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: mac)
    system.swap_paths(tmp_path / "a", tmp_path / "b")
    assert seen == [(bytes(tmp_path / "a"), bytes(tmp_path / "b"), 2)]
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        system.swap_paths(tmp_path / "a", tmp_path / "b")


def test_the_cache_directory_follows_system_conventions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/me")
    for cache, platform, expected in (
        ("/c", "linux", "/c/quantforge"),
        ("", "linux", "/me/.cache/quantforge"),
        ("", "darwin", "/me/Library/Caches/quantforge"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        monkeypatch.setattr(sys, "platform", platform)
        assert system.user_cache_directory() == Path(expected)
