"""Several ranks on one model, against one process with as many threads, and with one.

    python benchmarks/workers.py --width 2048 --blocks 8 --samples 16 [--workers 2] [--out FILE.json]
    python benchmarks/workers.py --model MODEL --calibration cal.txt
    python benchmarks/workers.py --model MODEL --workers 1 --repeats 5      # what claims cost: seconds of the processor

Every rank is a process on one thread that has quantized the demo model before, for imports and compiling. Printed are
seconds of the clock from the start of all to the end of the last, for which the machine has to be idle, those of the
processor that all of them took, and whether the weights have the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from release import synthetic

SMALL = Path(__file__).parents[1] / "models" / "demo"

RUN = r"""
import os, sys, tempfile, time
from pathlib import Path
from quantforge import Settings, quantize

os.environ["TORCHELASTIC_RUN_ID"] = "benchmark"  # as torchrun sets it: calibrated runs are shared by its ranks alone

model, small, text, samples, length, scheme, method, out, threads, join = sys.argv[1:]
rows = {"calibration": text, "scheme": scheme, "method": method}

def run(model, out, join, **size):
    quantize(model, None, out, Settings(threads=int(threads), join=join), **rows, **size)

with tempfile.TemporaryDirectory() as scratch:
    for times, warm in enumerate({False, join == "True"}):
        run(small, Path(scratch, str(times)), warm, samples=2, length=32)
print("ready", flush=True)
sys.stdin.readline()
begun = time.process_time()
run(model, out, join == "True", samples=int(samples), length=int(length))
print(time.process_time() - begun)
"""


def main() -> None:
    """Time every way in turn, as often as asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--calibration", default="builtin")
    parser.add_argument("--width", type=int, default=2048, help="of a synthetic model")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--scheme", default="int4:g128:sym")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ways = {
        "one process, 1 thread": (1, 1, False),
        "one worker": (1, 1, True),
    }
    if options.workers > 1:
        ways[f"{options.workers} workers"] = (options.workers, 1, True)
        ways[f"one process, {options.workers} threads"] = (1, options.workers, False)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    busy: dict[str, list[float]] = {name: [] for name in ways}
    digests = set()
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or synthetic(Path(scratch, "model"), options)
        for turn in range(options.repeats):
            for name, way in ways.items():
                out = Path(scratch, f"{turn}-{len(digests)}-{name}")
                clock, processor = timed(options, model, out, *way)
                seconds[name].append(clock)
                busy[name].append(processor)
                digests.add(digest(out))
                print(f"{name}: {clock:.1f} s, of the processor {processor:.2f} s", flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    first, *others = medians.values()
    found = {
        "seconds": medians,
        "processor seconds": {name: statistics.median(values) for name, values in busy.items()},
        "speed": dict(zip([*medians][1:], [first / other for other in others], strict=True)),
        "same bytes": len(digests) == 1,
    }
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def timed(
    options: argparse.Namespace, model: Path, out: Path, count: int, threads: int, join: bool
) -> tuple[float, float]:
    """Return the seconds, of the clock and of the processor, of one result once all processes are ready."""
    rows = [options.calibration, options.samples, options.length, options.scheme, options.method]
    asked = [sys.executable, "-c", RUN, model, SMALL, *rows, out, threads, join]
    processes = [
        subprocess.Popen([*map(str, asked)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise SystemExit("a worker did not start")
    start = time.monotonic()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
    if any(process.wait() for process in processes):
        raise SystemExit("a worker failed")
    clock = time.monotonic() - start
    return clock, sum(float(process.stdout.read()) for process in processes if process.stdout)


def digest(out: Path) -> str:
    """Return the digest of the weights of a result."""
    found = hashlib.sha256()
    for path in sorted(out.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
