"""Kill runs at random instants, give each command again, and compare every file with that of an uninterrupted run.

    python scripts/kill_runs.py --kills 200 [--only PATTERN] [--model DIR] [--work DIR] [--seed N] [--minutes M]
        [--report FILE.md]

Cases go round over methods and formats. Half of the kills come at an instant of the clock, half in front of a random
call to the disk, because publishing takes too little time to be hit by chance; every third run is killed once more
while it resumes. Over an earlier release, what is at the output after a kill has to be that or the new one, whole.
Imports happen once: every run is a forked child, so that an instant falls into the work and not into the start of
Python.

All of it happens in one directory that others use at the same time: another process goes on quantizing into outputs of
its own there, planning, inspecting, verifying and evaluating models that lie there; and canaries lie there whose names
look like those of results. Exits 5 at the first file that differs, a canary's included, and when a neighbour fails.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import cycle
from pathlib import Path

import torch

from quantforge import __version__, api
from quantforge.api.inspect import inspect
from quantforge.errors import InputError, QuantForgeError, RefusedError
from quantforge.evaluation.compare_models import compare_models
from quantforge.evaluation.measurement_options import EvaluationOptions as Evaluating
from quantforge.execution import claims
from quantforge.files.disk import DISK
from quantforge.formats.open_model import open_model
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.settings import Settings
from quantforge.verification.verify import verify

ROOT = Path(__file__).parents[1]
# Paths of the runs' own files
OWN = re.compile(r"(m|\.m\.qf|\.m\.gguf\.qf)/.*|m(-\d{5}-of-\d{5})?\.gguf(\.quantforge\.json)?")
NEIGHBOURS = re.compile(r"\.?(near|other)[./].*")
CANARIES = (
    "canary/model.safetensors", "canary/notes.txt", "m-00001-of-00002.safetensors", "m-00001-of-00009.gguf.bak",
    "m.txt", "m.gguf.part", "m.log.jsonl", ".m.qf-stage/model.safetensors", ".m.gguf.qf.lock", "m.Modelfile", "*.gguf",
)  # fmt: skip
ROWS = CalibrationOptions(samples=8, length=64)
EVERYONE = replace(ROWS, expert_tokens="all")
TEXT = "The quick brown fox jumps over the lazy dog, and then it rests. " * 200
EARLIER = {  # earlier releases by the name of the output; the directory is also what is exported
    "m": Recipe(bits=8, scales="absmax"),
    "m.gguf": Recipe(type="Q4_0", format="gguf", scales="absmax"),
}


@dataclass(frozen=True)
class Case:
    """A command: ``quantize``, or ``export`` of a quantized model; over an earlier release or not."""

    recipe: Recipe
    export: bool = False
    over: bool = False
    activations: str = "memory"
    provenance: bool = False
    join: bool = False

    @property
    def name(self) -> str:
        """The name of the output."""
        return "m.gguf" if self.recipe.format == "gguf" else "m"


CASES: dict[str, Case] = {
    "rtn, compressed-tensors": Case(Recipe(bits=4), provenance=True),
    "rtn, shared by processes": Case(Recipe(bits=4, scales="absmax"), join=True),
    "gptq, compressed-tensors": Case(Recipe(method="gptq", bits=3, calibration=ROWS)),
    "gptq, activations on disk, over an earlier release": Case(
        Recipe(method="gptq", bits=4, calibration=ROWS), over=True, activations="disk"
    ),
    "awq, awq": Case(Recipe(method="awq", bits=4, format="awq", calibration=ROWS)),
    "awq+gptq, gptq": Case(Recipe(method="awq+gptq", bits=4, format="gptq", calibration=ROWS)),
    "gptq, gptq_v2, shards": Case(
        Recipe(method="gptq", scheme="int4:g64:asym", format="gptq_v2", max_shard_bytes=400_000, calibration=ROWS)
    ),
    "rotate+gptq, rows": Case(Recipe(method="rotate+gptq", scheme="int4:row:sym", calibration=ROWS)),
    "smooth, 8-bit inputs": Case(Recipe(method="smooth", scheme="W8A8", calibration=ROWS)),
    "fp8 with 8-bit inputs": Case(Recipe(scheme="FP8_DYNAMIC")),
    "gptq, nvfp4": Case(Recipe(method="gptq", scheme="NVFP4A16", calibration=ROWS)),
    "nf4 twice quantized, bnb": Case(Recipe(scheme="nf4:g64:sym:double", format="bnb")),
    "rtn, mlx": Case(Recipe(bits=4, format="mlx")),
    "gptq, GGUF Q4_0": Case(Recipe(method="gptq", type="Q4_0", format="gguf", calibration=ROWS)),
    "rtn, GGUF Q4_K_M, numbered parts": Case(
        Recipe(type="Q4_K_M", format="gguf", scales="absmax", max_shard_bytes=700_000)
    ),
    "rtn, GGUF Q8_0 over an earlier release": Case(
        Recipe(type="Q8_0", format="gguf", scales="absmax"), over=True
    ),
    "awq+gptq, a quarter of the experts removed, the others see every token": Case(
        Recipe(method="awq+gptq", bits=4, prune_experts="25%", calibration=EVERYONE)
    ),
    "export to gptq": Case(Recipe(format="gptq"), export=True),
    "export to GGUF": Case(Recipe(format="gguf"), export=True),
}  # fmt: skip


@dataclass
class Work:
    """Where the runs of one case happen, and what an uninterrupted one makes there."""

    case: Case
    model: Path
    root: Path
    earlier: Path  # holds a release of an earlier run
    expected: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    calls: int = 0

    def command(self) -> None:
        """Run in this process."""
        case = self.case
        settings = Settings(
            offline=True,
            overwrite=case.over,
            activations=case.activations,
            provenance=case.provenance,
            join=case.join,
        )
        run = api.export if case.export else api.quantize
        run(str(self.model), case.recipe, self.root / case.name, settings)

    def clean(self) -> dict[str, str]:
        """Put the place in the state before the run; return its files."""
        for name in ("m", ".m.qf", ".m.gguf.qf"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        for path in self.root.iterdir():
            if OWN.fullmatch(path.name):
                path.unlink()
        if self.case.over:
            shutil.copytree(self.earlier, self.root, dirs_exist_ok=True)
        return files(self.root, hidden=False)

    def measure(self) -> None:
        """Make the reference: once for the imports and the calls to the disk, once for the time."""
        self.clean()
        count = [0]
        with_calls(lambda: count.__setitem__(0, count[0] + 1), self.command)
        self.calls, self.expected = count[0], files(self.root)
        self.clean()
        start = time.monotonic()
        finish(self.start())
        self.seconds = time.monotonic() - start
        if files(self.root) != self.expected:
            raise SystemExit(f"{self.case}: two uninterrupted runs differ")

    def start(self, at: int = 0) -> int:
        """Fork a child that gives the command, and dies before call ``at`` to the disk; return its process id."""
        child = os.fork()
        if child:
            return child
        code, left = 70, [at]

        def call() -> None:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with_calls(call, self.command)
            code = 0
        except RefusedError as error:
            code = error.exit_code
            sys.stderr.write("" if "exists" in error.message else f"{error.message}\n")
        finally:
            os._exit(code)

    def sound(self, before: dict[str, str], found: dict[str, str]) -> bool:
        """Whether what a kill left at the output is the earlier release or the new one; see `FileStage`."""
        if not self.case.name.endswith(".gguf"):
            return found in (before, self.expected)
        side = f"{self.case.name}.quantforge.json"  # may be missing
        old, seen, new = (without(files, side) for files in (before, found, self.expected))
        if seen in (old, new):
            return True
        first = "m-00001-of-"  # the last of numbered parts to appear
        return new.items() > seen.items() and not any(name.startswith(first) for name in seen)

    def killed(self, moments: random.Random) -> bool:
        """Give the command and kill it; return whether the kill came before its end."""
        if moments.random() < 0.5:
            return finish(self.start(moments.randint(1, self.calls))) < 0
        child = self.start()
        time.sleep(self.seconds * moments.random())
        os.kill(child, signal.SIGKILL)
        return finish(child) < 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill, give the command again, compare; return the exit code."""
    options = _options(arguments)
    torch.set_num_threads(1)
    # Of a run that is killed and given again
    claims.HEARTBEAT_SECONDS, claims.LEASE_SECONDS = 0.05, 0.5
    moments = random.Random(options.seed)
    kills: Counter[str] = Counter()
    results: Counter[str] = Counter()
    ends = time.monotonic() + 60 * options.minutes
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        works = _prepare(Path(directory), options.model, options.only)
        root = Path(directory) / "runs"
        canaries = plant(root)
        neighbours = Neighbours(root, options.model)
        for name, work in cycle(works.items()):
            neighbours.check()
            if results.total() >= options.kills or time.monotonic() > ends:
                break
            before = work.clean()
            while not work.killed(moments):  # it ended before its kill came
                work.clean()
            kills[name] += 1
            between = files(work.root, hidden=False)
            if not work.sound(before, between):
                return _differs(name, "right after a kill", between, work.expected)
            if (others := files(root, OTHERS)) != canaries:
                return _differs(name, "right after a kill", others, canaries)
            if results.total() % 3 == 2:
                kills[name] += work.killed(moments)
            code = finish(work.start())
            found = files(work.root)
            if code not in {0, RefusedError.exit_code} or found != work.expected:
                return _differs(
                    name, f"after {kills.total()} kills, exit {code}", found, work.expected
                )
            if (others := files(root, OTHERS)) != canaries:
                return _differs(name, f"after {kills.total()} kills", others, canaries)
            results[name] += 1
            if results.total() % 10 == 0:
                sys.stderr.write(f"{kills.total()} kills, {results.total()} results the same\n")
        beside = neighbours.end()
        if (others := files(root, OTHERS)) != canaries:
            return _differs("neighbours", "at the end", others, canaries)
    text = _table(kills, results) + _beside(beside, len(canaries))
    if options.report:
        options.report.write_text(text)
    sys.stdout.write(text)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then, with fewer")
    parser.add_argument("--only", default="", help="cases in whose name this expression is found")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path)
    return parser.parse_args(arguments)


