"""Seconds of a run against what `plan` forecast, for several methods.

    python benchmarks/forecast.py MODEL --methods rtn gptq awq --samples 16 --out PREFIX

Each run is a process of its own with one thread. Its seconds are those of the processor, imports included, so that
other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Plan and run by each method, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq", "awq"])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for method in options.methods:
        words = [
            "--method",
            method,
            "--bits",
            "4",
            "--samples",
            str(options.samples),
            "--threads",
            "1",
        ]
        rows.append({"method": method, **compared(options.model, words)})
        print(json.dumps(rows[-1]), flush=True)
    lines = [
        "| method | forecast, s | processor, s | forecast / processor | disk forecast / written |",
        "|---|---|---|---|---|",
        *(
            f"| {row['method']} | {row['forecast']:.0f} | {row['seconds']:.0f} | {row['forecast'] / row['seconds']:.2f}"
            f" | {row['disk'] / row['written']:.3f} |"
            for row in rows
        ),
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def compared(model: Path, words: list[str]) -> dict[str, float]:
    """Return the forecast of a run, and what it took."""
    product = [sys.executable, "-m", "quantforge"]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        plan = [
            *product,
            "plan",
            str(model),
            *words,
            "-o",
            str(out),
            "--json",
        ]
        told = json.loads(subprocess.run(plan, check=True, capture_output=True).stdout)["forecast"]
        process = subprocess.Popen([*product, "quantize", str(model), *words, "-q", "-o", str(out)])
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"quantize {' '.join(words)}: exit code {process.returncode}")
        written = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return {
        "forecast": sum(told["seconds"].values()),
        "seconds": used.ru_utime + used.ru_stime,
        "disk": told["disk_bytes"],
        "written": written,
    }


if __name__ == "__main__":
    main()
