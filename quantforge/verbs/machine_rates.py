"""Rates of this machine, measured in about two seconds: products, and reading with digests."""

from __future__ import annotations

import hashlib
import time

from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.hub import resolve
from quantforge.formats.opening import open_model
from quantforge.planning.run_work import RECORDED, Rates
from quantforge.settings import Settings, workers_of
from quantforge_files.roles import WEIGHTS

ROWS, COLUMNS, SECONDS = 1024, 2048, 0.7
READ = 1 << 28  # bytes of the source, at most
CHUNK = 1 << 20


def measured_rates(model: str, settings: Settings) -> Rates:
    """Measure what one of the threads of a run does beside the others; errors as `open_model`."""
    threads = workers_of(settings)
    checkpoint = open_model(resolve(model, settings.offline)).opened
    shard = max(checkpoint.shards, key=lambda path: path.stat().st_size)
    digest, done, start = hashlib.sha256(), 0, time.monotonic()
    with FILES.stream(shard, WEIGHTS, shard.parent) as file:
        while done < READ and time.monotonic() < start + SECONDS and (data := file.read(CHUNK)):
            digest.update(data)
            done += len(data)
    read = done / max(time.monotonic() - start, 1e-9)
    basis = f"measured on this machine, {threads} at work"
    return Rates(_products(threads) / threads, read, RECORDED.startup, basis)


def _products(threads: int) -> float:
    """Return the operations of float32 products in a second, of so many threads together."""
    import torch

    from quantforge.numerics.products import matmul
    from quantforge.numerics.team import reproducible

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), reproducible():
            a, b = torch.ones(ROWS, COLUMNS), torch.ones(COLUMNS, COLUMNS)
            matmul(a, b)
            count, start = 0, time.monotonic()
            while time.monotonic() < start + SECONDS:
                matmul(a, b)
                count += 1
            return 2 * ROWS * COLUMNS**2 * count / (time.monotonic() - start)
    finally:
        torch.set_num_threads(before)
