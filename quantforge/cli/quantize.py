"""``quantforge quantize``: run a recipe on a model."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.checkpoint.disk import append, check_new, existing
from quantforge.cli import options
from quantforge.cli.console import Console, size
from quantforge.cli.request import build_policy, takes_recipe
from quantforge.errors import UsageError
from quantforge.formats.choice import CHOSEN
from quantforge.formats.targets import placed
from quantforge.plans import Plan
from quantforge.recipe import Recipe

if TYPE_CHECKING:
    from quantforge.events import Event
    from quantforge.settings import Progress, Settings
    from quantforge.verbs import Outcome

_LOG = b'{"part": "'  # how a log begins
EXAMPLE = "Example: quantforge quantize models/demo --method awq --bits 4"


@takes_recipe
def quantize(
    model: options.Model,
    wanted: Recipe,
    output: options.Output = None,
    imatrix: options.ImatrixFile = None,
    modelfile: options.Modelfile = False,
    provenance: options.Provenance = False,
    sign: options.Sign = None,
    overwrite: options.Overwrite = False,
    log: options.Log = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    activations: options.Activations = "memory",
    strict: options.Strict = False,
    allow: options.Allow = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Quantize a model into a directory. The same command again goes on after any interruption."""
    console = Console(as_json=as_json, quiet=quiet or as_json, verbose=verbose)
    policy = build_policy(strict, allow)
    from quantforge import verbs
    from quantforge.settings import Settings

    start = time.monotonic()
    run_log = RunLog(console, log, model, said=output is not None)
    settings = Settings(device, threads, activations, offline, overwrite, policy)
    settings = replace(settings, progress=run_log.progress, announce=run_log.announce)
    settings = replace(settings, modelfile=modelfile, provenance=provenance, sign=sign)
    wanted, settings = with_imatrix(model, wanted, settings, imatrix)
    outcome = verbs.quantize(model, wanted, output, settings)
    report(console, outcome, time.monotonic() - start)


def with_imatrix(
    model: str, recipe: Recipe, settings: Settings, path: Path | None
) -> tuple[Recipe, Settings]:
    """Take importance from a file, which is made first where it is missing."""
    if path is None:
        return recipe, settings
    from quantforge import verbs
    from quantforge.planning.planner import IMATRIX, NO_DATA

    known = replace(recipe, calibration=replace(recipe.calibration, source=f"{IMATRIX}{path.name}"))
    if not path.exists():
        check_new(path, "--imatrix")
        verbs.plan(model, known, settings)  # refuses before anything is observed
        text = recipe.calibration
        text = replace(text, source="builtin") if text.source == NO_DATA else text
        verbs.make_imatrix(model, replace(recipe, calibration=text), path, settings)
    return known, replace(settings, imatrix=path)


class RunLog:
    """Progress for people and, where a file is named, for programs: times, which must not be inside of a result.

    A run that goes on after an interruption continues its file; what is no such log is never written to.

    Raises:
        UsageError: the file would lie in the model.
        InputError: its directory is missing.
        RefusedError: it is there, and no log of a run.
    """

    def __init__(self, console: Console, log: Path | None, model: str, *, said: bool) -> None:
        self._console, self._log, self._said = console, log, said
        self._blocks: list[float] = []  # seconds of each, which is what the estimate goes by
        if log is None:
            return
        self._check_outside(Path(model), "model")
        check_new(log, "--log", overwrite=_is_log(log))

    def announce(self, plan: Plan, out: Path) -> None:
        """Say before the work what was decided for a user who left it open."""
        self._check_outside(out, "result")
        for note in (note for note in plan.notes if note.startswith(CHOSEN)):
            self._console.note(note)
        if not self._said:
            self._console.note(f"output: {shown(out)}")

    def progress(self, progress: Progress) -> None:
        """Show one finished part and note it in the log."""
        if progress.part.startswith("block"):
            self._blocks.append(progress.seconds)
        left = sum(self._blocks) / max(len(self._blocks), 1) * (progress.total - progress.done - 1)
        error = "" if progress.error is None else f"  err {progress.error:.5f}"
        self._console.progress(
            f"{progress.done}/{progress.total} {progress.part}{error}  {progress.seconds:.1f} s"
            f"{f'  left {left:.0f} s' if left > 0 else ''}  peak {size(progress.peak_bytes)}",
            last=progress.done == progress.total,
        )
        entry = {"part": progress.part, "seconds": round(progress.seconds, 3)}
        entry |= {"error": progress.error, "peak_bytes": progress.peak_bytes}
        if self._log is not None:
            append(self._log, json.dumps(entry).encode() + b"\n")

    def _check_outside(self, place: Path, what: str) -> None:
        if self._log is not None and Path(os.path.realpath(self._log)).is_relative_to(
            os.path.realpath(place)
        ):
            raise UsageError(f"--log {self._log}: is inside of the {what}", "name a file beside it")


def _is_log(path: Path) -> bool:
    """Return whether a file is empty or was begun by a `RunLog`."""
    try:
        descriptor = existing(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.pread(descriptor, len(_LOG), 0) in {b"", _LOG}
    finally:
        os.close(descriptor)


def shown(out: Path) -> str:
    """Return a path as it is typed in a shell, with ``./`` before a relative one."""
    return str(out) if out.is_absolute() else f"./{out}"


def report(console: Console, outcome: Outcome, seconds: float) -> None:
    """Say what was made, and what to do next."""
    from quantforge.planning.coverage import coverage

    plan = outcome.plan
    counts = dict(sorted(Counter(event.kind for event in outcome.events).items()))
    if console.as_json:
        console.document(
            {
                "schema": "quantforge.quantize/1",
                "path": str(outcome.out),
                "method": plan.method,
                "format": plan.format,
                "bits_per_weight": plan.bits_per_weight,
                "bits_per_weight_total": plan.bits_per_weight_total,
                "block_share_quantized": coverage(plan.tensors).share,
                "output_bytes": plan.output_bytes,
                "resumed": outcome.resumed,
                "event_counts": counts,
                "left_behind": plan.left_behind,
                "events": [event.to_json() for event in outcome.events],
                "seconds": seconds,
            }
        )
        return
    if outcome.resumed:
        console.note("resumed: the parts that an earlier run had finished were kept")
    console.text(str(outcome.out))
    console.note(
        f"{plan.method} -> {plan.format}: {plan.density}, {size(plan.output_bytes)}, {seconds:.0f} s"
    )
    console.note(str(coverage(plan.tensors)))
    for note in plan.notes:
        if (said := placed(note, outcome.out)) != note:
            console.note(said)
    for note in plan.left_behind:
        console.note(note)
    list_events(console, outcome.events)
    console.note(f"next: quantforge eval {plan.model} {outcome.out}")


def list_events(console: Console, events: Sequence[Event]) -> None:
    """Say how often each kind occurred, and where first."""
    for kind, count in sorted(Counter(event.kind for event in events).items()):
        first = next(event for event in events if event.kind == kind)
        console.note(f"event {kind} x{count}: {first.where}: {first.detail}")
