"""Speed of encoding a matrix into ggml's types on one thread: ours and ggml's own quantizers, in one run.

    python benchmarks/gguf_encode.py --rows 2048 --columns 8192 --out PREFIX

The peer is the library in the xllamacpp wheel, whose `ggml_quantize_chunk` is what llama-quantize calls. Both
read float16 and leave the bytes of blocks; converting to float32 is counted for both, reading and writing files for
neither. "reference" makes ggml's bytes, "search" is the default; after each its ratio to ggml. Seconds are processor
time of the thread, so that other work on the machine counts less. Compiling our kernels, once in a process, is measured
apart. The errors are of the weighted squares that both searches minimise, relative to the weights, ours by ggml's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from peers.ggml import quantized
from torch import Tensor

from quantforge.notation import parse
from quantforge.packers.ggml.blocks import decode_blocks, pack_blocks
from quantforge.packers.ggml.packer import encode_rows
from quantforge.packers.lattices import LATTICES
from quantforge.quantizers import rtn

ROWS = 256  # at a time, as a streaming writer would
TYPES = [
    "q8_0",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_xs",
    "iq4_nl",
]
TYPES += ["tq1_0", "tq2_0", "mxfp4", *LATTICES]
# Types of ggml, without an importance
QUICK = {"q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0", "mxfp4"}


def ours(weight: Tensor, grid: str, importance: Tensor | None, search: str = "search") -> Tensor:
    """Return the blocks of ``weight`` by quantforge."""
    if grid in LATTICES:
        schemes = {"w": parse(grid)}
        return pack_blocks(
            rtn.quantize_matrices({"w": weight.float()}, importance, schemes, search)["w"]
        )
    return pack_blocks(encode_rows(weight.float(), parse(grid), importance, search))


def seconds(run: Callable[[Tensor], Tensor], weight: Tensor, repeats: int) -> float:
    """Return the median time over all of ``weight``, after one run that is not counted: it may compile."""
    times = []
    run(weight[:1])
    for _ in range(repeats):
        start = time.thread_time()
        for rows in weight.split(ROWS):
            run(rows)
        times.append(time.thread_time() - start)
    return statistics.median(times)


def error(weight: Tensor, raw: Tensor, grid: str, importance: Tensor) -> float:
    """Return the weighted squared error, relative."""
    x = weight.float()
    weights = importance * (x.square() + x.square().mean(1, keepdim=True)).sqrt()
    lost = ((decode_blocks(raw, grid.upper()) - x).square() * weights).sum()
    return float(lost / (x.square() * weights).sum())


def main() -> None:
    """Measure every type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(given.rows, given.columns, generator=generator) * 0.02).half()
    importance = torch.rand(given.columns, generator=generator) ** 2 + 0.01
    few = weight[:ROWS]
    start = time.thread_time()
    for grid in ("q4_0", "q4_k"):
        ours(few[:1], grid, importance)
    lines = [
        {"compile_seconds": time.thread_time() - start, "cpu": platform.processor(), **versions()}
    ]
    print(
        "| type | ggml | reference | | search | | error | ggml, importance | reference | | search | | error |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for grid in given.types:
        cells, row = [], {}
        for name, known in ("plain", None), ("importance", importance):
            if grid in LATTICES and known is None:  # ggml has most of them with an importance alone
                cells += ["-"] * 6
                continue
            some = weight if grid in QUICK and known is None else few  # a search takes ggml minutes
            ample = few if grid in LATTICES else weight
            runs = (
                (lambda rows, g=grid, k=known: quantized(rows.float(), g, k), some),
                (lambda rows, g=grid, k=known: ours(rows, g, k, "reference"), ample),
                (lambda rows, g=grid, k=known: ours(rows, g, k), ample),
            )
            speeds = [part.numel() / seconds(run, part, given.repeats) / 1e6 for run, part in runs]
            weights = torch.ones_like(importance) if known is None else known
            lost = error(few, ours(few, grid, known), grid, weights)
            lost /= error(few, quantized(few.float(), grid, known), grid, weights)
            row[name] = {"million_weights_per_second": speeds, "error": lost}
            said = [f"{speed:.0f}" if speed > 20 else f"{speed:.1f}" for speed in speeds]
            ratios = [f"{speed / speeds[0]:.2f}" for speed in speeds[1:]]
            cells += [said[0], said[1], ratios[0], said[2], ratios[1], f"{lost:.3f}"]
        lines.append({"type": grid, **row})
        print(f"| {grid} | {' | '.join(cells)} |", flush=True)
    if given.out:
        given.out.with_suffix(".json").write_text(json.dumps(lines, indent=1) + "\n")


def versions() -> dict[str, str]:
    """What was measured with."""
    return {name: version(name) for name in ("quantforge", "torch", "numba", "xllamacpp")}


if __name__ == "__main__":
    main()
