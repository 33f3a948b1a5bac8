"""Measure `verify`: plant defects in copies of healthy artifacts, by seed, and count what it finds.

    python scripts/verify_defects.py --work DIR [--seed N] [--report FILE.md] [--json FILE.jsonl] [--jobs N]
    python scripts/verify_defects.py --work DIR --seed N --only bundled-17 --keep     # leaves one damaged artifact
    python scripts/verify_defects.py --work DIR --time [--gigabytes 8]                # processor time and memory
    python scripts/verify_defects.py --work DIR --seed 5 --bundled 60 --released 0 --no-healthy --compare FILE.jsonl

The last one plants the defects of ``scripts/defects/planted_seed_5.jsonl`` again, which ``--list`` wrote: exit 5 if any
is another one, or is no longer found. Its artifacts are of the models in ``../shared/models``.

Healthy artifacts of all methods and formats, of bundled models and of a small released one, are made once in DIR; each
is verified with and without its source, and what is said of it is a false alarm. Copies without a manifest are then
damaged, in turn over kinds and formats. A defect counts if the divergence from the source over real text grows by more
than 3 standard errors and 10 % of the artifact's own, or a loader reads something else (`scripts/defects/judge.py`). It
is found if an error or a warning names the tensor or the file that is damaged. With ``--json`` a run that was stopped
goes on. Exits 5 if a target is missed (`scripts/defects/results.py`).
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
    parser.add_argument("--bundled", type=int, default=312, help="defects in bundled models")
    parser.add_argument("--released", type=int, default=78, help="defects in the released model")
    parser.add_argument("--only", help="one defect: bundled-N or released-N")
    parser.add_argument("--artifacts", default="", help="only those whose name contains this")
    parser.add_argument("--keep", action="store_true", help="leave damaged copies in WORK/damaged")
    parser.add_argument("--no-healthy", action="store_true", help="do not verify the healthy ones")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each on one thread")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--list", type=Path, help="write what was planted, what counts and is found"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        help="a file of --list: exit 5 unless the same was planted, as much is found",
    )
    parser.add_argument("--time", action="store_true", help="measure time and memory instead")
    parser.add_argument(
        "--gigabytes", type=float, default=8.0, help="of random weights, for --time"
    )
    options = parser.parse_args(arguments)
    began = time.monotonic()
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.time:
        from scripts.defects.cost import costs

        return _write(options, "\n".join(costs(options.work, options.gigabytes)) + "\n", 0)
    from scripts.defects import results, session

    with tempfile.TemporaryDirectory() as folder:
        log = session.Log(options.json or Path(folder) / "log")
        _share_out(options, log)
        records, healthy = log.all()
    if options.list:
        options.list.write_text(results.listed(records))
    if options.compare:
        return results.compare(options.compare.read_text(), results.listed(records))
    text = results.table(records, healthy, _notes(options, time.monotonic() - began))
    return _write(options, text, 5 if any(results.failures(records, healthy)) else 0)


def _write(options: argparse.Namespace, text: str, code: int) -> int:
    sys.stdout.write(text)
    if options.report:
        options.report.write_text(text)
    return code


def _share_out(options: argparse.Namespace, log: Log) -> None:
    """Let every process take its numbers, in the order of numbers; imports happen once."""
    from scripts.defects.artifacts import NO_PROGRAMS

    os.environ.update([NO_PROGRAMS])
    import torch

    import scripts.defects.session  # noqa: F401  # forked with it

    torch.set_num_threads(1)
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
    """Do one part: its healthy artifacts, then its defects."""
    from scripts.defects import session
    from scripts.defects.artifacts import Shop

    done = log.done()
    every = Shop(options.work).all(only=options.artifacts)
    if not options.no_healthy and options.only is None:
        for item in every[part :: options.jobs]:
            if item.name not in done:
                log.add(session.looked(item))
    names = [f"bundled-{n}" for n in range(options.bundled)]
    names += [f"released-{n}" for n in range(options.released)]
    if options.only is not None:
        names = [options.only]
    for name in names[part :: options.jobs]:
        bases = [b for b in every if b.family and b.released is name.startswith("released")]
        if name in done:
            continue
        found = session.tried(
            bases, options.seed, name, options.work / "damaged", keep=options.keep
        )
        if found is not None:
            log.add(found)


def _notes(options: argparse.Namespace, seconds: float) -> list[str]:
    names = ("torch", "transformers", "tokenizers", "gguf")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return [
        f"`python scripts/verify_defects.py --work DIR --seed {options.seed} --bundled {options.bundled}"
        f" --released {options.released}`, {seconds:.0f} s, Python {platform.python_version()}, {versions}."
    ]


if __name__ == "__main__":
    sys.exit(main())
