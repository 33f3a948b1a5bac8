"""Products by rows, for cliffs: every kind of weight, small and large, with the processor as it is and limited.

    python benchmarks/cpu_sweep.py [--threads 1] [--limits none,avx2] [--large] [--kinds NAME,NAME]

1 to 1024 rows, powers of two and their neighbours. Printed are milliseconds (least of some repetitions, of the
processor's time on one thread, of the clock on several), and every pair of numbers of rows, the second at
most twice the first, where the second costs more than `MOST` times as much: there should be none.

A limit runs in a process of its own, with all that computes here kept to it: ``ONEDNN_MAX_CPU_ISA``,
``ATEN_CPU_CAPABILITY``, ``MKL_ENABLE_INSTRUCTIONS`` and ``QUANTFORGE_CPU_LIMIT``.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from quantforge_kernels.layers import linear  # noqa: E402
from quantforge_kernels.matmul_spec import MatmulSpec  # noqa: E402
from quantforge_kernels.select import select_kernel  # noqa: E402

MOST = 2.5
ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 63, 64, 65, 96, 127, 128, 129, 256, 512, 1024)
SMALL, LARGE = ((256, 256), (128, 256)), ((8192, 2048), (2048, 8192))
SHORT, LONG = 0.05, 1.0  # seconds: repetitions of a product, at least; at most, beyond two
LEAST = 5  # repetitions of a product that is short
ROUNDS = 6  # of products that look steep: other work on the machine does as well
# Bytes that were allocated and freed before, as whoever has loaded a model did: until then glibc may hand the memory of
# each product back, and some hundred faults of pages are a half of 1024 small rows.
FREED = 24 << 20
LIMITS = {
    "none": {},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "QUANTFORGE_CPU_LIMIT": "avx2",
    },
}  # fmt: skip
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DENSE = {"bfloat16": BF16, "float16": F16, "float32": F32}
# Bits, columns of a group (0: the row), type of activations, and what else a problem says.
PACKED: dict[str, tuple[int, int, torch.dtype, dict[str, Any]]] = {
    "int4 g32": (4, 32, BF16, {}),
    "int4 g32, float16": (4, 32, F16, {}),
    "int4 g32, float32": (4, 32, F32, {}),
    "int4 g128 zeros": (4, 128, BF16, {"symmetric": False}),
    "Q4_K": (4, 32, BF16, {"symmetric": False, "has_minima": True, "superblock_size": 256}),
    "Q6_K": (6, 16, BF16, {"superblock_size": 256}),
    "int3 g64": (3, 64, BF16, {}),
    "int2 g256": (2, 256, BF16, {}),
    "int8 row": (8, 0, BF16, {}),
    "int8 x int8": (8, 0, BF16, {"activation_kind": "int8"}),
    "nf4 g64": (4, 64, BF16, {"grid": "table"}),
    "fp8 row": (8, 0, BF16, {"grid": "fp8"}),
}  # fmt: skip


@torch.inference_mode()
def main() -> None:
    """Run every limit in its own process, or sweep in this one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limits", default="none,avx2")
    parser.add_argument("--large", action="store_true", help="the widths of Llama 3.2 1B as well")
    parser.add_argument("--kinds", default="", help="some of them; all when left out")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        sys.exit(sweep(options))
    steep = 0
    for name in options.limits.split(","):
        print(f"limit: {name}", flush=True)
        command = [sys.executable, *sys.argv, "--here"]
        steep += subprocess.run(command, env=os.environ | LIMITS[name], check=False).returncode
    sys.exit(steep > 0)


def sweep(options: argparse.Namespace) -> int:
    """Print times and steep steps of all shapes and kinds; return how many steps."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch.empty(FREED, dtype=torch.uint8)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    names = options.kinds.split(",") if options.kinds else [*DENSE, *PACKED]
    steep = 0
    for shape in SMALL + (LARGE if options.large else ()):
        for name in names:
            multiply, dtype = layer(name, shape)
            times = measured(multiply, shape[1], dtype, clock)
            text = " ".join(f"{rows}:{1000 * seconds:.3g}" for rows, seconds in times.items())
            print(f"{shape[0]}x{shape[1]} {name}: {text}", flush=True)
            for few, many, ratio in steps(times):
                steep += 1
                print(f"  STEEP: {few} to {many} rows, {ratio:.1f} times", flush=True)
    return steep


def layer(
    name: str, shape: tuple[int, int]
) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype]:
    """A product with a weight of some kind, and the type of its activations."""
    if name in DENSE:
        weight = torch.randn(shape).to(DENSE[name])
        return lambda x: linear(x, weight), DENSE[name]
    bits, group, dtype, more = PACKED[name]
    form: dict[str, Any] = {"symmetric": True} | more
    problem = MatmulSpec(*shape, bits, group or shape[1], dtype=dtype, device="cpu", **form)
    kernel, groups = select_kernel(problem), (shape[0], problem.groups_per_row)
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    parameters = {"scales": torch.rand(groups).half()}
    if problem.grid == "table":
        parameters["table"] = torch.linspace(-1, 1, 16)
    if problem.grid == "int" and not problem.symmetric and not problem.has_minima:
        parameters["zeros"] = torch.full(groups, 8, dtype=torch.uint8)
    if problem.superblock_size:
        parameters["scales"] = torch.randint(1, 63, groups, dtype=torch.uint8)
        parameters["d"] = torch.rand(shape[0], shape[1] // problem.superblock_size).half()
        if problem.has_minima:
            parameters |= {"mins": parameters["scales"], "dmin": parameters["d"]}
    packed = kernel.prepare(codes, parameters, problem)
    return lambda x: kernel.matmul(x, packed, problem), dtype


def measured(
    multiply: Callable[[torch.Tensor], torch.Tensor],
    columns: int,
    dtype: torch.dtype,
    clock: Callable[[], float],
) -> dict[int, float]:
    """Seconds of a product by rows. Where a step is steep, both sides are measured again, some times at most."""
    given = {rows: torch.randn(rows, columns).to(dtype) for rows in ROWS}
    times: dict[int, float] = dict.fromkeys(ROWS, math.inf)
    again = set(ROWS)
    for _ in range(ROUNDS):
        for rows in sorted(again):
            x = given[rows]
            times[rows] = min(times[rows], least(lambda x=x: multiply(x), clock))
        again = {rows for few, many, _ in steps(times) for rows in (few, many)}
        if not again:
            break
    return times


def steps(times: dict[int, float]) -> list[tuple[int, int, float]]:
    """Pairs of rows, the second at most twice the first, with more than `MOST` times its time."""
    pairs = ((few, many) for few in times for many in times if few < many <= 2 * few)
    ratios = ((few, many, times[many] / times[few]) for few, many in pairs)
    return [found for found in ratios if found[2] > MOST]


def least(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of some work: the least of several."""
    work()
    times: list[float] = []
    while len(times) < 2 or (sum(times) < LONG and (len(times) < LEAST or sum(times) < SHORT)):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)


if __name__ == "__main__":
    main()
