"""Time the same work with two versions of this repository, in short turns: is anything slower?

    python scripts/same_speed.py [--before COMMIT] [--rounds 4] [--only TEXT ...] [--out FILE.json]

One process of each version waits for the name of a task and answers with the processor time that the task took. The
tasks are small pieces of `benchmarks/speed.py`, `cpu_decode.py`, `gguf_encode.py` and `release.py`, with each version's
own copy of them: quantize a random model in several ways, make a release, encode a matrix into each GGUF type, decode
tokens. A round runs a task as before, after, after, before, so that a drift of the machine's speed falls on both. A
task is slower if its median is worse by more than `ALLOWED` and the difference between the older version's own two
medians; then the exit code is 5. Processor time hides most other work on the machine, but not all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

ALLOWED = 0.03
LEAST = 1.0  # seconds of a turn, in which a short task is repeated: its first run finds nothing in the caches
SIZES = SimpleNamespace(width=512, ffn=None, blocks=2, tokens=4 * 512)  # of the quantized model
WAYS: dict[str, dict[str, Any]] = {
    "gptq int4": {"method": "gptq", "bits": 4},
    "gptq int4 --tune 0 --refine 0": {"method": "gptq", "bits": 4, "tune": 0, "refine": 0},
    "awq int4": {"method": "awq", "bits": 4, "format": "awq"},
    "gptq Q4_K_M": {"method": "gptq", "type": "Q4_K_M", "format": "gguf"},
    "fp8": {"method": "rtn", "format": "fp8"},
}
RELEASE = """model = "{model}"
[calibration]
samples = 16
length = 256
[[variant]]
name = "q4"
recipe = {{method = "gptq", type = "Q4_K_M"}}
[[variant]]
name = "int4"
recipe = {{method = "gptq", scheme = "int4:g128:sym"}}
format = "compressed-tensors"
"""


def main() -> int:
    """Run every task with both versions in turn; print the figures and return the exit code."""
    from same_results import BEFORE, ROOT

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=[""], help="tasks that contain one of these")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder, "before")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", older, options.before], check=True)
        try:
            with Worker(older, folder) as before, Worker(ROOT, folder) as after:
                tasks = [t for t in before.tasks if any(text in t for text in options.only)]
                for task in tasks:
                    figures[task] = measured(task, before, after, options.rounds)
                    report({task: figures[task]})
                    if options.out:
                        options.out.write_text(json.dumps(figures, indent=1) + "\n")
        finally:
            subprocess.run([*git, "remove", "--force", older], check=True)
    slower = [task for task, times in figures.items() if is_slower(times)]
    print(f"{len(figures)} tasks, {len(slower)} slower: {', '.join(slower) or 'none'}")
    return 5 if slower else 0


class Worker:
    """A process of one version that runs tasks by name."""

    def __init__(self, tree: Path, folder: str) -> None:
        """Start the process with the packages and benchmarks of ``tree``."""
        packages = os.pathsep.join(str(tree / part) for part in (".", "kernels", "calibration"))
        self.process = subprocess.Popen(
            [sys.executable, __file__, "work", tempfile.mkdtemp(dir=folder)],
            cwd=tree,
            env=os.environ
            | {"PYTHONPATH": packages, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.tasks: list[str] = json.loads(self._pipe(self.process.stdout).readline())

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def seconds(self, task: str) -> float:
        """Run a task; return its processor time."""
        stdin = self._pipe(self.process.stdin)
        stdin.write(task + "\n")
        stdin.flush()
        return float(self._pipe(self.process.stdout).readline())

    def __enter__(self) -> Worker:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._pipe(self.process.stdin).close()
        self.process.wait()


def measured(task: str, before: Worker, after: Worker, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the older version's two runs of every round, and those of the newer one."""
    times: dict[str, list[float]] = {"before": [], "again": [], "after": []}
    for worker in (before, after):  # compiles and imports
        worker.seconds(task)
    for _ in range(rounds):
        times["before"].append(before.seconds(task))
        times["after"] += [after.seconds(task), after.seconds(task)]
        times["again"].append(before.seconds(task))
    return times


