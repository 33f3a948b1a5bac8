"""Progress of a verb: where it is, what it does now, and how much of it is done.

A verb is followed by whoever called it (`followed`). It cuts its work into phases, each of which is given a share of
what encloses it (`phase`), and says inside of them where it is (`tell`). The place is kept per context, so that code
deep inside of a verb can tell without being handed anything, and tells nobody where nobody listens. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from quantforge_files import system


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of a verb at work.

    Attributes:
        part: the part that has just been finished (``block 3``); empty while something is at work.
        done, total: parts of the phase that are done, and of all; 0 where they are not counted.
        seconds: that the finished part took.
        error: mean relative error of its matrices, under the rounder's objective; None where there is none.
        peak_bytes: of the process, when the part was finished.
        phase: what the verb is at, e.g. ``rounding``.
        step: what it does now, e.g. ``block 3: q_proj, k_proj, v_proj``.
        share: of the whole verb that is done, 0 to 1; it never falls.
        waits: for other processes, so that nobody knows when it ends.
    """

    part: str = ""
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    error: float | None = None
    peak_bytes: int = 0
    phase: str = ""
    step: str = ""
    share: float = 0.0
    waits: bool = False


Listener = Callable[[Progress], None]
# Parts of a run (see `quantforge.execution.units`) whose names in the journal are not words for people.
_WORDS = {
    "outer": "outside of the blocks",
    "guide": "weights of tokens",
    "head": "after the blocks",
    "tune": "tuning",
}


def in_words(part: str) -> str:
    """Return the name of a part or a step in words for people."""
    return _WORDS.get(part, part)


def ignore(_: Progress) -> None:
    """Tell nobody."""


@dataclass(slots=True)
class _Course:
    """Where a verb is: the span of the present phase inside of 0 to 1, and the place in it."""

    listener: Listener
    first: float = 0.0
    last: float = 1.0
    at: float = 0.0
    phase: str = ""
    done: int = 0
    total: int = 0


_COURSE: ContextVar[_Course | None] = ContextVar("course", default=None)


@contextmanager
def followed(listener: Listener) -> Iterator[None]:
    """Let a listener follow the work inside; a verb that another one calls for the same listener is a part of that."""
    course = _COURSE.get()
    if course is not None and course.listener is listener:
        yield
        return
    token = _COURSE.set(_Course(listener))
    try:
        yield
    finally:
        _COURSE.reset(token)


@contextmanager
def phase(name: str, share: float, step: str = "") -> Iterator[None]:
    """Give the work inside a share of what encloses it, beginning where that is.

    Args:
        name: of the phase; empty for a part of the one that encloses it.
        share: 0 to 1.
        step: what is done first.
    """
    course = _COURSE.get()
    if course is None:
        yield
        return
    before = course.first, course.last, course.phase, course.done, course.total
    end = min(course.last, course.at + share * (course.last - course.first))
    course.first, course.last = course.at, end
    if name:
        course.phase, course.done, course.total = name, 0, 0
    tell(step)
    try:
        yield
        course.at = end
    finally:
        course.first, course.last, course.phase, course.done, course.total = before


def tell(
    step: str = "", done: int | None = None, total: int | None = None, share: float | None = None,
    *, waits: bool = False,
) -> None:  # fmt: skip
    """Tell the listener what is done now, and how far the present phase is.

    Args:
        step: what is done now.
        done: parts of the phase that are done; with ``total`` they state its share as well.
        total: of all parts.
        share: of the phase, where parts are not counted.
        waits: for other processes.
    """
    course = _COURSE.get()
    if course is None:
        return
    if done is not None and total:
        course.done, course.total = done, total
        share = done / total
    if share is not None:
        place = course.first + min(max(share, 0.0), 1.0) * (course.last - course.first)
        course.at = max(course.at, place)
    course.listener(
        Progress(
            done=course.done,
            total=course.total,
            phase=course.phase,
            step=step,
            share=course.at,
            waits=waits,
        )
    )


def progress_of(
    unit: str, record: Mapping[str, Any], done: int, total: int, start: float
) -> Progress:
    """Return the report of a finished unit that was begun at ``start``, in seconds of the monotonic clock."""
    figures = record.get("figures", {}).values()
    errors = [values["error"] for values in figures if "error" in values]
    course = _COURSE.get() or _Course(ignore)
    return Progress(
        part=unit,
        phase=course.phase,
        share=course.at,
        done=done,
        total=total,
        seconds=time.monotonic() - start,
        error=sum(errors) / len(errors) if errors else None,
        peak_bytes=system.peak_bytes(),
    )
