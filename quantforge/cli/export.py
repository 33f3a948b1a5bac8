"""``quantforge export``: move a model into a format without quantizing it again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quantforge.cli import choices, options
from quantforge.cli.console import Console
from quantforge.cli.run_log import RunLog

if TYPE_CHECKING:
    from quantforge.api import Exported, Outcome

EXAMPLE = "Example: quantforge export demo-gptq-int4 --format gguf"
FORMAT_OPTIONS = (
    "format",
    "engine",
    "tensor_parallel",
    "type",
    "pre_tokenizer",
    "bits",
    "scheme",
    "scales",
    "ignore",
    "rules",
    "embedding",
)


@options.with_option_groups(
    format_options=choices.recipe_parameters(FORMAT_OPTIONS),
    calibration_options=choices.recipe_parameters(("calibration", "adapter", "max_shard_bytes")),
)
def export(
    model: options.Model,
    *,
    output: options.Output = None,
    format_options: options.OptionValues,
    imatrix: options.ImatrixFile = None,
    modelfile: options.Modelfile = False,
    mmproj: options.Mmproj = False,
    provenance: options.Provenance = False,
    sign: options.Sign = None,
    base_model: options.BaseModel = "",
    calibration_options: options.OptionValues,
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
    from quantforge import api
    from quantforge.settings import Settings

    console = Console(as_json=as_json, quiet=quiet or as_json, machine=json_progress)
    start, run_log = time.monotonic(), RunLog(console, log, model, output_named=output is not None)
    settings = Settings(
        device=device,
        threads=threads,
        offline=offline,
        overwrite=overwrite,
        policy=options.build_policy(strict, allow),
        serving=options.build_serving(context, cache, format_options.get("engine")),
        modelfile=modelfile,
        mmproj=mmproj,
        provenance=provenance,
        sign=sign,
        base_model=base_model,
        **run_log.listeners(),
    )

    def run(settings: Settings) -> Outcome | Exported:
        return api.export(
            model,
            out=output,
            settings=settings,
            imatrix=imatrix,
            allow_inexact=allow_inexact,
            source=source,
            requantize=requantize,
            **format_options,
            **calibration_options,
        )

    if dry_run:
        from quantforge.cli.plan_summary import show_dry_run

        show_dry_run(console, settings, imatrix, run)
        return
    with console.progress_meter():
        result = run(settings)
    from quantforge.cli.result_summary import show_exported, show_quantized

    if isinstance(result, api.Outcome):
        show_quantized(console, result, model, time.monotonic() - start)
    else:
        show_exported(console, result)