def ratio(times: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Return the newer version's median by the older one's, and the difference between the latter's two medians."""
    older = statistics.median([*times["before"], *times["again"]])
    own = statistics.median(times["before"]) / statistics.median(times["again"])
    return statistics.median(times["after"]) / older, abs(own - 1)


def is_slower(times: Mapping[str, Sequence[float]]) -> bool:
    """Return whether the newer version is slower by more than is allowed."""
    found, own = ratio(times)
    return found > 1 + ALLOWED + own


def report(figures: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Print the ratios."""
    for task, times in figures.items():
        found, own = ratio(times)
        mark = "  slower" if is_slower(times) else ""
        print(f"{task:40} {found:6.3f}  the older one's own runs {own:6.1%}{mark}", flush=True)


# ---- in a worker, which imports one version


def work(folder: Path) -> None:
    """Print the tasks' names; run each that is asked for and print its seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a task prints is no answer
    found = {**quantizing(folder), **encoding(), **decoding()}
    print(json.dumps(list(found)), file=answers, flush=True)
    for line in sys.stdin:
        task, count, start = found[line.strip()], 0, time.process_time()
        while (took := time.process_time() - start) < LEAST:
            task()
            count += 1
        print(took / count, file=answers, flush=True)


def quantizing(folder: Path) -> dict[str, Callable[[], object]]:
    """Quantize a random model in several ways, and make a release of two of them."""
    import quantforge

    sys.path.insert(0, "benchmarks")
    import release
    import speed

    random = speed.synthetic(folder / "random", SIZES)
    released = release.synthetic(folder / "released", SIZES)  # its tokenizer fits GGUF files
    text = {"calibration": str(random / "text.txt"), "samples": SIZES.tokens // 512, "length": 512}
    settings = quantforge.Settings(threads=1)

    def quantize(options: dict[str, Any]) -> None:
        is_gguf = options.get("format") == "gguf"
        model = released if is_gguf else random
        rows = text if options["method"] != "rtn" else {}
        with tempfile.TemporaryDirectory(dir=folder) as place:
            out = Path(place, "out.gguf" if is_gguf else "out")
            quantforge.quantize(str(model), out=out, settings=settings, **rows, **options)

    asked = folder / "release.toml"
    asked.write_text(RELEASE.format(model=released))

    def make_release() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            quantforge.release(asked, Path(place, "release"), settings)

    tasks: dict[str, Callable[[], object]] = {
        f"quantize {name}": lambda options=options: quantize(options)  # type: ignore[misc]
        for name, options in WAYS.items()
    }
    return tasks | {"release": make_release}


def encoding() -> dict[str, Callable[[], object]]:
    """Encode a matrix into each GGUF type, with ggml's bytes and with our search."""
    import gguf_encode
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(128, 4096, generator=generator) * 0.02).half()
    importance = torch.rand(4096, generator=generator) ** 2 + 0.01
    return {
        f"encode {grid} {search}": lambda grid=grid, search=search: gguf_encode.ours(  # type: ignore[misc]
            weight, grid, importance, search
        )
        for grid in gguf_encode.TYPES
        for search in ("reference", "search")
    }


def decoding() -> dict[str, Callable[[], object]]:
    """Decode tokens with 4-bit weights and with bfloat16 ones."""
    import cpu_decode
    import torch

    from quantforge.notation import parse

    torch.manual_seed(0)
    config = cpu_decode.llama_1b(2)
    models = {
        "bf16": cpu_decode.random_model(config, None, "cpu"),
        "int4": cpu_decode.random_model(
            config, parse("int4:g128:sym:bf16"), "cpu", parse("int8:row:sym:bf16")
        ),
    }
    sides = {name: cpu_decode.own_side(model, 2000) for name, model in models.items()}
    return {f"decode {name}": lambda side=side: side(12) for name, side in sides.items()}  # type: ignore[misc]


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(Path(sys.argv[2]))
    else:
        sys.exit(main())
