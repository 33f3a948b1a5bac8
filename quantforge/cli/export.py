"""``quantforge export``: move a model into a format without quantizing it again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quantforge.cli import choices, options
from quantforge.cli.console import Console
from quantforge.cli.dry_run import show_plan
from quantforge.cli.quantize import list_events, report, upload
from quantforge.cli.request import build_policy, serving_of, takes_choices
from quantforge.cli.run_log import RunLog, from_here
from quantforge.formats.targets import with_output_path
from quantforge.plans import CHOSEN
from quantforge.results.significant import size

if TYPE_CHECKING:
    from quantforge.verbs import Exported, Outcome

EXAMPLE = "Example: quantforge export demo-gptq-int4 --format gguf"
FORM = (
    "format",
    "engine",
    "tensor_parallel",
    "type",
    "pre",
    "bits",
    "scheme",
    "scales",
    "ignore",
    "rules",
    "embedding",
)


@takes_choices(form=FORM, text=("calibration", "adapter", "max_shard_bytes"))
def export(
    model: options.Model,
    *,
    output: options.Output = None,
    form: choices.Given,
    imatrix: options.ImatrixFile = None,
    modelfile: options.Modelfile = False,
    mmproj: options.Mmproj = False,
    provenance: options.Provenance = False,
    sign: options.Sign = None,
    base_model: options.BaseModel = "",
    text: choices.Given,
    allow_inexact: options.AllowInexact = False,
    source: options.Source = None,
    requantize: options.Requantize = False,
    context: options.Context = None,
    cache: options.Cache = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    log: options.Log = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    strict: options.Strict = False,
    allow: options.Allow = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    json_progress: options.JsonProgress = False,
) -> None:
    """Export to another format.

    A quantized model is re-laid out, exactly or not at all (--allow-inexact accepts rounding, and counts it). An
    unquantized one is rounded plainly into the format's grid, as `quantize --method rtn` does. With --type a quantized
    model is quantized again: from --source by its own recipe, or from its decoded weights (--requantize). --for chooses
    the format in which an engine loads what there is, or, of an unquantized model, has a fast kernel for.
    """
    from quantforge import verbs
    from quantforge.settings import Settings

    console = Console(as_json=as_json, quiet=quiet or as_json, machine=json_progress)
    start, run_log = time.monotonic(), RunLog(console, log, model, said=output is not None)
    settings = Settings(
        device=device, threads=threads, offline=offline, overwrite=overwrite, policy=build_policy(strict, allow),
        serving=serving_of(context, cache, form.get("engine")), modelfile=modelfile, mmproj=mmproj,
        provenance=provenance, sign=sign, base_model=base_model, **run_log.listeners(),
    )  # fmt: skip

    def run(settings: Settings) -> Outcome | Exported:
        return verbs.export(
            model, out=output, settings=settings, imatrix=imatrix, allow_inexact=allow_inexact,
            source=source, requantize=requantize, **form, **text,
        )  # fmt: skip

    if dry_run:
        return show_plan(console, settings, imatrix, run)
    with console.watch():
        result = run(settings)
    return _tell(console, result, model, time.monotonic() - start)


def _tell(console: Console, result: Outcome | Exported, model: str, seconds: float) -> None:
    """Say what was made: by quantizing, or by a conversion."""
    from quantforge import verbs

    if isinstance(result, verbs.Outcome):
        report(console, result, model, seconds)
    else:
        _show(console, result)


def _show(console: Console, result: Exported) -> None:
    """Say what was made, and how exactly it is what was given."""
    if console.as_json:
        console.document({"schema": "quantforge.export/1", **result.document()})
        return
    out = from_here(result.out)
    console.text(str(out))
    console.note(
        f"{result.source_format} -> {result.format}: {result.layers} layers, {result.verdict},"
        f" files {size(result.output_bytes)}"
    )
    if result.coverage is not None:
        console.note(str(result.coverage))
    list_events(console, result.events)
    for note in result.notes:
        if not note.startswith(CHOSEN):  # said before the work
            console.note(with_output_path(note, out))
    console.note(upload(out))
