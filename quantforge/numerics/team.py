"""Team of a run: the threads that its work is shared out to, as whole parts or as tiles of a product.

It is there inside of `reproducible`. Work of independent parts goes to the threads as a whole (`side_by_side`), which
spares the handing over of tiles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

Part = TypeVar("Part")


Result = TypeVar("Result")


class Team:
    """The threads of a run: pools that are made when they are first needed."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._stack = ExitStack()
        self._pools: dict[tuple[str, int], ThreadPoolExecutor] = {}

    def map(
        self,
        kind: str,
        workers: int,
        share: int,
        work: Callable[[Part], Result],
        parts: Sequence[Part],
    ) -> list[Result]:
        """Return ``work(part)`` of all parts, in order, on ``workers`` threads with ``share`` threads of torch's each.

        The calling thread is one of them. Pools are kept by ``kind`` and size. After an error no part is begun any
        more, and the error of the first part that failed is raised.
        """
        workers, before = min(workers, len(parts)), torch.get_num_threads()
        pool = self._pools.get((kind, workers))
        if pool is None:
            pool = self._stack.enter_context(ThreadPoolExecutor(max(1, workers - 1)))
            self._pools[kind, workers] = pool
        inference = torch.is_inference_mode_enabled()
        todo, errors = deque(range(len(parts))), dict[int, BaseException]()
        found: dict[int, Result] = {}

        def some() -> None:
            torch.set_num_threads(share)
            with torch.inference_mode(inference):
                while True:
                    try:
                        index = todo.popleft()
                    except IndexError:
                        return
                    try:
                        found[index] = work(parts[index])
                    except BaseException as error:
                        errors[index] = error
                        todo.clear()

        futures = [pool.submit(some) for _ in range(workers - 1)]
        try:
            some()
        finally:
            torch.set_num_threads(before)
            todo.clear()
            wait(futures)
        if errors:
            raise errors[min(errors)]
        return [found[index] for index in range(len(parts))]

    def close(self) -> None:
        """End the threads."""
        self._stack.close()


TEAMS: list[Team] = []  # of the process


@contextmanager
def reproducible() -> Iterator[None]:
    """Share work out to as many threads as torch has now, and cut products into tiles (`quantforge.numerics.products`).

    On a CPU; it is for inference: gradients do not pass.
    """
    threads = torch.get_num_threads()
    team = Team(threads)
    TEAMS.append(team)
    try:
        yield
    finally:
        TEAMS.remove(team)
        team.close()
        torch.set_num_threads(threads)  # threads that start later take the number set last


def side_by_side(
    work: Callable[[Part], Result], parts: Sequence[Part], workers: int | None = None
) -> list[Result]:
    """Return ``work(part)`` of all parts in order, at most ``workers`` at a time, which share the run's threads evenly.

    Outside of `reproducible` parts are worked off one by one. They must not depend on each other, nor call this
    function themselves. Between two calls, torch is best left
    on one thread: those of its own go on looking for work for a while when they have none.
    """
    workers = min(workers or len(parts), len(parts), TEAMS[-1].threads if TEAMS else 1)
    if workers <= 1:
        return [work(part) for part in parts]
    return TEAMS[-1].map("parts", workers, threads_of(workers), work, parts)


def threads_of(parts: int) -> int:
    """Return how many threads each of so many parts may use that go `side_by_side`."""
    threads = TEAMS[-1].threads if TEAMS else 1
    return threads // min(threads, parts)
