"""Processes stopped while they hold a lock: others name them, and continue once they are woken or killed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quantforge.api import release, variants
from quantforge.artifacts import manifest
from quantforge.errors import BusyError, IntegrityError
from quantforge.execution import claims
from quantforge.execution.unit_output import UnitOutput
from quantforge.files import lock
from quantforge.settings import Settings
from tests.conftest import Tiny
from tests.releases import TWO_VARIANTS
from tests.runs import (
    fast_recipe,
    file_digests,
    fork_child,
    leftovers,
    quantize,
    wait_for_exit_code,
)
from tests.thorough import thorough_case

release_module = importlib.import_module("quantforge.api.release")

Stopped = Callable[[object, str, Callable[[], object]], int]


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten heartbeats and timeouts."""
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(claims, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(lock, "STALE_SECONDS", 1.0)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Stopped]:
    """Start work in a child process, and return when it has stopped itself before a call."""
    children: list[int] = []

    def start(owner: Any, name: str, work: Callable[[], object]) -> int:
        def run() -> None:
            function = getattr(owner, name)

            def stops(*arguments: Any, **named: Any) -> Any:
                setattr(owner, name, function)
                os.kill(os.getpid(), signal.SIGSTOP)
                return function(*arguments, **named)

            setattr(owner, name, stops)
            work()

        children.append(fork_child(run, tmp_path / "m"))
        assert os.WIFSTOPPED(os.waitpid(children[-1], os.WUNTRACED)[1])
        return children[-1]

    yield start
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def signal_on_note(child: int, number: signal.Signals) -> tuple[list[str], Callable[[str], None]]:
    """Return the notes of a process, and a callback that signals the stopped child when a note names it."""
    messages: list[str] = []

    def note(text: str) -> None:
        messages.append(text)
        if f"process {child} " in text:
            os.kill(child, number)

    return messages, note


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the files of a release that one process makes."""
    directory = tmp_path_factory.mktemp("whole")
    (directory / "release.toml").write_text(TWO_VARIANTS.format(model=tiny("llama-wide")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "0")
        release(directory / "release.toml", directory / "out")
    return file_digests(directory / "out")


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        thorough_case(release_module, "_prepare_directories", signal.SIGCONT),
        thorough_case(variants, "run_group", signal.SIGKILL),
        (UnitOutput, "finish", signal.SIGKILL), (release_module, "_score_and_write", signal.SIGCONT),
    ],
)  # fmt: skip
def test_waiting_for_a_release_names_the_stopped_process(
    model: Path, tmp_path: Path, stopped: Stopped, whole: dict[str, str], owner: object, name: str,
    number: signal.Signals,
) -> None:  # fmt: skip
    spec, out = tmp_path / "release.toml", tmp_path / "out"
    spec.write_text(TWO_VARIANTS.format(model=model))
    child = stopped(owner, name, lambda: release(spec, out, Settings(join=True)))
    messages, note = signal_on_note(child, number)
    release(spec, out, Settings(join=True, note=note))
    assert len([text for text in messages if "has not responded" in text]) == 1
    assert f"kill -CONT {child} lets it go on" in "".join(messages)
    assert wait_for_exit_code(child) == (0 if number == signal.SIGCONT else -number)
    assert file_digests(out) == whole


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGKILL])
def test_waiting_for_a_result_names_the_stopped_process(
    model: Path, out: Path, stopped: Stopped, number: signal.Signals
) -> None:
    recipe = fast_recipe(scales="absmax", bits=4)
    owner = importlib.import_module("quantforge.api.quantize")
    child = stopped(owner, "publish", lambda: quantize(model, out, recipe, join=True))
    messages, note = signal_on_note(child, number)
    quantize(model, out, recipe, join=True, note=note)
    assert f"kill -CONT {child} lets it go on" in "".join(messages)
    assert wait_for_exit_code(child) == (0 if number == signal.SIGCONT else -number)
    whole = file_digests(out)
    assert leftovers(out) == {"out"}
    quantize(model, out.with_name("plain"), recipe)
    assert whole == file_digests(out.with_name("plain"))


def test_no_message_about_a_live_worker(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its work takes longer than the time after which a silent process is reported."""
    spec, out, notes = tmp_path / "release.toml", tmp_path / "out", tmp_path / "said"
    spec.write_text(TWO_VARIANTS.format(model=model))
    notes.touch()

    def work() -> None:
        finish = release_module._score_and_write

        def slowly(*arguments: Any) -> Any:
            time.sleep(1.5)
            return finish(*arguments)

        release_module._score_and_write = slowly  # type: ignore[assignment]
        note = lambda text: notes.open("a").write(f"{text}\\n")  # noqa: E731
        release(spec, out, Settings(join=True, note=note))

    children = [fork_child(work, tmp_path / f"m{number}") for number in range(2)]
    assert [wait_for_exit_code(child) for child in children] == [0, 0]
    assert "has not responded" not in notes.read_text()


def test_a_process_of_another_version_is_refused(
    model: Path, tmp_path: Path, stopped: Stopped, whole: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    spec, out = tmp_path / "release.toml", tmp_path / "out"
    spec.write_text(TWO_VARIANTS.format(model=model))
    child = stopped(UnitOutput, "finish", lambda: release(spec, out, Settings(join=True)))
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "__version__", "9.9.9")
        with pytest.raises(
            IntegrityError, match=r"quantforge: 0\.1\.0 there, 9\.9\.9 here"
        ) as refused:
            release(spec, out, Settings(join=True))
        assert "same versions everywhere" in refused.value.hint
    os.kill(child, signal.SIGCONT)
    assert wait_for_exit_code(child) == 0
    assert file_digests(out) == whole


def test_a_lock_with_unknown_fields_is_respected(tmp_path: Path) -> None:
    holder = lock.Lock(tmp_path / ".out.qf")
    holder.acquire()
    path = tmp_path / ".out.qf" / lock.LOCK_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    with pytest.raises(BusyError, match=f"process {os.getpid()} "):
        lock.Lock(tmp_path / ".out.qf").acquire()
    holder.release()
