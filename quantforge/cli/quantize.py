"""``quantforge quantize``: run a recipe on a model."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.checkpoint.hub import repository_name
from quantforge.checkpoint.output_names import MODELFILE, projector_name
from quantforge.cli import choices, options, ranks
from quantforge.cli.console import Console
from quantforge.cli.dry_run import show_plan
from quantforge.cli.request import build_policy, serving_of, takes_choices
from quantforge.cli.run_log import RunLog, from_here
from quantforge.formats.format_choice import format_of_name
from quantforge.formats.targets import is_engine_note, with_output_path
from quantforge.results import manifest
from quantforge.results.significant import size
from quantforge.settings import under_torchrun

if TYPE_CHECKING:
    from quantforge.events import Event
    from quantforge.verbs import Outcome

EXAMPLE = "Example: quantforge quantize demo --method gptq --bits 4"


@takes_choices(given=tuple(choices.RECIPE))
def quantize(
    model: options.Model,
    *,
    given: choices.Given,
    output: options.Output = None,
    target: options.Target = None,
    like: options.Like = None,
    candidates: options.Candidates = None,
    imatrix: options.ImatrixFile = None,
    requantize: options.Requantize = False,
    modelfile: options.Modelfile = False,
    mmproj: options.Mmproj = False,
    provenance: options.Provenance = False,
    sign: options.Sign = None,
    base_model: options.BaseModel = "",
    context: options.Context = None,
    cache: options.Cache = None,
    overwrite: options.Overwrite = False,
    join: options.Join = False,
    dry_run: options.DryRun = False,
    log: options.Log = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    activations: options.Activations = "memory",
    strict: options.Strict = False,
    allow: options.Allow = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    json_progress: options.JsonProgress = False,
    verbose: options.Verbose = False,
) -> None:
    """Quantize a model into a directory or a GGUF file. The same command again goes on after any interruption."""
    from quantforge.settings import Settings

    if ranks.silent():
        as_json, json_progress, quiet = False, False, True
    console = Console(
        as_json=as_json, quiet=quiet or as_json, verbose=verbose, machine=json_progress
    )
    start, run_log = time.monotonic(), RunLog(console, log, model, said=output is not None)
    settings = Settings(
        device=ranks.own_device(device), threads=threads, activations=activations, offline=offline, overwrite=overwrite,
        policy=build_policy(strict, allow), join=join or under_torchrun(), **run_log.listeners(),
        serving=serving_of(context, cache, given["engine"] or ("any" if "@" in str(target) else None)),
        modelfile=modelfile, mmproj=mmproj, provenance=provenance, sign=sign, base_model=base_model,
    )  # fmt: skip

    def run(settings: Settings) -> Outcome:
        from quantforge import verbs

        return verbs.quantize(
            model, out=output, settings=settings, imatrix=imatrix, requantize=requantize,
            target=target, like=like, candidates=candidates or (), **given,
        )  # fmt: skip

    if dry_run:
        show_plan(console, settings, imatrix, run, target or like)
        return
    with console.watch():
        outcome = run(settings)
    if not ranks.silent():
        report(console, outcome, model, time.monotonic() - start)


def report(console: Console, outcome: Outcome, model: str, seconds: float) -> None:
    """Say what was made of a model, as it was typed, and what to do next."""
    from quantforge.formats.gguf.tokenizer import TEMPLATE_NOTE
    from quantforge.planning.coverage import coverage
    from quantforge.planning.embedding_choice import TOLD
    from quantforge.planning.gguf import UNREAD
    from quantforge.planning.notes import is_change

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
                "bits_per_weight_in_blocks": plan.bits_per_weight_in_blocks,
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
    out = from_here(outcome.out)
    console.text(str(out))
    console.note(
        f"{plan.method} -> {plan.format}: {plan.density}, files {size(plan.output_bytes)}, {seconds:.0f} s"
    )
    if outcome.scaled is not None:
        found, searched = outcome.scaled
        console.note(
            f"columns scaled for {found} of {searched} activations; no factors were better elsewhere"
        )
    console.note(str(coverage(plan.tensors)))
    for note in plan.notes:
        if is_engine_note(note) or note.startswith((TOLD, TEMPLATE_NOTE)) or is_change(note):
            console.note(with_output_path(note, out))
    for note in plan.left_behind:
        console.note(note)
    list_events(console, outcome.events)
    if UNREAD in plan.notes:
        console.note(UNREAD)
    else:
        compared = f"quantforge eval {shlex.quote(model)} {shlex.quote(str(out))}"
        console.note(f"next: {compared}{typed_adapter(outcome.adapter)}")
    console.note(upload(out))


def typed_adapter(adapter: Path | str | None) -> str:
    """Return the option that names an adapter, as further words of a command; "" for none."""
    return "" if adapter is None else f" --adapter {shlex.quote(str(adapter))}"


def upload(out: Path) -> str:
    """Return how a result is published on the hub: a directory as it is, of a file what belongs to it.

    The repository is called as the result is; of a file, as the result without its type.
    """
    if not format_of_name(out):
        said = f"to publish it: hf upload ORG/{repository_name(out.name)} {shlex.quote(str(out))} ."
        if (manifest.read(out) or {}).get("base_model"):
            return said
        return f"{said}\nits card names no base_model: --base-model ORG/NAME states one"
    weights = out.name if out.is_file() else f"{out.stem}-*-of-*{out.suffix}"
    names = (f"{out.stem}{MODELFILE}", projector_name(out))
    extra = [text for text in names if out.with_name(text).exists()]
    chosen = (f"--include {shlex.quote(text)}" for text in (weights, f"{out.name}.*", *extra))
    repository = repository_name(f"{out.stem}-GGUF")
    place = shlex.quote(str(out.parent))
    return f"to publish it: hf upload ORG/{repository} {place} . {' '.join(chosen)}"


def list_events(console: Console, events: Sequence[Event]) -> None:
    """Say how often each kind occurred, and where first."""
    for kind, count in sorted(Counter(event.kind for event in events).items()):
        first = next(event for event in events if event.kind == kind)
        console.note(f"event {kind} x{count}: {first.where}: {first.detail}")
