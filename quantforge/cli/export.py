"""``quantforge export``: move a model into a format without quantizing it again."""

from __future__ import annotations

import time
from dataclasses import replace

from quantforge.cli import options
from quantforge.cli.console import Console, size
from quantforge.cli.quantize import RunLog, list_events, report, with_imatrix
from quantforge.cli.request import build_policy, build_recipe
from quantforge.formats.choice import GGUF, format_of_name, settled
from quantforge.formats.targets import placed

EXAMPLE = "Example: quantforge export demo-awq-int4 --format gguf"


def export(
    model: options.Model,
    output: options.Output = None,
    form: options.FormatKey = None,
    engine: options.Engine = None,
    tensor_parallel: options.TensorParallel = None,
    kind: options.MixtureType = None,
    pre: options.PreTokenizer = None,
    bits: options.Bits = None,
    scheme: options.SchemeText = None,
    scales: options.Scales = None,
    ignore: options.Ignore = None,
    rule: options.RuleText = None,
    imatrix: options.ImatrixFile = None,
    modelfile: options.Modelfile = False,
    provenance: options.Provenance = False,
    sign: options.Sign = None,
    calibration: options.Calibration = None,
    max_shard_bytes: options.Shard = None,
    allow_inexact: options.AllowInexact = False,
    source: options.Source = None,
    requantize: options.Requantize = False,
    overwrite: options.Overwrite = False,
    log: options.Log = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    strict: options.Strict = False,
    allow: options.Allow = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Export to another format.

    A quantized model is re-laid out, exactly or not at all (--allow-inexact accepts rounding, and counts it). An
    unquantized one is rounded plainly into the format's grid, as `quantize --method rtn` does. With --type a quantized
    model is quantized again: from --source by its own recipe, or from its decoded weights (--requantize). --for chooses
    the format in which an engine loads what there is, or, of an unquantized model, has a fast kernel for.
    """
    console = Console(as_json=as_json, quiet=quiet or as_json)
    from quantforge import verbs
    from quantforge.errors import UsageError
    from quantforge.settings import Settings

    form = form or format_of_name(output) or None
    if form is None and engine is None and kind is None and pre is None and scheme is None:
        raise UsageError(
            "--format is missing, or --for, or a name that ends in .gguf",
            "`quantforge formats` lists them",
        )
    if form is None and engine is not None and kind is None:
        form = verbs.format_for(model, engine, tensor_parallel or 1, offline=offline)
    wanted = build_recipe(
        None, method="rtn", bits=bits, scheme=scheme, format=form, ignore=ignore, rules=rule,
        max_shard_bytes=max_shard_bytes, type=kind, pre=pre, calibration=calibration,
        engine=engine, tensor_parallel=tensor_parallel, scales=scales,
    )  # fmt: skip
    if settled(wanted, output)[0].format == GGUF and calibration is None:
        wanted = replace(wanted, calibration=replace(wanted.calibration, source="none"))
    start = time.monotonic()
    policy = build_policy(strict, allow)
    run_log = RunLog(console, log, model, said=output is not None)
    settings = Settings(device, threads, "memory", offline, overwrite, policy)
    settings = replace(settings, progress=run_log.progress, announce=run_log.announce)
    settings = replace(settings, modelfile=modelfile, provenance=provenance, sign=sign)
    wanted, settings = with_imatrix(model, wanted, settings, imatrix)
    result = verbs.export(
        model, wanted, output, settings,
        allow_inexact=allow_inexact, source=source, requantize=requantize,
    )  # fmt: skip
    if isinstance(result, verbs.Outcome):
        report(console, result, time.monotonic() - start)
        return
    if as_json:
        console.document({"schema": "quantforge.export/1", **result.document()})
        return
    console.text(str(result.out))
    console.note(
        f"{result.source_format} -> {result.format}: {result.layers} layers, {result.verdict},"
        f" {size(result.output_bytes)}"
    )
    if result.coverage is not None:
        console.note(str(result.coverage))
    list_events(console, result.events)
    for note in result.notes:
        console.note(placed(note, result.out))
