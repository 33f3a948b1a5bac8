"""Measure tile sizes for this GPU, and keep the fastest where the runtime looks for them.

    python scripts/tune_kernels.py [--shape OUTxIN ...] [--experts OUTxIN:EXPERTS:EACH ...]
                                   [--form NAME ...] [--minutes 10]

``--experts`` are the matrices of mixtures: their size, how many there are, and how many a token is sent to.

Writes ``kernels/quantforge_kernels/gpu/tuned/DEVICE.json``, after every shape, on top of what is there.
Run it from the repository, with an editable installation; nothing is tuned while a model runs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from functools import partial
from pathlib import Path

import torch
from triton.errors import TritonError

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "kernels" / "bench"), str(ROOT / "kernels"), str(ROOT)]

from experts import TURNS, grouped, owners_of  # noqa: E402
from timing import FORMS, copies, problem, seconds  # noqa: E402

from quantforge_kernels.gpu import plane_products  # noqa: E402
from quantforge_kernels.gpu.launching import Configuration, key, parse, save  # noqa: E402
from quantforge_kernels.grouped import OwnedRows  # noqa: E402
from quantforge_kernels.problem import Packed, Problem  # noqa: E402

# The linears of llamas of 1, 8 and 70 billion weights, q k v and gate up as they are joined.
SHAPES = ("6144x4096", "4096x4096", "28672x4096", "4096x14336", "3072x2048", "2048x2048", "16384x2048",
          "2048x8192", "10240x8192", "8192x8192", "57344x8192", "8192x28672", "128256x4096")  # fmt: skip
TOKENS = {"matvec": 1, "rows": 8}
# Gate with up, and down, of mixtures of 30, 47 and 671 billion weights.
EXPERTS = ("1536x2048:128:8", "2048x768:128:8", "28672x4096:8:2", "4096x14336:8:2", "4096x7168:256:8",
           "7168x2048:256:8")  # fmt: skip
GROUPED_TOKENS = {"matvec": 1, "rows": 32}


def main() -> None:
    """Tune, shape by shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="*", default=list(SHAPES))
    parser.add_argument(
        "--form", nargs="*", default=["int4 g128", "int8 g128", "nf4 g64"], choices=list(FORMS)
    )
    parser.add_argument("--experts", nargs="*", default=list(EXPERTS))
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to tune")
    deadline = time.monotonic() + 60 * options.minutes
    name = torch.cuda.get_device_name().replace(" ", "_").replace("/", "_")
    path = ROOT / "kernels" / "quantforge_kernels" / "gpu" / "tuned" / f"{name}.json"
    entries = parse(path.read_text()) if path.is_file() else {}
    for text, form in itertools.product(options.shape, options.form):
        out_features, in_features = map(int, text.split("x"))
        task = problem(form, (out_features, in_features), torch.bfloat16)
        weights = copies(task)
        for kernel in TOKENS:
            if time.monotonic() > deadline:
                return
            best, taken = tuned(kernel, task, weights)
            entries[key(kernel, task.bits, task.group_size, out_features, in_features)] = best
            print(f"{text} {form} {kernel}: {best} {taken * 1e6:.1f} us", flush=True)
        path.parent.mkdir(exist_ok=True)
        path.write_text(save(entries))
    for text, form in itertools.product(options.experts, options.form):
        if time.monotonic() > deadline:
            return
        entries |= tuned_experts(text, form)
        path.parent.mkdir(exist_ok=True)
        path.write_text(save(entries))


def candidates(kernel: str, task: Problem) -> list[Configuration]:
    """Tiles worth a try."""
    least = plane_products.least_tile(kernel, task)
    if kernel == "matvec":
        grid = itertools.product((2, 4, 8, 16), (512, 1024, 2048, 4096), (1, 2, 4), (1, 2, 4))
    else:
        grid = itertools.product((16, 32, 64, 128), (64, 128, 256, 512), (2, 4, 8), (1, 2, 4, 8))
    return [
        Configuration(rows, columns, warps, split)
        for rows, columns, warps, split in grid
        if least <= columns <= max(least, task.in_features)
        and split * columns <= task.in_features
        and 32 <= rows * columns // (32 * warps) <= 512
    ]


def tuned(kernel: str, task: Problem, weights: list[Packed]) -> tuple[Configuration, float]:
    """Return the fastest configuration and its time."""
    x = torch.randn(TOKENS[kernel], task.in_features, device="cuda").bfloat16()
    found: list[tuple[float, Configuration]] = []
    for tile in candidates(kernel, task):
        calls = [
            partial(plane_products.launch, kernel, x, words(held), held, task, tile)
            for held in weights
        ]
        try:
            found.append((seconds(calls), tile))
        except (RuntimeError, TritonError) as error:  # too much shared memory: not this one
            print(f"  {tile}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
    taken, best = min(found, key=lambda pair: pair[0])
    return best, taken


def tuned_experts(text: str, form: str) -> dict[str, Configuration]:
    """Tune the grouped products of a mixture; return the entries."""
    size, experts, each = text.split(":")
    out_features, in_features = map(int, size.split("x"))
    task, packed = grouped(form, int(experts), (out_features, in_features))
    planes, tensors = plane_products.flat(packed)
    entries = {}
    for kernel, tokens in GROUPED_TOKENS.items():
        x = torch.randn(tokens, in_features, device="cuda").bfloat16()
        sent = [owners_of(tokens, int(experts), int(each), turn) for turn in range(TURNS)]
        found: list[tuple[float, Configuration]] = []
        for tile in candidates(kernel, task.each):
            calls = [
                partial(
                    plane_products.launch,
                    kernel,
                    OwnedRows(x, owners),
                    planes,
                    tensors,
                    task.each,
                    tile,
                )
                for owners in sent
            ]
            try:
                found.append((seconds(calls), tile))
            except (RuntimeError, TritonError) as error:
                print(f"  {tile}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
        taken, best = min(found, key=lambda pair: pair[0])
        name = key(
            f"grouped-{kernel}", task.each.bits, task.each.group_size, out_features, in_features
        )
        entries[name] = best
        print(f"{text} {form} grouped {kernel}: {best} {taken * 1e6:.1f} us", flush=True)
    return entries


def words(held: Packed) -> list[torch.Tensor]:
    """The planes of packed weights."""
    return [held[name] for name in ("words0", "words1", "words2") if name in held]


if __name__ == "__main__":
    main()
