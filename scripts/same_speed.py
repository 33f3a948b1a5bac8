"""Time the same work with two versions of this repository, taking turns: is anything slower?

    python scripts/same_speed.py [--before COMMIT] [--turns 3] [--only NAME ...] [--out FILE.json]

Each version runs its own copies of `benchmarks/speed.py`, `cpu_decode.py`, `gguf_encode.py` and `release.py`, in sizes
that take minutes, on one thread. A turn runs both versions, the order changing from turn to turn. A figure is slower
if its median is worse by more than `ALLOWED` and the difference between the older version's own runs; then it exits 5.
Other work on the machine makes the figures useless.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from same_results import BEFORE, ROOT

ALLOWED = 0.03
# The peer of speed.py is another tool, which says nothing here: only its own side runs.
SPEED = """
import argparse, json, sys
from pathlib import Path
sys.path.insert(0, "benchmarks")
import speed
scratch = Path(sys.argv[1]).parent
options = argparse.Namespace(width=1024, ffn=None, blocks=2, tokens=8192)
model = speed.synthetic(scratch / "model", options)
rows = options.tokens // speed.LENGTH
run = (model, model / "text.txt", scratch / "out", rows, speed.LENGTH, 1)
seconds = {way: speed.ours((*run, json.dumps(given))) for way, given in speed.WAYS.items()}
Path(sys.argv[1]).write_text(json.dumps(seconds))
"""
COMMANDS: dict[str, list[str]] = {
    "speed": ["-c", SPEED, "OUT"],
    "cpu_decode": ["benchmarks/cpu_decode.py", "--layers", "2", "--rounds", "5", "--out", "OUT"],
    "gguf_encode": ["benchmarks/gguf_encode.py", "--rows", "256", "--columns", "4096", "--out", "OUT"],
    "release": ["benchmarks/release.py", "--width", "512", "--samples", "32", "--out", "OUT"],
}  # fmt: skip


def main() -> int:
    """Run every benchmark with both versions in turn; print the figures and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"before": [], "after": []})
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder, "before")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", older, options.before], check=True)
        try:
            sides = [("before", older), ("after", ROOT)]
            for turn in range(options.turns):
                for name in options.only:
                    for side, tree in sides if turn % 2 == 0 else reversed(sides):
                        for key, seconds in costs(name, measured(name, tree)).items():
                            figures[f"{name}: {key}"][side].append(seconds)
                        print(turn, name, side, flush=True)
                if options.out:
                    options.out.write_text(json.dumps(figures, indent=1) + "\n")
        finally:
            subprocess.run([*git, "remove", "--force", older], check=True)
    return report(figures)


def measured(name: str, tree: Path) -> Any:
    """Return the document that a benchmark of one version writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        packages = os.pathsep.join(str(tree / part) for part in (".", "kernels", "calibration"))
        subprocess.run(
            [sys.executable, *(str(out) if word == "OUT" else word for word in COMMANDS[name])],
            cwd=tree,
            env=os.environ
            | {"PYTHONPATH": packages, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            check=True,
        )
        return json.loads(out.read_text())


def costs(name: str, found: Any) -> Mapping[str, float]:
    """Return what our own sides took: seconds, or seconds for a token or a million weights."""
    if name == "speed":
        return {str(way): float(seconds) for way, seconds in found.items()}
    if name == "cpu_decode":
        sides = found["sides"].items()
        return {
            side: 1 / row["tokens_per_processor_second"] for side, row in sides if "ours" in side
        }
    if name == "gguf_encode":
        return {
            f"{row['type']}, {kind}, {way}": 1 / row[kind]["million_weights_per_second"][at]
            for row in found[1:]
            for kind in row.keys() - {"type"}
            for at, way in ((1, "reference"), (2, "search"))
        }
    return {variant: one["seconds"] for variant, one in found["alone"].items()} | {
        "all in one pass": found["together"]["seconds"]
    }


def report(figures: Mapping[str, Mapping[str, list[float]]]) -> int:
    """Print the medians and their ratios; return 5 if a figure is slower, else 0."""
    slower = 0
    for name, sides in figures.items():
        before, after = statistics.median(sides["before"]), statistics.median(sides["after"])
        spread = (max(sides["before"]) - min(sides["before"])) / before
        worse = after / before > 1 + ALLOWED + spread
        slower += worse
        print(
            f"{name:60} {before:10.4g} {after:10.4g}  {after / before:6.3f}  before's own runs {spread:6.1%}"
            f"{'  slower' if worse else ''}"
        )
    print(f"{len(figures)} figures, {slower} slower")
    return 5 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
