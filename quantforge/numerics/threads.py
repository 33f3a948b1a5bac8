"""Threads: results in the order of their items, work behind, and sums that do not depend on how many torch has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import fsum
from typing import Self, TypeVar

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
                    if (
                        len(waiting) > 2 * workers
                    ):  # the next of each thread is there when it ends one
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()


class Behind:
    """Work that another thread does while this one goes on, one piece at a time; with one worker it is done at once.

    Leaving the ``with`` block waits for the last piece, and raises what went wrong in it.
    """

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(1) if workers > 1 else None
        self._last: Future[None] | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Begin a piece when the one before it is done, whose errors are raised."""
        self.wait()
        if self._pool is None:
            work()
        else:
            self._last = self._pool.submit(work)

    def wait(self) -> None:
        """Wait for the piece that was begun last, and raise its error."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        if kind is None:
            self.wait()


def total(values: Tensor) -> float:
    """Return the sum of all elements in float64, one dimension after the other: torch shares out one long sum."""
    while values.dim() > 1:
        values = values.sum(-1, dtype=torch.float64)
    return fsum(values.flatten().tolist())
