"""Threads of a run: parallel parts, ordered items, and background tasks.

Inside of `reproducible` there is a team of as many threads as torch has. It runs independent parts as a whole
(`run_parallel`), which avoids distributing tiles, and the tiles of products (`quantforge.numerics.products`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Self, TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside a ``with`` block."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def in_order(
    work: Callable[[Part], Result], items: Iterable[Part], workers: int
) -> Generator[Result, None, None]:
    """Yield ``work(item)`` in the order of items, computed by ``workers`` threads with one torch thread each."""
    with one_thread():  # new threads inherit the number that was set last
        if workers == 1:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(workers) as pool:
            pending: deque[Future[Result]] = deque()
            try:
                for item in items:
                    pending.append(pool.submit(work, item))
                    # Keep an item ready for each thread.
                    if len(pending) > 2 * workers:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()


class BackgroundTask:
    """Run tasks in a background thread, one at a time; with one worker, run them immediately.

    Leaving the ``with`` block waits for the last task and raises its error.
    """

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(1) if workers > 1 else None
        self._last: Future[None] | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Start a task after waiting for the previous one; raise the previous one's error."""
        self.wait()
        if self._pool is None:
            work()
        else:
            self._last = self._pool.submit(work)

    def wait(self) -> None:
        """Wait for the last task, and raise its error."""
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


class Team:
    """The threads of a run, in pools that are created when first needed."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._stack = ExitStack()
        self._pools: dict[tuple[str, int], ThreadPoolExecutor] = {}

    def map(
        self,
        kind: str,
        workers: int,
        threads_each: int,
        work: Callable[[Part], Result],
        items: Sequence[Part],
    ) -> list[Result]:
        """Return ``work(item)`` for all items, in order, on ``workers`` threads with ``threads_each`` torch threads.

        The calling thread is one of them. Pools are reused by ``kind`` and size. After an error no further part is
        started, and the error of the first failed part is raised.
        """
        workers, num_threads = min(workers, len(items)), torch.get_num_threads()
        pool = self._pools.get((kind, workers))
        if pool is None:
            pool = self._stack.enter_context(ThreadPoolExecutor(max(1, workers - 1)))
            self._pools[kind, workers] = pool
        inference = torch.is_inference_mode_enabled()
        todo, errors = deque(range(len(items))), dict[int, BaseException]()
        results: dict[int, Result] = {}

        def work_through() -> None:
            torch.set_num_threads(threads_each)
            with torch.inference_mode(inference):
                while True:
                    try:
                        index = todo.popleft()
                    except IndexError:
                        return
                    try:
                        results[index] = work(items[index])
                    except BaseException as error:
                        errors[index] = error
                        todo.clear()

        futures = [pool.submit(work_through) for _ in range(workers - 1)]
        try:
            work_through()
        finally:
            torch.set_num_threads(num_threads)
            todo.clear()
            wait(futures)
        if errors:
            raise errors[min(errors)]
        return [results[index] for index in range(len(items))]

    def close(self) -> None:
        """Stop the threads."""
        self._stack.close()


ACTIVE_TEAMS: list[Team] = []  # of the process


@contextmanager
def reproducible() -> Iterator[None]:
    """Use as many threads as torch has now, and cut products into tiles (`quantforge.numerics.products`).

    On a CPU. Gradients pass through such products only with `quantforge.numerics.products.tiled_linears`.
    """
    threads = torch.get_num_threads()
    team = Team(threads)
    ACTIVE_TEAMS.append(team)
    try:
        yield
    finally:
        ACTIVE_TEAMS.remove(team)
        team.close()
        torch.set_num_threads(threads)  # new threads inherit the number that was set last


def run_parallel(
    work: Callable[[Part], Result], items: Sequence[Part], workers: int | None = None
) -> list[Result]:
    """Return ``work(item)`` for all items in order, at most ``workers`` at a time, sharing the run's threads evenly.

    Outside of `reproducible` parts run one after the other. They must be independent and must not call this function.
    Between two calls, torch is best left on one thread: its own threads keep spinning for a while when idle.
    """
    workers = min(
        workers or len(items), len(items), ACTIVE_TEAMS[-1].threads if ACTIVE_TEAMS else 1
    )
    if workers <= 1:
        return [work(item) for item in items]
    return ACTIVE_TEAMS[-1].map("parts", workers, threads_per_part(workers), work, items)


def threads_per_part(num_parts: int) -> int:
    """Return the number of threads per part if this many parts run `run_parallel`."""
    threads = ACTIVE_TEAMS[-1].threads if ACTIVE_TEAMS else 1
    return threads // min(threads, num_parts)
