"""Run a case in a fork of this process, under limits, and report what must not happen.

Allowed is a result (0) or a typed refusal (2 to 7, 75). Found are: any other end, a traceback, more than `SECONDS` of
the processor, more than `BYTES` above what the fork holds at its start, a raw control character on a terminal or in a
document, ``--json`` that is no single document, the canary of another directory in an output, a change outside of the
tree, and remains at the output of a command that failed.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quantforge.numerics.allocator import trim
from tests.fuzz.hostile.cases import Case, copy_tree, draw
from tests.fuzz.hostile.tree import run

SECONDS = 10.0
BYTES = 600 << 20
GIVEN_UP = 60.0  # of the clock: something waits
ANSWERS = frozenset({0, 2, 3, 4, 5, 6, 7, 75})
CANARY = "CANARY of another directory"
_SHOWN = 1 << 20


@dataclass
class Verdict:
    """What came of one case: ``wrong`` is empty if all is well."""

    case: Case
    code: int = 0
    seconds: float = 0.0
    bytes: int = 0
    wrong: list[str] = field(default_factory=list)


def judge_case(seed: int, number: int, root: Path) -> Verdict:
    """Draw a case, run it and judge it."""
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=root.parent) as name:
        directory = Path(name)
        tree = copy_tree(root, directory)
        os.mkfifo(tree / "fifo")
        case = draw(seed, number, tree)
        verdict = _run(case, tree, directory)
        shutil.rmtree(os.fsencode(tree), ignore_errors=True)
    return verdict


def _run(case: Case, tree: Path, directory: Path) -> Verdict:
    before = time.monotonic()
    trim()  # else what earlier cases freed would be used again without a rise
    child = os.fork()
    if child == 0:
        _in_child(case, tree, directory)
    usage = _wait(child, before)
    verdict = Verdict(case)
    if usage is None:
        verdict.wrong.append(f"no answer in {GIVEN_UP:.0f} s")
        return verdict
    status, spent = usage
    verdict.code = os.waitstatus_to_exitcode(status)
    verdict.seconds = spent.ru_utime + spent.ru_stime
    verdict.bytes = spent.ru_maxrss * 1024 - int((directory / "held").read_text())
    out, err = (
        (directory / name).read_bytes()[:_SHOWN].decode("utf-8", "replace")
        for name in ("out", "err")
    )
    if not _argument_leads_outside(case, tree):
        verdict.wrong += [
            f"the content of another directory on {name}"
            for name, text in (("stdout", out), ("stderr", err))
            if CANARY in text
        ]
    verdict.wrong += _judge(verdict, out, err)
    return verdict


def _argument_leads_outside(case: Case, tree: Path) -> bool:
    """Whether an argument itself leads to the canary: what a person names may be a link to anywhere."""
    outside = (tree.parent / "outside.txt").resolve()
    paths = (tree / argument.partition(":")[0] for argument in case.arguments)
    return any(os.path.realpath(os.fsencode(path)) == os.fsencode(outside) for path in paths)


def _judge(verdict: Verdict, out: str, err: str) -> Iterator[str]:
    if verdict.code not in ANSWERS:
        last = (err.strip().splitlines() or ["nothing was said"])[-1]
        yield f"exit {verdict.code}: {err.strip()[:300] if 'bug:' in err else last[:300]}"
    elif "Traceback" in err:
        yield "a traceback"
    if verdict.seconds > SECONDS:
        yield f"{verdict.seconds:.1f} s"
    if verdict.bytes > BYTES:
        yield f"{verdict.bytes >> 20} MB"
    for name, text in (("stdout", out), ("stderr", err)):
        raw = {c for c in text if not c.isprintable() and c != "\n"}
        if raw:
            yield f"raw {sorted(map(ascii, raw))[:4]} on {name}"
    if "--json" in verdict.case.arguments and verdict.code == 0:
        try:
            json.loads(out)
        except ValueError:
            yield "stdout is no document"


def _in_child(case: Case, tree: Path, directory: Path) -> None:
    """Never returns."""
    code = 70
    (directory / "held").write_text(str(_resident()))  # less than its parent's: no pages of files
    try:
        for name, number in (("out", 1), ("err", 2)):
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(descriptor, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8") for number in (1, 2)
        )
        os.chdir(tree)
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
        resource.setrlimit(resource.RLIMIT_CPU, (30, 40))
        space = _address_space() + (2 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        code = run(case.arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:  # a fork must not run on
        os.write(2, f"bug: outside of the boundary: {error!r}".encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _wait(child: int, start: float) -> tuple[int, resource.struct_rusage] | None:
    pause = 0.001
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return status, usage
        if time.monotonic() - start > GIVEN_UP:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def judge_all(
    seed: int, numbers: range, root: Path, tell: Callable[[Verdict], None]
) -> list[Verdict]:
    """Judge cases one after another, and return those with something wrong."""
    failed = []
    for number in numbers:
        verdict = judge_case(seed, number, root)
        tell(verdict)
        if verdict.wrong:
            failed.append(verdict)
    return failed
