"""Give hostile input to whole commands: thousands of cases by seed, each in a fork under limits.

    python scripts/hostile.py [--cases N] [--first N] [--seed N] [--work DIR] [--report FILE.md]

What is made and judged is in `tests/fuzz/hostile`. Nothing but results and typed refusals may come out, within 10 s of
the processor and 600 MB above what imports hold. Exits 5 if anything else does.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def main() -> None:
    """Make the tree, run the cases, tell what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()

    from tests.conftest import make_tiny
    from tests.fuzz.hostile.judge import Verdict, judge_all
    from tests.fuzz.hostile.tree import build

    codes: Counter[int] = Counter()
    slowest, most = 0.0, 0

    def tell(verdict: Verdict) -> None:
        nonlocal slowest, most
        codes[verdict.code] += 1
        slowest, most = max(slowest, verdict.seconds), max(most, verdict.bytes)
        if verdict.wrong:
            case = verdict.case
            print(f"{case.number}: {case.arguments!r:.300}\n  {case.changes}", flush=True)
            print("  " + "\n  ".join(repr(wrong) for wrong in verdict.wrong), flush=True)

    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        root = Path(name) / "sound"
        root.mkdir()
        build(root, make_tiny)
        numbers = range(asked.first, asked.first + asked.cases)
        found = judge_all(asked.seed, numbers, root, tell)
        os.chdir("/")
    row = f"| {asked.seed} | {asked.cases} | {len(found)} | {codes[0]} | {slowest:.1f} | {most >> 20} |"
    print(row, dict(sorted(codes.items())))
    if asked.report:
        asked.report.write_text(
            "# Hostile input\n\n`python scripts/hostile.py --cases N --seed N`, "
            f"Python {platform.python_version()}.\n\n"
            "| seed | commands | findings | accepted | slowest, s of the processor | most memory above imports, MB |\n"
            f"|---|---|---|---|---|---|\n{row}\n"
        )
    sys.exit(5 if found else 0)


if __name__ == "__main__":
    main()
