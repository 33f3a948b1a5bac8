"""What completeness costs: the share of a run that goes into digests, checksums, fsync, journal, side files and checks.

    python benchmarks/overhead.py MODEL [--runs RUN ...] [--report FILE.md]

The functions that do this work are timed inside of whole runs, on the clock and on the processor, after a run of each
that only warms up. Reading written blocks back belongs to a method (the next block may read it) and is not counted.
"""

from __future__ import annotations

import argparse
import functools
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quantforge import __version__, api
from quantforge.api import job
from quantforge.artifacts import manifest
from quantforge.execution import calibrated_block, rounding, run_conversion, unit_output
from quantforge.execution.journal import Journal
from quantforge.files.checksums import Checksums
from quantforge.files.stage import Stage
from quantforge.files.writer import WeightsWriter
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.settings import Settings

ROWS = CalibrationOptions(samples=32, length=256)
RUNS = {
    "rtn, absmax": Recipe(bits=4, scales="absmax"),
    "rtn, search (default)": Recipe(bits=4),
    "gptq": Recipe(method="gptq", bits=4, calibration=ROWS),
    "awq": Recipe(method="awq", bits=4, calibration=ROWS),
}
WORK: dict[str, tuple[tuple[Any, str], ...]] = {
    "digests": ((job, "digest_small_files"), (manifest, "finish_manifest")),
    "digests of what is read": ((Checksums, "read"),),
    "checksums and finiteness": (
        (unit_output, "checksum"),
        (unit_output.UnitOutput, "check"),
        *((module, "check_finite") for module in (rounding, calibrated_block, run_conversion)),
    ),
    "journal": ((Journal, "__init__"), (Journal, "commit"), (Journal, "remove")),
    "fsync of weights": ((WeightsWriter, "sync"),),
    "side files, fsync, rename": (
        (Stage, "write_file"),
        (Stage, "copy_file"),
        (Stage, "publish"),
    ),
}


@contextmanager
def timed() -> Iterator[dict[str, list[float]]]:
    """Seconds of the clock and of the processor inside of each kind of work; calls inside of others count once."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    inside: list[str] = []

    def wrapped(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if inside:
                return function(*arguments, **named)
            inside.append(kind)
            clock, processor = time.perf_counter(), time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                inside.pop()
                spent[kind][0] += time.perf_counter() - clock
                spent[kind][1] += time.process_time() - processor

        return call

    kept = [(owner, name, getattr(owner, name)) for group in WORK.values() for owner, name in group]
    try:
        for kind, group in WORK.items():
            for owner, name in group:
                setattr(owner, name, wrapped(getattr(owner, name), kind))
        yield spent
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def measure(model: str, recipe: Recipe) -> tuple[float, float, dict[str, list[float]]]:
    """Seconds of the clock and of the processor of one run, and of its parts."""
    with tempfile.TemporaryDirectory() as directory, timed() as spent:
        clock, processor = time.perf_counter(), time.process_time()
        api.quantize(model, recipe, Path(directory) / "out", Settings(offline=True))
        return time.perf_counter() - clock, time.process_time() - processor, dict(spent)


def main() -> None:
    """Print, and write if asked, the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS])
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = list(WORK)
    lines = [
        f"| run | processor, s | all of it | {' | '.join(kinds)} | share of the clock |",
        "|---" * (len(kinds) + 4) + "|",
    ]
    for name in options.runs:
        measure(options.model, RUNS[name])
        clock, processor, spent = measure(options.model, RUNS[name])
        parts = [spent.get(kind, [0.0, 0.0]) for kind in kinds]
        shares = [sum(part[1] for part in parts), *(part[1] for part in parts)]
        cells = [f"{share / processor:.1%}" for share in shares]
        cells.append(f"{sum(part[0] for part in parts) / clock:.1%}")
        lines.append(f"| {name} | {processor:.2f} | {' | '.join(cells)} |")
        sys.stderr.write(f"{lines[-1]}\n")
    lines += [
        "",
        f"quantforge {__version__}, torch {torch.__version__}, Python {platform.python_version()}.",
    ]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if options.report:
        options.report.write_text(text)


if __name__ == "__main__":
    main()