def _prepare(directory: Path, model: Path, only: str) -> dict[str, Work]:
    """Make the earlier releases, and the reference of every case that ``only`` finds."""
    for name, recipe in EARLIER.items():
        place = directory / "earlier" / name
        place.mkdir(parents=True)
        api.quantize(str(model), recipe, place / name, Settings(offline=True))
    works = {}
    (directory / "runs").mkdir()
    for name, case in CASES.items():
        if not re.search(only, name):
            continue
        earlier = directory / "earlier" / case.name
        source = directory / "earlier" / "m" / "m" if case.export else model
        work = Work(case, source, directory / "runs", earlier)
        if not case.export and (reason := _refused(model, case.recipe)):
            sys.stderr.write(f"{name}: not run: {reason}\n")
            continue
        works[name] = work
        work.measure()
        sys.stderr.write(
            f"{name}: {works[name].seconds:.1f} s, {works[name].calls} calls to the disk\n"
        )
    return works


def _refused(model: Path, recipe: Recipe) -> str:
    """Return why a case is refused for a model, by its plan; "" where it is not."""
    try:
        api.plan(str(model), recipe, Settings(offline=True))
    except QuantForgeError as error:
        return error.message
    return ""


def with_calls(call: Callable[[], None], command: Callable[[], None]) -> None:
    """Give a command, with ``call`` in front of every call to the disk."""
    kept = {item.name: getattr(DISK, item.name) for item in fields(DISK)}

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object) -> object:
            call()
            return function(*arguments)

        return wrapped

    try:
        for name, function in kept.items():  # frozen, and rightly so outside of experiments
            object.__setattr__(DISK, name, counted(function))
        command()
    finally:
        for name, function in kept.items():
            object.__setattr__(DISK, name, function)


