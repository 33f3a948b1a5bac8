"""Run the installed command as users do, and read its results with independent libraries.

Nothing here imports from `quantforge` but what it lists in ``__all__``: the command is the one that the package
installs, so that these tests hold whatever becomes of the modules behind it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import signal
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

(COMMAND,) = entry_points(group="console_scripts", name="quantforge")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A calibration that takes a moment; random weights need no more.
ROWS = "--samples 8 --length 64"
RTN = "--method rtn --bits 4 --calibration none"
GPTQ = f"--method gptq --bits 4 {ROWS}"
# Enough for the trained model of the package to gain by it.
DEMO_GPTQ = "--method gptq --bits 4 --samples 16 --length 128"
EVALUATION = "--windows 4 --length 32 --no-speed"
TIMEOUT_SECONDS = 120  # seconds to wait for what takes a few
# A process of its own: the arguments after it are those of the command.
COMMAND_PROGRAM = (
    "from importlib.metadata import entry_points\n"
    "(command,) = entry_points(group='console_scripts', name='quantforge')\n"
    "command.load()()"
)


@dataclass(frozen=True)
class CommandResult:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The error object that ``--json`` puts on stderr."""
        return json.loads(self.err.splitlines()[-1])["error"]

    @property
    def findings(self) -> set[tuple[str, str]]:
        """Check and severity of what `verify --json` found."""
        return {(finding["check"], finding["severity"]) for finding in self.document["findings"]}


def split_arguments(*arguments: object) -> list[str]:
    """Return arguments as a shell would: options in one text are split, tuples are flattened."""
    words: list[str] = []
    for argument in arguments:
        if isinstance(argument, tuple | list):
            words += split_arguments(*argument)
        elif isinstance(argument, str) and argument.startswith("-"):
            words += shlex.split(argument)
        else:
            words.append(str(argument))
    return words


def command(*arguments: object, cwd: Path | None = None, stdin: str = "") -> CommandResult:
    """Run the command in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with _as_typed(arguments, cwd, stdin), redirect_stdout(out), redirect_stderr(err):
        code = _run()
    printed = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return CommandResult(code, *printed)


def document(*arguments: object, cwd: Path | None = None, code: int = 0) -> Any:
    """Run the command with ``--json``, and return the document after it ended with ``code``."""
    ended = command(*arguments, "--json", cwd=cwd)
    assert ended.code == code, ended.err
    result = ended.document
    assert result["schema"].startswith("quantforge.")
    return result


def refusal(code: int, *arguments: object, cwd: Path | None = None) -> str:
    """Run the command, which has to fail with this code and print no document; return message and hint."""
    ended = command(*arguments, "--json", cwd=cwd)
    assert (ended.code, ended.out) == (code, ""), (ended.code, ended.err)
    assert "Traceback" not in ended.err
    error = ended.error
    assert {"code", "message", "hint"} <= {*error}
    return f"{error['message']} {error['hint']}"


@contextmanager
def _as_typed(arguments: tuple[object, ...], cwd: Path | None, stdin: str) -> Iterator[None]:
    directory, before, piped = Path.cwd(), sys.argv, sys.stdin
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    sys.argv = ["quantforge", *split_arguments(*arguments)]
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8")
    os.chdir(cwd or directory)
    try:
        yield
    finally:
        os.chdir(directory)
        sys.argv, sys.stdin = before, piped
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _run() -> int:
    try:
        COMMAND.load()()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


class Running:
    """The command in a forked process, which has imported what this one has."""

    def __init__(self, directory: Path, *arguments: object, cwd: Path | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._files = directory / "stdout", directory / "stderr"
        for file in self._files:
            file.write_bytes(b"")
        self.pid = os.fork()
        if not self.pid:
            self._child(arguments, cwd)
        self._code: int | None = None

    def _child(self, arguments: tuple[object, ...], cwd: Path | None) -> None:
        code = 70
        try:
            for number in SIGNALS:  # whatever this process was started with
                signal.signal(number, signal.SIG_DFL)
            for number, file in enumerate(self._files, 1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            with _as_typed(arguments, cwd, ""):
                code = _run()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    @property
    def running(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is None

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait until the process has reached something; fail when it ends before."""
        began = time.monotonic()
        while not reached():
            assert self.running or reached(), f"it ended with {self._code}: {self.err}"
            assert time.monotonic() - began < TIMEOUT_SECONDS, self.err
            time.sleep(0.005)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self) -> CommandResult:
        """Wait for the end; the code of one that a signal has killed is minus its number."""
        began = time.monotonic()
        while self.running:
            assert time.monotonic() - began < TIMEOUT_SECONDS, self.err
            time.sleep(0.01)
        assert self._code is not None
        return CommandResult(self._code, self.out, self.err)

    def kill(self) -> None:
        if self.running:
            self.send(signal.SIGKILL)
            self.ended()


def ask(url: str, body: object = None, **headers: str) -> tuple[int, Any]:
    """Send a request, a POST where it has a body; return status and JSON document, or text."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


# ---- what was made


def digests(root: Path) -> dict[str, str]:
    """SHA-256 of every file of a directory by its relative name, of a file by its own."""
    files = [root] if root.is_file() else sorted(root.rglob("*"))
    return {
        path.name if path == root else str(path.relative_to(root)): digest(path)
        for path in files
        if path.is_file()
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def config(model: Path) -> Any:
    return json.loads((model / "config.json").read_text())


def tensors(model: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, or of a file, of safetensors."""
    weights: dict[str, torch.Tensor] = {}
    for path in [model] if model.is_file() else sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return weights


def manifest(out: Path) -> Any:
    """The manifest of a result."""
    path = out / "quantforge.manifest.json" if out.is_dir() else Path(f"{out}.quantforge.json")
    return json.loads(path.read_text())


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


# ---- what the fixtures return


@dataclass(frozen=True)
class Artifact:
    """A result: where it lies, and the document that the command printed."""

    path: Path
    document: Any


Model = Callable[[str], Path]
Make = Callable[..., Artifact]
Start = Callable[..., Running]
Copy = Callable[[Path], Path]
