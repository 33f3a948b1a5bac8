"""Fuzz the parsers: `tests/fuzz` damages its corpus, a million times each, and nothing but typed refusals may come out.

    python scripts/fuzz.py [TARGET ...] [--executions N] [--seconds S] [--seed N] [--report FILE.md]
    python scripts/fuzz.py TARGET --atheris [-- options of libFuzzer]     # pip install 'quantforge[fuzz]'

The first form needs no library; executions are numbered and each is a function of seed and number. The second follows
the coverage of the Python code. A finding is an exception that is no refusal, more than `SECONDS` of processor time,
or a peak of memory more than `BYTES` above what it was; its input is written as ``finding-TARGET-N``. Findings
belong into ``tests/fuzz/corpus/TARGET`` together with the change that answers them. Exits 5 if there are any.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
if TYPE_CHECKING:
    from tests.fuzz.engine import Outcome


def with_atheris(name: str, rest: Sequence[str]) -> None:
    """Hand a target to libFuzzer, which does not return."""
    import atheris

    with atheris.instrument_imports(include=["quantforge", "quantforge_calibration"]):
        from tests.fuzz.targets import CORPUS, TARGETS, is_accepted, seeds
    from tests.fuzz.engine import BYTES, peak, scratch, warm_up
    from tests.fuzz.mutate import mutate_bytes

    corpus = seeds(name)
    place, new = scratch(), tempfile.TemporaryDirectory()
    warm_up(name, Path(place.name))

    def custom(data: bytes, limit: int, seed: int) -> bytes:
        chance = random.Random(seed)
        return (
            mutate_bytes(data, corpus, chance, limit)
            if chance.random() < 0.5
            else bytes(atheris.Mutate(data, limit))
        )

    limits = [
        f"-rss_limit_mb={(peak() + BYTES) >> 20}",
        "-timeout=10",
        "-report_slow_units=1",
        "-max_len=65536",
    ]
    own = [
        sys.argv[0],
        *limits,
        f"-artifact_prefix=finding-{name}-",
        *rest,
        new.name,
        str(CORPUS / name),
    ]
    atheris.Setup(
        own,
        lambda data: is_accepted(TARGETS[name], data, Path(place.name)) and None,
        custom_mutator=custom,
    )
    atheris.Fuzz()


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="of the processor, for each target"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first execution")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--atheris", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    if options.atheris:
        with_atheris(options.targets[0], [item for item in rest if item != "--"])
    from tests.fuzz.engine import fuzz
    from tests.fuzz.targets import TARGETS

    outcomes = []
    for name in options.targets or TARGETS:
        outcomes.append(
            fuzz(name, options.executions, options.seconds, options.seed, options.first)
        )
        for number, (what, data) in enumerate(outcomes[-1].findings.values()):
            path = Path(f"finding-{name}-{number}")
            path.write_bytes(data)
            sys.stderr.write(f"{path}: {what}\n")
        text = table(outcomes)
        sys.stdout.write(text.splitlines()[-3] + "\n")
        sys.stdout.flush()
        if options.report:
            options.report.write_text(text)
    return 5 if any(outcome.count for outcome in outcomes) else 0


def table(outcomes: Sequence[Outcome]) -> str:
    """The report."""
    lines = [
        "| parser | executions | accepted | findings | slowest, s | growth of memory, MB | processor, s |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.name} | {one.executions} | {one.accepted} | {one.count} | {one.slowest:.2f} | {one.growth >> 20}"
        f" | {one.seconds:.0f} |"
        for one in outcomes
    ]
    return "\n".join([*lines, "", f"Python {platform.python_version()}."]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
