"""``quantforge quantize``: run a recipe on a model."""

from __future__ import annotations

import time
from functools import partial

from quantforge.cli import choices, options, processes
from quantforge.cli.run_log import RunLog
from quantforge.settings import under_torchrun

EXAMPLE = "Example: quantforge quantize demo --method gptq --bits 4"


@options.with_option_groups(recipe_options=choices.recipe_parameters(choices.RECIPE_OPTIONS))
def quantize(
    model: options.Model,
    *,
    recipe_options: options.OptionValues,
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
    from quantforge import api
    from quantforge.settings import Settings

    console = processes.make_console(
        as_json=as_json, quiet=quiet, verbose=verbose, machine=json_progress
    )
    start, run_log = time.monotonic(), RunLog(console, log, model, output_named=output is not None)
    settings = Settings(
        device=processes.rank_device(device),
        threads=threads,
        activations=activations,
        offline=offline,
        overwrite=overwrite,
        policy=options.build_policy(strict, allow),
        join=join or under_torchrun(),
        **run_log.listeners(),
        serving=options.build_serving(
            context, cache, recipe_options["engine"] or ("any" if "@" in str(target) else None)
        ),
        modelfile=modelfile,
        mmproj=mmproj,
        provenance=provenance,
        sign=sign,
        base_model=base_model,
    )

    run = partial(
        api.quantize,
        model,
        out=output,
        imatrix=imatrix,
        requantize=requantize,
        target=target,
        like=like,
        candidates=candidates or (),
        **recipe_options,
    )
    if dry_run:
        from quantforge.cli.plan_summary import show_dry_run

        show_dry_run(console, settings, imatrix, run, target or like)
        return
    with console.progress_meter():
        outcome = run(settings=settings)
    if not processes.is_silent():
        from quantforge.cli.result_summary import show_quantized

        show_quantized(console, outcome, model, time.monotonic() - start)
