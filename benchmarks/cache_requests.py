"""Requests that are computed at a time in the same memory of a cache, counted in the serving engine by kind of cache.

    python benchmarks/cache_requests.py MODEL [--threads 1] [--requests 64] [--tokens 512]

The memory is that of 8 requests with a cache of 16 bits. Requests have random tokens and are all there at the begin.
As many rows are given as whole contexts have room: what is counted is room, not luck.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from quantforge.runtime.batching.engine import EngineOptions, ServingEngine
from quantforge.runtime.batching.generation_requests import GenerationRequest
from quantforge.runtime.cache import CacheLayout
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.load import load

AT_ONCE, NEW = 8, 32
KINDS = ("16bit", "int8", "fp8", "int4", "k=int8,v=int4")


def measure(decoder: Decoder, kind: str, requests: int, tokens: int) -> tuple[int, float]:
    """Return the most requests at a time, and new tokens per second."""
    options = EngineOptions(rows=requests, tokens=tokens, cache=kind)

    def layout(of: str) -> CacheLayout:
        return CacheLayout(decoder.cache_shape(of), tokens, options.chunk)

    memory = AT_ONCE * layout("16bit").sequence_bytes(tokens)
    own = layout(kind)
    rows = min(requests, memory // own.sequence_bytes(tokens))
    pages = max(1, (memory - rows * own.ring_bytes) // max(1, own.page_bytes))
    engine = ServingEngine(
        decoder,
        EngineOptions(rows=rows, tokens=tokens, pages=pages, cache=kind),
    )
    drawn = torch.Generator().manual_seed(0)
    for number in range(requests):
        ids = torch.randint(300, 3000, (tokens - NEW,), generator=drawn).tolist()
        engine.submit(GenerationRequest(str(number), tuple(ids), NEW))
    most, began = 0, time.perf_counter()
    while not engine.idle:
        engine.step()
        most = max(most, engine.counters.running)
    return most, requests * NEW / (time.perf_counter() - began)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    decoder = Decoder(load(options.model, dtype=torch.bfloat16).model)
    print("| cache | requests at a time | new tokens/s |\n|---|---|---|")
    for kind in KINDS:
        most, rate = measure(decoder, kind, options.requests, options.tokens)
        print(f"| {kind} | {most} | {rate:.0f} |", flush=True)


if __name__ == "__main__":
    main()
