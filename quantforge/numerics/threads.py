"""Sums in a fixed order, where the order would else depend on how many threads torch has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import fsum
from typing import TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
_R = TypeVar("_R")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_order(
    work: Callable[[_T], _R], items: Iterable[_T], workers: int
) -> Generator[_R, None, None]:
    """Yield ``work(item)`` in the order of items, computed by ``workers`` threads with one thread of torch's each."""
    with one_thread():  # threads that start later take the number set last
        if workers == 1:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(workers) as pool:
            waiting: deque[Future[_R]] = deque()
            try:
                for item in items:
                    waiting.append(pool.submit(work, item))
                    if len(waiting) > workers:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()


def total(values: Tensor) -> float:
    """Return the sum of all elements in float64, one dimension after the other: torch shares out one long sum."""
    while values.dim() > 1:
        values = values.sum(-1, dtype=torch.float64)
    return fsum(values.flatten().tolist())
