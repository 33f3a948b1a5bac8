"""Kill runs at random instants, go on with each, and compare every file with that of an uninterrupted run.

    python scripts/kill_runs.py --kills 200 [--model DIR] [--work DIR] [--seed N] [--report FILE.md]

Cases go round over methods and formats, the packing phase included. Imports happen once: every run is a forked child,
so that an instant falls into the work and not into the start of Python. Exits 5 at the first file that differs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import torch

from quantforge import pipeline
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.settings import Settings

ROOT = Path(__file__).parents[1]
ROWS = CalibrationOptions(samples=8, length=64)
CASES: dict[str, Recipe] = {
    "rtn, compressed-tensors": Recipe(bits=4),
    "gptq, compressed-tensors": Recipe(method="gptq", bits=3, calibration=ROWS),
    "awq, awq": Recipe(method="awq", bits=4, format="awq", calibration=ROWS),
    "awq+gptq, gptq": Recipe(method="awq+gptq", bits=4, format="gptq", calibration=ROWS),
    "smooth, 8-bit inputs": Recipe(method="smooth", scheme="W8A8", calibration=ROWS),
    "nf4, bnb": Recipe(scheme="nf4:g64:sym:double", format="bnb"),
    "gptq, gguf": Recipe(method="gptq", type="Q4_0", format="gguf", calibration=ROWS),
    "quantized propagation": Recipe(
        method="gptq",
        bits=4,
        calibration=CalibrationOptions(samples=8, length=64, propagate="quantized"),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill, resume, compare; return the exit code."""
    options = _options(arguments)
    torch.set_num_threads(1)
    moments = random.Random(options.seed)
    kills: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        work = Path(directory)
        references: dict[str, tuple[dict[str, str], float]] = {}
        for number, (name, recipe) in enumerate(cycle(CASES.items())):
            if kills.total() >= options.kills:
                break
            out = work / str(number) / ("m.gguf" if recipe.format == "gguf" else "m")
            out.parent.mkdir()
            if name not in references:
                references[name] = _reference(options.model, recipe, out)
            expected, seconds = references[name]
            child = _start(options.model, recipe, out)
            time.sleep(seconds * moments.random())
            os.kill(child, signal.SIGKILL)
            killed = _finish(child) != 0
            kills[name] += killed
            if killed and not out.exists():
                _finish(_start(options.model, recipe, out))
            runs[name] += killed
            found = _files(out.parent)
            if found != expected:
                differ = sorted(n for n in found | expected if found.get(n) != expected.get(n))
                sys.stderr.write(f"{name}: {', '.join(differ)} after {kills[name]} kills\n")
                return 5
            shutil.rmtree(out.parent)
            if killed and kills.total() % 10 == 0:
                sys.stderr.write(f"{kills.total()} kills, {runs.total()} results the same\n")
    lines = ["| case | kills | results, all byte-identical |", "|---|---|---|"]
    lines += [f"| {name} | {kills[name]} | {runs[name]} |" for name in CASES]
    lines += [f"| all | {kills.total()} | {runs.total()} |"]
    text = "\n".join(lines) + "\n"
    if options.report:
        options.report.write_text(text)
    sys.stdout.write(text)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path)
    return parser.parse_args(arguments)


def _reference(model: Path, recipe: Recipe, out: Path) -> tuple[dict[str, str], float]:
    """Files and seconds of an uninterrupted run; the first one is made here, so that children find all imports done."""
    seconds = 0.0
    for forked in (False, True):
        shutil.rmtree(out.parent)
        out.parent.mkdir()
        start = time.monotonic()
        if forked:
            _finish(_start(model, recipe, out))
        else:
            pipeline.quantize(str(model), recipe, out, Settings(offline=True))
        seconds = time.monotonic() - start
    found = _files(out.parent)
    shutil.rmtree(out.parent)
    out.parent.mkdir()
    return found, seconds


def _start(model: Path, recipe: Recipe, out: Path) -> int:
    """Fork a child that runs a recipe; return its process id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        pipeline.quantize(str(model), recipe, out, Settings(offline=True))
        code = 0
    finally:
        os._exit(code)


def _finish(child: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in {0, -signal.SIGKILL}:
        raise SystemExit(f"a run ended with {code}")
    return code


def _files(directory: Path) -> dict[str, str]:
    """Digests of everything that is not a lock or a log."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


if __name__ == "__main__":
    sys.exit(main())
