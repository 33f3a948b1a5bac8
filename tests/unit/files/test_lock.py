"""Locks are safe when processes start, end or are interrupted at the same time."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from quantforge.errors import BusyError, RefusedError
from quantforge.files import lock as lock_module
from quantforge.files.disk import open_existing
from quantforge.files.lock import LOCK_FILE, Lock
from quantforge_files import system


def contend(directory: Path, end: float, results: Any) -> None:
    outcomes: Counter[str] = Counter()
    while time.monotonic() < end:
        lock = Lock(directory)
        try:
            lock.acquire()
            lock.release()
            outcomes["taken"] += 1
        except BusyError:
            outcomes["busy"] += 1
        except Exception as error:
            outcomes[repr(error)] += 1
    results.put(outcomes)


def test_concurrent_processes_take_the_lock_in_turns(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results, end = context.Queue(), time.monotonic() + 1.5
    workers = [
        context.Process(target=contend, args=(tmp_path / ".out.qf", end, results)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    outcomes = sum((results.get() for _ in workers), Counter[str]())
    for worker in workers:
        worker.join()
    assert outcomes["taken"] > 10
    assert outcomes.keys() <= {"taken", "busy"}


@pytest.mark.parametrize("moment", range(12))
def test_a_signal_during_release_leaves_no_lock_file(tmp_path: Path, moment: int) -> None:
    """The signal arrives before each line of the functions that remove the file."""
    lock, lines = Lock(tmp_path / ".out.qf"), count()
    lock.acquire()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        inside = frame.f_code.co_name in {"_remove", "_is_held", "_names"}
        if inside and event == "line" and next(lines) == moment:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        lock.release()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    assert not [*tmp_path.iterdir()]
    assert lock.descriptor == -1


def test_a_lock_created_during_listing_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ".out.qf"
    first = Lock(directory)
    first.acquire()
    (directory / "journal").mkdir()
    seen = iter([{"journal"}])
    names = Lock._names
    monkeypatch.setattr(Lock, "_names", lambda lock: next(seen, None) or names(lock))
    with pytest.raises(BusyError):
        Lock(directory).acquire()
    (directory / LOCK_FILE).unlink()
    with pytest.raises(RefusedError, match="holds files and no lock"):
        Lock(directory).acquire()


def test_a_file_deleted_while_being_opened_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "lock", system.open_nofollow
    path.touch()

    def opening(*arguments: Any) -> int:
        descriptor = opened(*arguments)
        path.unlink()
        return descriptor

    monkeypatch.setattr(system, "open_nofollow", opening)
    with pytest.raises(FileNotFoundError):
        open_existing(path)


def test_a_signal_before_lock_creation_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Path) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(lock_module, "create_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Lock(tmp_path / ".out.qf").acquire()
    assert not list(tmp_path.iterdir())
