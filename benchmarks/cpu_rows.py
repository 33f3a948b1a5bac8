"""Several rows at once on a CPU: sequences that decode together, caches, prompts, and weights that are not quantized.

    python benchmarks/cpu_rows.py [--layers 4] [--threads 1]

Packed weights of 4096 x 4096 in some forms: ms of a product of 1 and of 4 rows (least of 7). A random
llama with the widths of Llama 3.2 1B and a vocabulary of 32000, in int4 g128, output layer int8 per
row: tokens per second of steps of some sequences (median of 11), milliseconds of a step after 2048
tokens by kind of cache (likewise), and of prompts of some lengths (least of 4). A dense weight of
16384 x 2048 by rows and type, ours beside torch's, in turn: GB/s of the weight (least of 7). Weights
alone are measured over copies that fit no cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels" / "bench")]

from cpu_decode import llama_1b  # noqa: E402
from decode_8b import random_model  # noqa: E402

from quantforge.notation import parse  # noqa: E402
from quantforge.runtime.decoder import Decoder  # noqa: E402
from quantforge.runtime.decoding import DecodingStep, prefill  # noqa: E402
from quantforge_kernels.kv_row_layout import CACHE_KINDS  # noqa: E402
from quantforge_kernels.layers import linear  # noqa: E402
from quantforge_kernels.matmul_spec import MatmulSpec  # noqa: E402
from quantforge_kernels.select import select_kernel  # noqa: E402

PROMPT, LONG, STEPS, WARM_UPS = 32, 2048, 11, 3
DENSE, DENSE_BYTES = (16384, 2048), 250e6
FORMS = {"int4 g128": (4, 128), "2 bits g256": (2, 256)}


@torch.inference_mode()
def main() -> None:
    """Print five tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for name, (bits, group) in FORMS.items():
        problem = MatmulSpec(4096, 4096, bits, group, True, torch.bfloat16, "cpu")
        for rows, least in packed_times(problem).items():
            print(f"{name}, {rows} rows: {1000 * least:.3f} ms")
    schemes = (parse(name) for name in ("int4:g128:sym:bf16", "int8:row:sym:bf16"))
    model = random_model(llama_1b(options.layers), next(schemes), "cpu", next(schemes))
    decoder = Decoder(model)
    for sequences in (1, 2, 3, 4, 5, 6, 8, 16, 32):
        rate = sequences / step_time(decoder, sequences, PROMPT)
        print(f"{sequences} sequences: {rate:.0f} tokens/s")
    for kind in CACHE_KINDS:
        print(f"cache {kind or '16 bits'}: {1000 * step_time(decoder, 1, LONG, kind):.2f} ms")
    for tokens in (16, 32, 64, 128, 512):
        print(f"prompt of {tokens}: {1000 * min(prompt_times(decoder, tokens)):.0f} ms")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        count = max(2, int(DENSE_BYTES / (DENSE[0] * DENSE[1] * dtype.itemsize)))
        weights = [torch.randn(DENSE).to(dtype) for _ in range(count)]
        for rows in (1, 2, 4, 8):
            ours, theirs = dense_rates(weights, torch.randn(rows, DENSE[1]).to(dtype))
            print(f"{dtype}, {rows} rows: {ours:.1f} GB/s, torch {theirs:.1f}")


def packed_times(problem: MatmulSpec) -> dict[int, float]:
    """Seconds of a product by rows, over copies of the weight that fit no cache."""
    kernel, size = select_kernel(problem), (problem.out_features, problem.in_features)
    codes = torch.randint(0, 3, size, dtype=torch.uint8)
    scales = torch.ones(size[0], problem.groups_per_row).half()
    packed = kernel.prepare(codes, {"scales": scales}, problem)
    copies = [{key: value.clone() for key, value in packed.items()} for _ in range(40)]
    found = {}
    for rows in (1, 4):
        x = torch.randn(rows, size[1]).bfloat16()
        work = [
            timed(lambda x=x: [kernel.matmul(x, held, problem) for held in copies])
            for _ in range(7)
        ]
        found[rows] = min(work) / len(copies)
    return found


def step_time(decoder: Decoder, sequences: int, prompt: int, kind: str = "") -> float:
    """Decode some sequences together; the time of a step."""
    new = STEPS + WARM_UPS
    cache = decoder.cache(sequences, prompt + new, kind)
    ids = torch.zeros(sequences, prompt, dtype=torch.long)
    token = prefill(decoder, ids, cache, new).argmax(-1)
    step, times = DecodingStep(decoder, cache), []
    for _ in range(new):
        start = time.perf_counter()
        token = step(token).argmax(-1)
        times.append(time.perf_counter() - start)
    return median(times[WARM_UPS:])


def prompt_times(decoder: Decoder, tokens: int) -> list[float]:
    """Compute a prompt four times."""
    ids = torch.zeros(1, tokens, dtype=torch.long)
    return [timed(lambda: prefill(decoder, ids, decoder.cache(1, tokens + 1), 1)) for _ in range(4)]


def dense_rates(weights: list[torch.Tensor], x: torch.Tensor) -> tuple[float, float]:
    """GB/s of all weights, of ours and of torch."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(7):
        for times, multiply in zip(found, (linear, torch.nn.functional.linear), strict=True):
            times.append(timed(lambda multiply=multiply: [multiply(x, w) for w in weights]))
    ours, theirs = (sum(w.nbytes for w in weights) / min(times) / 1e9 for times in found)
    return ours, theirs


def timed(work: Callable[[], object]) -> float:
    """Seconds of some work."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
