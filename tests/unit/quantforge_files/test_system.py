"""What other systems do not offer: with the calls taken away here, what stands in for them does the same."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantforge.checkpoint.lock import Lock
from quantforge.errors import BusyError
from quantforge_files import system
from tests.other_systems import NON_BLOCKING, locking
from tests.runs import command, tree

ROOT = Path(__file__).parents[3]
CALLS = ("pread", "preadv", "pwrite", "posix_fallocate")


def windows(name: str) -> object | None:
    return SimpleNamespace(locking=locking, LK_NBLCK=NON_BLOCKING) if name == "msvcrt" else None


@pytest.fixture(params=["with the calls", "without"])
def file(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[int]:
    if request.param == "without":
        for name in CALLS:
            monkeypatch.delattr(os, name)
    descriptor = os.open(tmp_path / "file", system.NEW)
    yield descriptor
    os.close(descriptor)


def test_places_of_a_file_are_written_and_read(file: int) -> None:
    system.allocate(file, 0, 10)
    assert os.fstat(file).st_size == 10
    system.allocate(file, 0, 5)
    assert os.fstat(file).st_size == 10
    assert system.write_at(file, b"later", 5) == 5
    assert system.write_at(file, memoryview(b"first"), 0) == 5
    assert system.read_at(file, 6, 4) == b"tlater"
    assert system.read_at(file, 6, 10) == b""
    data = bytearray(20)
    assert system.read_into(file, memoryview(data), 3) == 7
    assert bytes(data[:8]) == b"stlater\0"
    assert system.read_into(file, memoryview(data), 10) == 0
    system.sync(file)


def test_a_link_is_not_opened_where_the_system_has_no_flag_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    for flags in (system.UNLINKED, 0):
        monkeypatch.setattr(system, "UNLINKED", flags)
        os.close(system.open_unlinked(tmp_path / "file", os.O_RDONLY | flags))
        with pytest.raises(OSError, match="symbolic") as raised:
            system.open_unlinked(tmp_path / "link", os.O_RDONLY | flags)
        assert raised.value.errno == errno.ELOOP
        with pytest.raises(FileExistsError):
            system.open_unlinked(tmp_path / "link", system.NEW)


def test_a_drive_is_told_to_write_where_it_can_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def control(_descriptor: int, _command: int) -> None:
        told.append("drive")

    def refused(_descriptor: int, _command: int) -> None:
        raise OSError(errno.ENOTSUP, "a file system of a network")

    monkeypatch.setattr(os, "fsync", lambda _: told.append("system"))
    for call, expected in ((control, ["drive"]), (refused, ["system"])):
        told.clear()
        monkeypatch.setattr(
            system, "module", lambda _, call=call: SimpleNamespace(F_FULLFSYNC=51, fcntl=call)
        )
        system.sync(0)
        assert told == expected


@pytest.mark.parametrize("modules", [system.module, windows])
def test_a_lock_is_one_process_at_a_time(
    modules: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "module", modules)
    monkeypatch.setattr(system, "removes_open_files", lambda: modules is not windows)
    place = tmp_path / ".out.qf"
    first, second = Lock(place), Lock(place)
    first.take()
    with pytest.raises(BusyError, match=f"process {os.getpid()} "):
        second.take()
    first.release()
    assert not place.exists()
    second.take()
    second.release()
    assert not place.exists()


def test_a_system_without_locks_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "module", lambda _: None)
    with pytest.raises(OSError, match="no locks") as raised:
        Lock(tmp_path / ".out.qf").take()
    assert raised.value.errno == errno.ENOSYS
    assert system.peak_bytes() is None
    lacks = system.lacks()
    assert any(what.startswith("locks") for what in lacks)
    assert "the peak of memory" in lacks


def test_the_peak_of_memory_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    there = system.peak_bytes()
    assert there is not None
    assert 1 << 24 < there < 1 << 40
    mark = there >> 10
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=mark))
    monkeypatch.setattr(system, "module", lambda _: usage)
    assert system.peak_bytes() == mark << 10
    monkeypatch.setattr(sys, "platform", "darwin")
    assert system.peak_bytes() == mark


def test_swaps_are_those_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    system.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a/b").exists()
    seen: list[tuple[object, ...]] = []

    def of_mac(name: str) -> object | None:
        return (lambda *given: seen.append(given) or 0) if name == "renamex_np" else None

    monkeypatch.setattr(system, "_c_function", of_mac)
    system.exchange(tmp_path / "a", tmp_path / "b")
    assert seen == [(bytes(tmp_path / "a"), bytes(tmp_path / "b"), 2)]
    assert not any("swap" in what for what in system.lacks())
    monkeypatch.setattr(system, "_c_function", lambda _: None)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        system.exchange(tmp_path / "a", tmp_path / "b")
    assert any("swap" in what for what in system.lacks())


def test_this_system_lacks_nothing() -> None:
    assert system.lacks() == []


OTHER = f"""
import os, signal, sys, types
import torch, transformers.modeling_utils, tokenizers, huggingface_hub, typer  # which branch by the system's name
sys.path[:0] = {[str(ROOT), str(ROOT / "kernels"), str(ROOT / "calibration")]!r}
from tests.other_systems import NON_BLOCKING, locking
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=NON_BLOCKING)
sys.modules["fcntl"] = sys.modules["resource"] = None
for name in ("pread", "preadv", "pwrite", "posix_fallocate", "memfd_create", "geteuid", "O_NOFOLLOW", "O_NONBLOCK",
             "O_CLOEXEC", "O_DIRECTORY", "sched_getaffinity"):
    delattr(os, name)
for name in ("SIGHUP", "SIGPIPE", "SIGVTALRM", "setitimer"):
    delattr(signal, name)
from quantforge.cli.app import main
main()
"""


@pytest.mark.thorough
def test_a_system_with_nothing_of_these_writes_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def options(out: str) -> list[str]:
        model = str(ROOT / "models/demo")
        words = ["quantize", model, "--method", "rtn", "--bits", "8", "--scales", "absmax"]
        return [*words, "-o", str(tmp_path / out)]

    elsewhere = subprocess.run(
        [sys.executable, "-c", OTHER, *options("elsewhere")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert command(capsys, *options("here")).code == 0
    assert tree(tmp_path / "elsewhere") == tree(tmp_path / "here")
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "here"}
