"""Worker processes of `--jobs` that fail or lose their parent, and signals that arrive during imports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantforge.api import release
from quantforge.api.release import SPEC
from quantforge.api.variants import Variants
from quantforge.cli import app, processes
from quantforge.errors import ResourceError
from quantforge.settings import Settings
from tests.runs import run_command

ORPHAN = """
import time
from quantforge.cli import processes
processes.IS_WORKER.set()
with processes.worker_processes(2, print):
    print("works", flush=True)
    time.sleep(200)
"""


def test_a_worker_ends_when_its_parent_is_killed() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"works\n"
        other.stdin.close()  # as the system does for a process that is killed
        assert other.wait(120) == -signal.SIGTERM


def test_an_environment_variable_does_not_silence_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUANTFORGE_JOB", "1")
    assert not processes.is_silent()


def test_failed_workers_are_counted_and_print_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quantforge", "no-such-verb"])
    notes: list[str] = []
    with processes.worker_processes(3, notes.append) as failed:
        assert failed == []
    assert [failure["exit_code"] for failure in failed] == [2, 2]
    assert all("no-such-verb" in failure["stderr"] for failure in failed)
    first, *why = notes[0].splitlines()
    assert first == "2 of 3 processes failed (exit code 2, 2); others did their part"
    assert why == failed[0]["stderr"].splitlines()  # once, though both said it
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("verb", ["release", "sweep"])
def test_json_documents_list_failed_workers(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: Path,
    verb: str,
) -> None:
    spec = tmp_path / "own.toml"
    spec.write_text(
        f'model = "{model}"\n[[variant]]\nname = "a"\nformat = "compressed-tensors"\n'
        'recipe = {method = "rtn", scheme = "int4:g32:sym", scales = "absmax"}\n'
    )
    program = "import sys; sys.exit('error: memory is full')"
    monkeypatch.setattr(processes, "_WORKER_PROGRAM", program)
    measured = ["--windows", "2", "--window-length", "16"]
    arguments = (
        [spec]
        if verb == "release"
        else [model, "--over", "bits=4,8", "--method", "rtn", "--scales", "absmax", *measured]
    )
    ran = run_command(capsys, verb, *arguments, "-o", tmp_path / "out", "--jobs", "2", "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["failed_processes"] == [
        {"exit_code": 1, "stderr": "error: memory is full"}
    ]


def test_modules_in_the_working_directory_are_not_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "quantforge.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(path).absolute()) for path in sys.path if path])
    monkeypatch.setattr(sys, "argv", ["quantforge", "--version"])
    notes: list[str] = []
    with processes.worker_processes(2, notes.append):
        pass
    assert notes == []


def test_a_failed_worker_start_stops_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def popen(*_: Any, **how: Any) -> subprocess.Popen[bytes]:
        if begun:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        begun.append(start([sys.executable, "-c", "import time; time.sleep(60)"], **how))
        return begun[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with (
        pytest.raises(ResourceError, match="no further process"),
        processes.worker_processes(3, print),
    ):
        pass
    assert begun[0].returncode == -signal.SIGTERM


STOPPING = """
import select, signal, sys, time
def stop(*_):
    time.sleep(1)
    sys.exit(7 if select.select([0], [], [], 0)[0] else 5)
signal.signal(signal.SIGTERM, stop)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def test_the_pipe_of_a_stopping_worker_stays_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Closing it would be a signal, too."""
    begun: list[subprocess.Popen[bytes]] = []
    start, ready = subprocess.Popen, tmp_path / "ready"

    def popen(*_: Any, **how: Any) -> subprocess.Popen[bytes]:
        begun.append(start([sys.executable, "-c", STOPPING, str(ready)], **how))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt), processes.worker_processes(2, print):
        _wait_and_stop(ready)
    assert begun[0].returncode == 5


def _wait_and_stop(ready: Path) -> None:
    while not ready.exists():
        time.sleep(0.01)
    raise KeyboardInterrupt


@pytest.fixture
def _handled() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, app.raise_stopped)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_handled")
def test_a_signal_during_an_import_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    swallows = "import signal\ntry:\n    signal.raise_signal(signal.SIGTERM)\nexcept BaseException:\n    pass\n"
    (tmp_path / "swallowing_module.py").write_text(swallows)
    monkeypatch.syspath_prepend(tmp_path)
    begun = time.monotonic()
    with pytest.raises(app.Stopped):
        _load_and_wait("swallowing_module")
    assert time.monotonic() - begun < 60


def _load_and_wait(module: str) -> None:
    __import__(module)
    time.sleep(120)


def test_a_release_stores_its_own_spec_despite_another_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    spec, out = tmp_path / "own.toml", tmp_path / "out"
    recipe = '{method = "rtn", scheme = "int4:g32:sym", scales = "absmax"}'
    head = f'model = "{model}"\n[[variant]]\nname = "a"\nformat = "compressed-tensors"\n'
    text = f"{head}recipe = {recipe}\n"
    spec.write_text(text)
    make = Variants.make

    def other_begins(*arguments: Any) -> Any:
        (out / SPEC).write_text(text.replace('"a"', '"b"'))
        spec.write_text("edited since")
        return make(*arguments)

    monkeypatch.setattr(Variants, "make", other_begins)
    release(spec, out, Settings(join=True))
    assert (out / SPEC).read_text() == text
