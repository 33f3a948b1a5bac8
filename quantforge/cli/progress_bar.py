"""Progress on stderr: one bar on a terminal, some lines in a log, JSON for machines.

A bar is drawn again four times a second, so that it lives while one step takes long. A log gets a line for every new
phase, every 10 % and every 30 s (for five minutes every 4 s), none in the first second. Machines get a line of JSON
for every new phase and finished part, for other reports ten a second at most, and one every 5 s in any case.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

from quantforge.progress import Progress, part_label

if TYPE_CHECKING:
    from rich.console import Console as Rich

LOG_SHARE, LOG_SECONDS = 0.1, 30.0
MACHINE_SECONDS, MACHINE_SILENCE = 0.1, 5.0
EARLY_SECONDS, EARLY_SILENCE = 300.0, 4.0  # at first somebody may be looking
HOLD_SECONDS = 0.7  # before the first line of a log: a refusal stands alone
LEAST_SHARE = 0.02  # of the work, when it has begun
STEADY_SHARE, STEADY_SECONDS = (
    0.1,
    60.0,
)  # of it from there on, or some of it in a minute, before its end is estimated
REFRESHES = 4  # of a bar in a second
BAR_WIDTH = 16


def duration(seconds: float) -> str:
    """Return a time for people: ``42 s``, ``3:05 min``, ``2:10 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


def step_of(report: Progress) -> str:
    """Return what is done now, or the part that was finished, in words for people."""
    return part_label(report.step or report.part)


@dataclass(slots=True)
class Clock:
    """Time since a verb began, and an estimate of what remains."""

    begun: float
    works: tuple[float, float] | None = None  # seconds and share when the work itself had begun

    @property
    def elapsed(self) -> float:
        """Return seconds."""
        return time.monotonic() - self.begun

    def remaining(self, report: Progress) -> float | None:
        """Return seconds that are left if the rest goes as the work went; None before that is steady, or in a wait.

        The start, in which libraries are imported, is no measure of what follows.
        """
        share = report.share
        if report.waits:
            return None
        if self.works is None:
            self.works = (self.elapsed, share) if share >= LEAST_SHARE else None
            return None
        seconds, done = self.elapsed - self.works[0], share - self.works[1]
        steady = done >= STEADY_SHARE or (seconds >= STEADY_SECONDS and done >= LEAST_SHARE)
        return seconds * (1 - share) / done if steady else None


class Meter(Protocol):
    """Something that shows reports between entering and leaving it."""

    def __enter__(self) -> Self:
        """Show that work begins."""

    def __exit__(self, *error: object) -> None:
        """Leave nothing open."""

    def show(self, report: Progress) -> None:
        """Show a report."""

    def write(self, text: str) -> None:
        """Write a line of text beside what is shown."""


class Bar:
    """One bar on a terminal, which is gone when the work ends."""

    def __init__(self, printable: Callable[[str], str]) -> None:
        from rich.console import Console as Rich
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Drawn
        from rich.table import Column

        self._printable, self._clock = printable, Clock(time.monotonic())
        self._rich: Rich = Rich(stderr=True, highlight=False)
        self._drawn = Drawn(
            TextColumn("{task.description}", markup=False),
            BarColumn(BAR_WIDTH),
            TaskProgressColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[time]}", markup=False),
            TextColumn(
                "{task.fields[step]}", markup=False, table_column=Column(ratio=1, no_wrap=True)
            ),
            console=self._rich,
            transient=True,
            refresh_per_second=REFRESHES,
            expand=True,
            redirect_stdout=False,
            get_time=time.monotonic,
        )
        self._task = self._drawn.add_task("starting", total=1.0, time="", step="")

    def __enter__(self) -> Self:
        self._drawn.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._drawn.stop()

    def show(self, report: Progress) -> None:
        """Move the bar."""
        left = self._clock.remaining(report)
        self._drawn.update(
            self._task,
            completed=report.share,
            description=self._printable(report.phase or "working"),
            time="" if left is None else f"{duration(left)} left",
            step=self._printable(step_of(report)).replace("\n", " "),
        )

    def write(self, text: str) -> None:
        """Write a line above the bar."""
        from rich.text import Text

        self._rich.print(Text(text), soft_wrap=True)


class Lines:
    """Lines on stderr, written when there is something new, and when nothing was said for a while."""

    silence, hold = LOG_SECONDS, HOLD_SECONDS

    def __init__(self, printable: Callable[[str], str]) -> None:
        self._printable, self._clock = printable, Clock(time.monotonic())
        self._last = Progress(phase="starting")
        self._said, self._said_at = Progress(), time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._beat = threading.Thread(target=self._beats, daemon=True)

    def __enter__(self) -> Self:
        self.show(self._last)
        self._beat.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if error[:1] == (None,) and self._said.phase:
            self._last = replace(self._last, share=1.0, phase="done", part="", step="")
            self._say()

    def show(self, report: Progress) -> None:
        """Write a line if it is time for one."""
        self._last = report if report.phase else replace(report, phase="working")
        self._clock.remaining(report)  # it learns from every report when the work begins
        if self._clock.elapsed >= self.hold and self._due(self._last):
            self._say()

    def write(self, text: str) -> None:
        """Write a line."""
        sys.stderr.write(text + "\n")

    def _due(self, report: Progress) -> bool:
        if report.phase != self._said.phase:
            return True
        return int(report.share / LOG_SHARE) > int(self._said.share / LOG_SHARE)

    def _say(self) -> None:
        with self._lock:
            self._said, self._said_at = self._last, time.monotonic()
            sys.stderr.write(self._line(self._last) + "\n")
            sys.stderr.flush()

    def _line(self, report: Progress) -> str:
        left = self._clock.remaining(report)
        what = self._printable(step_of(report)).replace("\n", "\\n")
        text = (
            f"[{duration(self._clock.elapsed)}] {report.share:4.0%} {self._printable(report.phase)}"
        )
        text += f": {what}" if what else ""
        return text if left is None or report.share >= 1 else f"{text} ({duration(left)} left)"

    def _beats(self) -> None:
        while not self._over.wait(0.25):
            if self._clock.elapsed < self.hold:
                continue
            early = self._clock.elapsed < EARLY_SECONDS
            most = min(self.silence, EARLY_SILENCE) if early else self.silence
            if not self._said.phase or time.monotonic() - self._said_at >= most:
                self._say()


class MachineLines(Lines):
    """Lines of JSON on stderr; ``docs/cli.md`` lists their fields."""

    silence, hold = MACHINE_SILENCE, 0.0

    def _due(self, report: Progress) -> bool:
        soon = time.monotonic() - self._said_at < MACHINE_SECONDS
        return bool(report.part) or report.phase != self._said.phase or not soon

    def _line(self, report: Progress) -> str:
        left = self._clock.remaining(report)
        fields = {
            "progress": round(report.share, 4),
            "phase": report.phase,
            "step": report.step,
            "part": report.part,
            "done": report.done,
            "total": report.total,
            "elapsed_seconds": round(self._clock.elapsed, 2),
            "remaining_seconds": None if left is None else round(left, 1),
        }
        return json.dumps(fields)


class Silence:
    """Meter that shows no progress; what is written stands alone."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, report: Progress) -> None:
        """Show nothing."""

    def write(self, text: str) -> None:
        """Write a line."""
        sys.stderr.write(text + "\n")
