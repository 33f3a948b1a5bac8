"""Progress meters on stderr: a bar on a terminal, lines in a log, or lines of JSON.

The bar is redrawn four times a second. A log gets a line for every new phase, every 10 % and every 30 s (every 4 s in
the first five minutes), but none in the first 0.7 s. With ``--json-progress`` there is a line of JSON for every new
phase and finished part, at most ten lines a second for other reports, and at least one every 5 s.
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
EARLY_SECONDS, EARLY_SILENCE = 300.0, 4.0  # a person may be watching at first
HOLD_SECONDS = 0.7  # no line of a log before this, so that an early error stands alone
MIN_SHARE = 0.02  # the work counts as started from this share on
# Progress or time since the start of the work before the end is estimated
STEADY_SHARE, STEADY_SECONDS = 0.1, 60.0
REFRESHES = 4  # of the bar per second
BAR_WIDTH = 16


def duration(seconds: float) -> str:
    """Return a duration as text: ``42 s``, ``3:05 min``, ``2:10 h``."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60}:{rounded % 60:02} min"
    return f"{rounded // 3600}:{rounded % 3600 // 60:02} h"


def step_label(report: Progress) -> str:
    """Return the text of the current step, or of the part that was finished."""
    return part_label(report.step or report.part)


@dataclass(slots=True)
class Clock:
    """Elapsed time of a verb, and an estimate of the remaining time."""

    started_at: float
    # Elapsed seconds and share at the start of the actual work
    work_span: tuple[float, float] | None = None

    @property
    def elapsed(self) -> float:
        """Return the elapsed seconds."""
        return time.monotonic() - self.started_at

    def remaining(self, report: Progress) -> float | None:
        """Return the estimated remaining seconds; None while there is no estimate.

        The rate of progress since the start of the actual work is extrapolated; the import of libraries does not count.
        """
        share = report.share
        if report.waits:
            return None
        if self.work_span is None:
            self.work_span = (self.elapsed, share) if share >= MIN_SHARE else None
            return None
        seconds, finished_share = self.elapsed - self.work_span[0], share - self.work_span[1]
        steady = finished_share >= STEADY_SHARE or (
            seconds >= STEADY_SECONDS and finished_share >= MIN_SHARE
        )
        return seconds * (1 - share) / finished_share if steady else None


class Meter(Protocol):
    """Context manager that shows progress reports."""

    def __enter__(self) -> Self:
        """Start showing progress."""

    def __exit__(self, *error: object) -> None:
        """Stop showing progress."""

    def show(self, report: Progress) -> None:
        """Show a report."""

    def write(self, text: str) -> None:
        """Write a line of text without disturbing the meter."""


class BarMeter:
    """Progress bar on a terminal; it is removed at the end."""

    def __init__(self, printable: Callable[[str], str]) -> None:
        from rich.console import Console as Rich
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Drawn
        from rich.table import Column

        self._printable, self._clock = printable, Clock(time.monotonic())
        self._rich: Rich = Rich(stderr=True, highlight=False)
        self._progress_bar = Drawn(
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
        self._task = self._progress_bar.add_task("starting", total=1.0, time="", step="")

    def __enter__(self) -> Self:
        self._progress_bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress_bar.stop()

    def show(self, report: Progress) -> None:
        """Update the bar."""
        remaining = self._clock.remaining(report)
        self._progress_bar.update(
            self._task,
            completed=report.share,
            description=self._printable(report.phase or "working"),
            time="" if remaining is None else f"{duration(remaining)} left",
            step=self._printable(step_label(report)).replace("\n", " "),
        )

    def write(self, text: str) -> None:
        """Write a line above the bar."""
        from rich.text import Text

        self._rich.print(Text(text), soft_wrap=True)


class LineMeter:
    """Progress as lines on stderr: one for each new phase or step, and one after a long time without any."""

    max_silence, initial_delay = LOG_SECONDS, HOLD_SECONDS

    def __init__(self, printable: Callable[[str], str]) -> None:
        self._printable, self._clock = printable, Clock(time.monotonic())
        self._last_report = Progress(phase="starting")
        self._written_report, self._written_at = Progress(), time.monotonic()
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._run_heartbeat, daemon=True)

    def __enter__(self) -> Self:
        self.show(self._last_report)
        self._heartbeat_thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        if error[:1] == (None,) and self._written_report.phase:
            self._last_report = replace(
                self._last_report, share=1.0, phase="done", part="", step=""
            )
            self._write_report()

    def show(self, report: Progress) -> None:
        """Record a report; write a line if one is due."""
        self._last_report = report if report.phase else replace(report, phase="working")
        self._clock.remaining(report)  # so that the clock notices the start of the actual work
        if self._clock.elapsed >= self.initial_delay and self._is_due(self._last_report):
            self._write_report()

    def write(self, text: str) -> None:
        """Write a line."""
        sys.stderr.write(text + "\n")

    def _is_due(self, report: Progress) -> bool:
        if report.phase != self._written_report.phase:
            return True
        return int(report.share / LOG_SHARE) > int(self._written_report.share / LOG_SHARE)

    def _write_report(self) -> None:
        with self._lock:
            self._written_report, self._written_at = self._last_report, time.monotonic()
            sys.stderr.write(self._format_line(self._last_report) + "\n")
            sys.stderr.flush()

    def _format_line(self, report: Progress) -> str:
        remaining = self._clock.remaining(report)
        step_text = self._printable(step_label(report)).replace("\n", "\\n")
        text = (
            f"[{duration(self._clock.elapsed)}] {report.share:4.0%} {self._printable(report.phase)}"
        )
        text += f": {step_text}" if step_text else ""
        return (
            text
            if remaining is None or report.share >= 1
            else f"{text} ({duration(remaining)} left)"
        )

    def _run_heartbeat(self) -> None:
        while not self._stopped.wait(0.25):
            if self._clock.elapsed < self.initial_delay:
                continue
            is_early = self._clock.elapsed < EARLY_SECONDS
            max_silence = min(self.max_silence, EARLY_SILENCE) if is_early else self.max_silence
            if not self._written_report.phase or time.monotonic() - self._written_at >= max_silence:
                self._write_report()


class JsonLineMeter(LineMeter):
    """Progress as lines of JSON on stderr; ``docs/cli.md`` lists their fields."""

    max_silence, initial_delay = MACHINE_SILENCE, 0.0

    def _is_due(self, report: Progress) -> bool:
        soon = time.monotonic() - self._written_at < MACHINE_SECONDS
        return bool(report.part) or report.phase != self._written_report.phase or not soon

    def _format_line(self, report: Progress) -> str:
        remaining = self._clock.remaining(report)
        fields = {
            "progress": round(report.share, 4),
            "phase": report.phase,
            "step": report.step,
            "part": report.part,
            "done": report.done,
            "total": report.total,
            "elapsed_seconds": round(self._clock.elapsed, 2),
            "remaining_seconds": None if remaining is None else round(remaining, 1),
        }
        return json.dumps(fields)


class SilentMeter:
    """Meter that shows no progress, only written lines."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, report: Progress) -> None:
        """Show nothing."""

    def write(self, text: str) -> None:
        """Write a line."""
        sys.stderr.write(text + "\n")
