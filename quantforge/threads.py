"""Torch's threads: one, where the order of a sum would else depend on them, or shared out to parts of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(
    work: Callable[[Part], Result], parts: Sequence[Part], workers: int
) -> list[Result]:
    """Return ``work(part)`` of all parts in order, up to so many at a time, each with its share of torch's threads.

    For compiled loops, which run on the thread that calls them: between the products of one part it is the other
    part's turn. The parts must not depend on each other.
    """
    threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    workers = min(workers, threads, len(parts))
    if workers <= 1:
        return [work(part) for part in parts]

    def alone(part: Part) -> Result:
        torch.set_num_threads(threads // workers)  # of this thread, and of those that start later
        with torch.inference_mode(inference):
            return work(part)

    try:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(alone, parts))
    finally:
        torch.set_num_threads(threads)
