"""Gigaflops of the products that quantizing consists of: by torch's own library, by oneDNN, and cut into our tiles.

    python benchmarks/products.py [--threads 2] [--repeats 7] [--out FILE.md]

For a kind of processor on which `quantforge.numerics.products` does not choose oneDNN yet: where its column is faster,
it should. The ways take turns, and the medians of all turns are printed. The last line is a Hessian's factorization.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from quantforge.numerics.products import matmul
from quantforge.numerics.threads import reproducible
from quantforge.quantizers.gptq.hessian import factorize

SHAPES = (
    (512, 256, 768),
    (512, 4096, 4096),
    (2048, 4096, 4096),
    (512, 4096, 11264),
    (512, 11264, 4096),
)
HESSIAN = 4096


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = [
        "| rows, columns, results | torch's own | oneDNN | our tiles |",
        "|---|---|---|---|",
        *(row(shape, options.repeats) for shape in SHAPES),
        f"| factorization, {HESSIAN} columns, float64 | | | {factorization(options.repeats)} |",
        "",
        f"Gigaflops, medians of {options.repeats} with the range, {options.threads} threads;"
        f" {torch.cpu.get_capabilities().get('cpu_name', platform.machine())}, torch {torch.__version__}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def row(shape: tuple[int, int, int], repeats: int) -> str:
    """One product of activations and a weight ``[out, in]``, as a linear layer computes it."""
    rows, columns, results = shape
    x, weight = torch.randn(rows, columns), torch.randn(results, columns)

    by_onednn = partial(torch.ops.mkldnn._linear_pointwise, x, weight, None, "none", [], "")
    ways = (partial(torch.mm, x, weight.T), by_onednn, partial(matmul, x, weight.T))
    found = rates(ways, 2 * rows * columns * results, repeats)
    return f"| {rows}, {columns}, {results} | {' | '.join(found)} |"


def factorization(repeats: int) -> str:
    """Its Cholesky factor: a third of the cube of its columns."""
    x = torch.randn(HESSIAN, HESSIAN)
    hessian = x.T @ x / HESSIAN
    order = hessian.diagonal().argsort(descending=True)

    return rates((partial(factorize, hessian, 0.01, order),), HESSIAN**3 // 3, repeats)[0]


def rates(ways: tuple[Callable[[], object], ...], operations: int, repeats: int) -> list[str]:
    """Gigaflops of each way, in turn after a first time of each that does not count; small products are repeated."""
    often = max(1, int(2e9 / operations))
    seconds: list[list[float]] = [[] for _ in ways]
    with torch.inference_mode(), reproducible():
        for turn in range(repeats + 1):
            for way, taken in zip(ways, seconds, strict=True):
                start = time.perf_counter()
                for _ in range(often):
                    way()
                if turn:
                    taken.append((time.perf_counter() - start) / often)
    return [
        f"{operations / statistics.median(taken) / 1e9:.0f}"
        f" ({operations / max(taken) / 1e9:.0f} to {operations / min(taken) / 1e9:.0f})"
        for taken in seconds
    ]


if __name__ == "__main__":
    main()
