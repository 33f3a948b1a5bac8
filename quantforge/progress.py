"""Progress reports of a verb (a command such as ``quantize``): its phase, current step and share of the work done.

The caller of a verb installs a listener (`report_to`). The verb divides its work into phases, each with a share of the
enclosing one (`phase`), and reports steps inside of them (`report_step`). The position is kept in a context variable,
so nested functions can report without an argument; without a listener nothing is reported. Does not import torch.
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
    """One progress report.

    Attributes:
        part: the unit that has just been finished (``block 3``); empty while one is in progress.
        done, total: number of finished parts of the phase, and of all its parts; 0 if they are not counted.
        seconds: time that the finished part took.
        error: mean relative error of its matrices, under the rounder's objective; None if nothing was rounded.
        peak_bytes: peak memory of the process when the part was finished.
        phase: current phase, e.g. ``rounding``.
        step: current step, e.g. ``block 3: q_proj, k_proj, v_proj``.
        share: share of the whole verb that is done, 0 to 1; it never decreases.
        waits: whether the verb waits for other processes, so that its end cannot be estimated.
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


ProgressListener = Callable[[Progress], None]
# Labels of units (see `quantforge.execution.units`) whose names in the journal are not meant for users.
_PART_LABELS = {
    "outer": "outside of the blocks",
    "token weights": "weights of tokens",
    "head": "after the blocks",
    "tune": "tuning",
}


def part_label(part_name: str) -> str:
    """Return the label of a part or step that is shown to users."""
    return _PART_LABELS.get(part_name, part_name)


def ignore_progress(_: Progress) -> None:
    """Discard a progress report; the default listener."""


@dataclass(slots=True)
class _Position:
    """Position of a verb: the span of the current phase within 0 to 1, and the point reached in it."""

    listener: ProgressListener
    first: float = 0.0
    last: float = 1.0
    at: float = 0.0
    phase: str = ""
    done: int = 0
    total: int = 0


_POSITION: ContextVar[_Position | None] = ContextVar("course", default=None)


@contextmanager
def report_to(listener: ProgressListener) -> Iterator[None]:
    """Send progress reports of the enclosed work to a listener; nested calls with the same one continue its phases."""
    position = _POSITION.get()
    if position is not None and position.listener is listener:
        yield
        return
    token = _POSITION.set(_Position(listener))
    try:
        yield
    finally:
        _POSITION.reset(token)


@contextmanager
def phase(name: str, share: float, step: str = "") -> Iterator[None]:
    """Assign a share of the enclosing phase to the enclosed work, starting at the current position.

    Args:
        name: name of the phase; empty for a part of the enclosing one.
        share: share of the enclosing phase, 0 to 1.
        step: first step of the phase.
    """
    position = _POSITION.get()
    if position is None:
        yield
        return
    saved_position = position.first, position.last, position.phase, position.done, position.total
    end = min(position.last, position.at + share * (position.last - position.first))
    position.first, position.last = position.at, end
    if name:
        position.phase, position.done, position.total = name, 0, 0
    report_step(step)
    try:
        yield
        position.at = end
    finally:
        position.first, position.last, position.phase, position.done, position.total = (
            saved_position
        )


def report_step(
    step: str = "", done: int | None = None, total: int | None = None, share: float | None = None,
    *, waits: bool = False,
) -> None:  # fmt: skip
    """Report the current step and position to the listener, if any.

    Args:
        step: current step.
        done: number of finished parts of the phase; together with ``total`` it also sets the share.
        total: number of all parts.
        share: share of the phase that is done, if parts are not counted.
        waits: whether the verb waits for other processes.
    """
    position = _POSITION.get()
    if position is None:
        return
    if done is not None and total:
        position.done, position.total = done, total
        share = done / total
    if share is not None:
        share_of_verb = position.first + min(max(share, 0.0), 1.0) * (
            position.last - position.first
        )
        position.at = max(position.at, share_of_verb)
    position.listener(
        Progress(
            done=position.done,
            total=position.total,
            phase=position.phase,
            step=step,
            share=position.at,
            waits=waits,
        )
    )


def progress_of(
    unit: str, record: Mapping[str, Any], done: int, total: int, start: float
) -> Progress:
    """Return the report of a finished unit; ``start`` is when it began, in seconds of the monotonic clock."""
    metrics = record.get("metrics", {}).values()
    errors = [values["error"] for values in metrics if "error" in values]
    position = _POSITION.get() or _Position(ignore_progress)
    return Progress(
        part=unit,
        phase=position.phase,
        share=position.at,
        done=done,
        total=total,
        seconds=time.monotonic() - start,
        error=sum(errors) / len(errors) if errors else None,
        peak_bytes=system.peak_memory(),
    )
