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
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


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
    parser.add_argument(
        "--keep", action="store_true", help="leave the damaged copies in WORK/damaged"
    )
    parser.add_argument("--no-healthy", action="store_true", help="do not verify the healthy ones")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    import torch

    from scripts.defects import session
    from scripts.defects.artifacts import Shop
    from scripts.defects.judge import warm

    torch.set_num_threads(1)
    warm()
    began = time.monotonic()
    options.work.mkdir(parents=True, exist_ok=True)
    healthy = list(Shop(options.work.resolve()).all(only=options.artifacts))
    alarms = []
    if not options.no_healthy and options.only is None:
        for item in healthy:
            for source in (item.source, None):
                _, said = session.look(item.path, source)
                alarms += [
                    f"{item.name}{'' if source else ' without the source'}: {text}" for text in said
                ]
        sys.stderr.write(
            f"{len(healthy)} healthy, {len(alarms)} alarms, {time.monotonic() - began:.0f} s\n"
        )
        sys.stderr.writelines(f"  ALARM {alarm}\n" for alarm in alarms)
    records = session.restored(options.json) if options.json else []
    done = {record.number for record in records}
    wanted = {options.only} if options.only is not None else set(range(options.count)) - done
    bases = [item for item in healthy if item.family]
    place = options.work / "damaged"
    for record in session.tried(
        bases, options.seed, options.count, place, wanted=wanted, keep=options.keep
    ):
        records.append(record)
        state = "harmless" if not record.counts else "found" if record.found else "MISSED"
        sys.stderr.write(
            f"{record.number:3} {state:8} {record.seconds:4.1f} s {record.kind} | {record.artifact} | {record.text}"
            f" | {record.reason} | {'; '.join(record.said[:1])}\n"
        )
        sys.stderr.flush()
        if options.json:
            session.save(records, options.json)
    names = ("torch", "transformers", "tokenizers", "gguf")
    notes = [
        f"`python scripts/verify_defects.py --work DIR --seed {options.seed} --count {options.count}`,"
        f" {time.monotonic() - began:.0f} s, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in names)
        + "."
    ]
    text = session.table(records, len(healthy), alarms, notes)
    sys.stdout.write(text)
    if options.report:
        options.report.write_text(text)
    return 0 if session.passes(records, alarms) else 5


if __name__ == "__main__":
    sys.exit(main())
