"""Several processes that share a model, played by threads of one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Lock
from typing import TypeVar

import torch
from torch import Tensor

from quantforge.runtime.load import Loaded, load
from quantforge.runtime.tensor_parallel import TensorParallelRank

Found = TypeVar("Found")
# Reading sources of transformers in two threads at once ends in an error of Python
LOADING = Lock()
TIMEOUT_S = 60  # seconds, of a thread that waits for another


def run_on_ranks(count: int, work: Callable[[TensorParallelRank], Found]) -> list[Found]:
    """Return what every rank made of its share; one that raises ends all."""
    barrier, parts = Barrier(count, timeout=TIMEOUT_S), [torch.empty(0)] * count

    def run(rank: int) -> Found:
        def total(part: Tensor) -> Tensor:
            parts[rank] = part
            barrier.wait()
            found = sum(one.float() for one in parts)
            barrier.wait()
            assert isinstance(found, Tensor)
            return found.to(part.dtype)

        try:
            return work(TensorParallelRank(rank, count, total))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(run, range(count))]


def load_part(path: Path, share: TensorParallelRank) -> Loaded:
    """Load what a rank holds of a model."""
    with LOADING:
        return load(path, share=share)