def finish(child: int) -> int:
    """Wait for a child: its exit code, or minus the signal that ended it."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in {0, RefusedError.exit_code, -signal.SIGKILL}:
        raise SystemExit(f"a run ended with {code}")
    return code


OTHERS = re.compile(rf"(?!({OWN.pattern}|{NEIGHBOURS.pattern})\Z).*")


def files(directory: Path, wanted: re.Pattern[str] = OWN, *, hidden: bool = True) -> dict[str, str]:
    """Digests of the files of the runs, or of those whose names are ``wanted``; ``hidden``: stages and journals too."""
    found = {}
    for place, folders, names in os.walk(directory):
        relative = Path(place).relative_to(directory)
        # what is a neighbour's comes and goes
        folders[:] = [name for name in folders if not NEIGHBOURS.fullmatch(f"{relative / name}/")]
        for name in names:
            path = str(relative / name)
            if wanted.fullmatch(path) and (hidden or not path.startswith(".")):
                found[path] = hashlib.sha256((directory / path).read_bytes()).hexdigest()
    return dict(sorted(found.items()))


def plant(root: Path) -> dict[str, str]:
    """Put the canaries into the directory of the runs; return their digests."""
    for name in CANARIES:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"{name} is somebody's\n")
    (root / "canary" / "link").symlink_to("notes.txt")
    return files(root, OTHERS)


class Neighbours:
    """A process that gives other commands in the same directory, over and over."""

    def __init__(self, root: Path, model: Path) -> None:
        self._root, self._model = root, model
        self._ends, self._counts = mmap.mmap(-1, 1), mmap.mmap(-1, 4 * 6)
        self._verbs: dict[str, Callable[[], None]] = {
            "quantize": self._quantize, "export": self._export, "plan": self._plan,
            "inspect": self._inspect, "verify": self._verify, "eval": self._eval,
        }  # fmt: skip
        self._make("near", EARLIER["m"])
        self._make("other.gguf", EARLIER["m.gguf"])
        self._read = ["near", "other"]
        try:
            open_model(root / "other.gguf")
            self._read.append("other.gguf")
        except InputError as error:  # a family whose GGUF files are written and not read
            sys.stderr.write(f"no neighbour reads a GGUF file: {error.message}\n")
        self._child = os.fork()
        if not self._child:
            code = 70
            try:
                while not self._ends[0]:
                    for number, verb in enumerate(self._verbs.values()):
                        if not self._ends[0]:
                            verb()
                            self._count(number, 1)
                code = 0
            except BaseException:
                sys.stderr.write(traceback.format_exc())
            finally:
                os._exit(code)

    def check(self) -> None:
        """End when a command of a neighbour has failed."""
        if os.waitpid(self._child, os.WNOHANG)[0]:
            raise SystemExit("a neighbour failed")

    def end(self) -> dict[str, int]:
        """Let the neighbours finish; return how often each command was given."""
        self._ends[0] = 1
        if code := os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1]):
            raise SystemExit(f"a neighbour failed with {code}")
        return {verb: self._count(number) for number, verb in enumerate(self._verbs)}

    def _count(self, number: int, more: int = 0) -> int:
        place = slice(4 * number, 4 * number + 4)
        count = int.from_bytes(self._counts[place], "little") + more
        self._counts[place] = count.to_bytes(4, "little")
        return count

    def _make(self, name: str, recipe: Recipe) -> None:
        settings = Settings(offline=True, overwrite=True)
        api.quantize(str(self._model), recipe, self._root / name, settings)

    def _quantize(self) -> None:
        self._make("other", Recipe(bits=4, scales="absmax"))
        self._make("other.gguf", EARLIER["m.gguf"])

    def _export(self) -> None:
        settings = Settings(offline=True, overwrite=True)
        near = str(self._root / "near")
        api.export(near, Recipe(format="gptq"), self._root / "other.gptq", settings)

    def _plan(self) -> None:
        api.plan(str(self._model), Recipe(bits=4), Settings(offline=True))

    def _inspect(self) -> None:
        for name in self._read:
            inspect(self._root / name)

    def _verify(self) -> None:
        for name in self._read:
            found = verify(self._root / name, self._model, forward=False).findings
            if found:
                raise SystemExit(f"{name}: {found[0]}")

    def _eval(self) -> None:
        options = Evaluating(TEXT, "a text", windows=2, length=32, speed=False)
        compare_models([open_model(self._model), open_model(self._root / "near")], options)


def without(found: dict[str, str], name: str) -> dict[str, str]:
    """Leave one file out."""
    return {path: digest for path, digest in found.items() if path != name}


def _differs(name: str, when: str, found: dict[str, str], expected: dict[str, str]) -> int:
    differ = sorted(n for n in found | expected if found.get(n) != expected.get(n))
    sys.stderr.write(f"{name}, {when}: {', '.join(differ)}\n")
    return 5


def _beside(counts: dict[str, int], canaries: int) -> str:
    given = ", ".join(f"{verb} {count}" for verb, count in counts.items())
    return f"\nBeside them in the same directory: {given}; {canaries} canaries unchanged.\n"


def _table(kills: Counter[str], results: Counter[str]) -> str:
    """The report."""
    versions = (
        f"quantforge {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    lines = ["| case | kills | results, all byte-identical |", "|---|---|---|"]
    lines += [f"| {name} | {kills[name]} | {results[name]} |" for name in results]
    lines += [f"| all | {kills.total()} | {results.total()} |", "", f"{versions}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
