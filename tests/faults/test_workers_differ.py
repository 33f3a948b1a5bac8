"""Workers with different clocks, or with a full disk for one of them."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quantforge.api import release
from quantforge.execution import claims
from quantforge.execution.unit_output import UnitOutput
from quantforge.files import lock
from quantforge.settings import Settings
from tests.releases import TWO_VARIANTS
from tests.runs import file_digests, fork_child, leftovers, quantize, recipe, wait_for_exit_code
from tests.thorough import thorough_case

HOUR = 3600.0
Work = Callable[[Path, Settings], object]


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten heartbeats, so that claims are taken over and silent processes reported soon."""
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(claims, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(lock, "STALE_SECONDS", 2.0)


@pytest.fixture
def work(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Work:
    """The work that processes share: a result, as ranks of torchrun, or a release."""
    spec = tmp_path / "m-release.toml"
    spec.write_text(TWO_VARIANTS.format(model=model))

    def quantized(out: Path, settings: Settings) -> object:
        arguments = {name: getattr(settings, name) for name in ("join", "note")}
        return quantize(model, out, recipe("gptq", bits=4, lm_head="int8:row"), **arguments)

    if request.param == "quantize":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        return quantized
    return partial(release, spec)


def with_clock(seconds: float, work: Callable[[], object]) -> None:
    """Run work in this child process with a wrong clock."""
    now, utime = time.time, os.utime

    class Wrong(datetime):
        @classmethod
        def now(cls, zone: Any = None) -> Wrong:
            return cls.fromtimestamp(time.time(), zone or UTC)

    def set_time(path: Any, **arguments: Any) -> None:
        utime(path, (time.time(), time.time()), **arguments)

    time.time = lambda: now() + seconds
    lock.datetime = Wrong  # type: ignore[misc]
    os.utime = set_time  # type: ignore[assignment]
    work()


@pytest.mark.parametrize("work", ["quantize", thorough_case("release")], indirect=True)
def test_clocks_an_hour_apart_do_not_change_the_output(
    work: Work, out: Path, tmp_path: Path
) -> None:
    notes = tmp_path / "m-said"
    notes.touch()

    def note(text: str) -> None:
        with notes.open("a") as file:
            file.write(f"{text}\n")

    def killed() -> None:
        write, calls = UnitOutput.write, [0]

        def counted(*arguments: Any, **keywords: Any) -> None:
            calls[0] += 1
            if calls[0] == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            write(*arguments, **keywords)

        UnitOutput.write = counted  # type: ignore[method-assign]
        work(out, Settings(join=True))

    first = fork_child(partial(with_clock, HOUR, killed), tmp_path / "m-1")
    assert wait_for_exit_code(first) == -signal.SIGKILL
    children = [
        fork_child(
            partial(with_clock, seconds, lambda: work(out, Settings(join=True, note=note))),
            tmp_path / f"m{seconds}",
        )
        for seconds in (-HOUR, 0.0)
    ]
    assert [wait_for_exit_code(child) for child in children] == [0, 0]
    assert "has not responded" not in notes.read_text()
    work(tmp_path / "m-whole", Settings())
    assert file_digests(out) == file_digests(tmp_path / "m-whole")
    assert not any(out.rglob(".*"))
    assert not [name for name in leftovers(out) if name.startswith(".")]


@pytest.mark.parametrize("work", ["release", thorough_case("quantize")], indirect=True)
@pytest.mark.parametrize("size", [thorough_case(20_000), 60_000])
def test_a_full_disk_ends_only_the_affected_worker(
    work: Work, out: Path, tmp_path: Path, size: int
) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        work(out, Settings(join=True))

    alone = fork_child(limited, tmp_path / "m-alone")
    assert wait_for_exit_code(alone) == 70  # of the children of these tests
    assert "File too large" in (tmp_path / "m-alone").read_text()
    children = [
        fork_child(limited, tmp_path / "m-0"),
        fork_child(lambda: work(out, Settings(join=True)), tmp_path / "m-1"),
    ]
    codes = [wait_for_exit_code(child) for child in children]
    assert codes[1] == 0, (tmp_path / "m-1").read_text()
    assert codes[0] in {0, 70}  # it may find nothing to do
    work(tmp_path / "m-whole", Settings())
    assert file_digests(out) == file_digests(tmp_path / "m-whole")
