"""Plant defects in healthy artifacts, by seed, and count how many `verify` finds.

    python scripts/verify_defects.py --work DIR [--seed N] [--count 300] [--report FILE.md] [--json FILE.jsonl]
    python scripts/verify_defects.py --work DIR --seed N --only NUMBER --keep     # leaves one damaged artifact

With ``--json`` a run that was stopped goes on. Healthy artifacts of all methods and formats are made once in DIR, and
each is verified: what is said of them is a false alarm. Then copies are damaged without their manifest: scales, codes,
zero points, exchanged and kept tensors, configurations, tokenizers, settings, files, keys of GGUF, raw bytes, in
turn over kinds and formats. A defect counts if the divergence from the source over real text grows by more than 3
standard errors and 10 % of the artifact's own, or a loader reads something else (`scripts/defects/judge.py`); `verify`
is asked with and without the source. Exits 5 under 95 % in all or 90 % in any kind of which ten count, or at a false
alarm.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
if TYPE_CHECKING:
    from scripts.defects.session import Log


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", type=int)
    parser.add_argument("--artifacts", default="", help="only those whose name contains this")
    parser.add_argument("--keep", action="store_true", help="leave damaged copies in WORK/damaged")
    parser.add_argument("--no-healthy", action="store_true", help="do not verify the healthy ones")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each on one thread")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    from scripts.defects import session

    with tempfile.TemporaryDirectory() as folder:
        log = session.Log(options.json or Path(folder) / "log")
        _share_out(options, log)
        records, alarms, count = log.all()
    text = session.table(records, count, alarms, _notes(options, time.monotonic() - began))
    sys.stdout.write(text)
    if options.report:
        options.report.write_text(text)
    return 0 if session.passes(records, alarms) else 5


def _share_out(options: argparse.Namespace, log: Log) -> None:
    """Let every process take its numbers, in the order of numbers; imports happen once."""
    import torch

    from scripts.defects.judge import warm

    torch.set_num_threads(1)
    warm()
    children = []
    for part in range(1, options.jobs):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _work(options, log, part)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    _work(options, log, 0)
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"a process ended with {os.waitstatus_to_exitcode(status)}: run it again")


def _work(options: argparse.Namespace, log: Log, part: int) -> None:
    """Do one part: its healthy artifacts in between its defects."""
    from scripts.defects import session
    from scripts.defects.artifacts import Shop

    done = log.done()
    every = list(Shop(options.work).all(only=options.artifacts))
    mine = [] if options.no_healthy or options.only is not None else every[part :: options.jobs]
    mine = [item for item in mine if item.name not in done]
    wanted = range(options.count) if options.only is None else [options.only]
    numbers = [n for n in wanted[part :: options.jobs] if n not in done]
    bases = [item for item in every if item.family]
    place = options.work / "damaged"
    for turn in range(max(len(numbers), 3 * len(mine))):
        if turn % 3 == 0 and turn // 3 < len(mine):
            log.healthy(mine[turn // 3])
        if turn < len(numbers):
            found = session.tried(bases, options.seed, numbers[turn], place, keep=options.keep)
            if found is not None:
                log.record(found)


def _notes(options: argparse.Namespace, seconds: float) -> list[str]:
    names = ("torch", "transformers", "tokenizers", "gguf")
    return [
        f"`python scripts/verify_defects.py --work DIR --seed {options.seed} --count {options.count}`,"
        f" {seconds:.0f} s, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in names)
        + "."
    ]


if __name__ == "__main__":
    sys.exit(main())
