"""``--dry-run``: the plan of a command, taken at the moment at which its work would begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.cli import plan, plan_forecast
from quantforge.cli.console import Console
from quantforge.cli.run_log import shown
from quantforge.errors import UsageError
from quantforge.plans import Plan
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.verbs import Exported, Outcome


class _Announced(Exception):  # no error, it ends the run
    def __init__(self, plan: Plan, out: Path) -> None:
        super().__init__()
        self.plan, self.out = plan, out


def show_plan(
    console: Console,
    settings: Settings,
    imatrix: Path | None,
    run: Callable[[Settings], Outcome | Exported],
    size: str | None = None,
) -> None:
    """Show what a run would do, with all that it decides and refuses before its work; nothing is written.

    Raises:
        QuantForgeError: as the run; an importance file is missing, which a run would make first, or a ``size`` is
            asked for, which is met by a measurement.
    """
    if size is not None:
        raise UsageError(
            f"--dry-run: it measures nothing, and what has the size {size} is found by a measurement",
            "quantforge plan with the same options says what headers tell",
        )
    if imatrix is not None and not imatrix.exists():
        raise UsageError(
            f"--imatrix {imatrix}: is missing, and --dry-run makes nothing", "leave one of them out"
        )

    def stop(announced: Plan, out: Path) -> None:
        raise _Announced(announced, out)

    try:
        done = run(replace(settings, announce=stop))
    except _Announced as reached:
        asked, place = reached.plan, reached.out
    else:
        from quantforge.verbs import Exported

        assert not isinstance(done, Exported)  # an export is never found finished
        asked, place = done.plan, done.out
        console.note(f"{shown(place)}: this command has made it, and would end at once")
    took = plan_forecast.forecast(asked, place, settings)
    if console.as_json:
        console.document(plan.document(asked, place, took))
    else:
        plan.show(console, asked, place, took, every=False)
