"""``quantforge eval``: one table for a reference and its descendants, whatever their format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantforge.checkpoint.disk import check_new, save
from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.cli.request import percent
from quantforge.errors import InputError, UsageError, nearest
from quantforge.model import lean_imports as lean
from quantforge.settings import check_device

CACHES = ("int8", "fp8", "int4")
REPORTS = {".md": "markdown", ".html": "html", ".json": "json"}
EXAMPLE = "Example: quantforge eval models/demo demo-rtn demo-awq --max-ppl-increase 5%"


def evaluate(
    reference: Annotated[str, typer.Argument(help="The model to compare with.")],
    models: Annotated[list[str] | None, typer.Argument(help="Models that descend from it.")] = None,
    text: Annotated[
        str,
        typer.Option(
            "--text", metavar="SOURCE", help="What is scored: a SOURCE as for --calibration."
        ),
    ] = "builtin",
    windows: Annotated[int, typer.Option("--windows", help="At most so many windows.", min=1)] = 80,
    length: Annotated[int, typer.Option("--length", help="Tokens of a window.", min=2)] = 512,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Exit 6 when perplexity rises by more, e.g. 2%."),
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Exit 6 when the mean KL divergence is larger, in nats.")
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option("--report", help="Also write FILE.md, .html or .json (repeatable)."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace reports that exist.")
    ] = False,
    speed: Annotated[bool, typer.Option(help="Measure speed and memory too.")] = True,
    cache: Annotated[
        str,
        typer.Option(
            "--cache", metavar="KIND", help=f"KV cache for speed: 16bit, {', '.join(CACHES)}."
        ),
    ] = "16bit",
    engine: Annotated[
        str,
        typer.Option("--engine", help="llama.cpp: score GGUF files in it too (needs xllamacpp)."),
    ] = "",
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks", metavar="NAMES", help="lm-eval's tasks, or YAML files (needs lm-eval)."
        ),
    ] = None,
    task_limit: Annotated[
        int, typer.Option("--task-limit", help="Documents of each task; 0 is all.", min=0)
    ] = 0,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let YAML files of --tasks run the code they name.")
    ] = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    activations: options.Activations = "memory",
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare models with a reference: perplexity, divergence, size, memory and speed."""
    console = Console(as_json=as_json, quiet=quiet or as_json)
    _check_reports(report or [], overwrite)
    if cache not in {"16bit", *CACHES}:
        raise UsageError(f"--cache {cache}: no such kind", nearest(cache, ("16bit", *CACHES)))
    if engine not in {"", "llama.cpp"}:
        raise UsageError(f"--engine {engine}: unknown", "llama.cpp")
    limit = None if max_ppl_increase is None else percent(max_ppl_increase, "--max-ppl-increase")

    from quantforge.checkpoint.hub import resolve
    from quantforge.formats import detect
    from quantforge.formats.opening import open_model

    paths = [resolve(name, offline) for name in (reference, *(models or []))]
    for path in paths:
        detect(open_model(path).config)  # what cannot be read shows before anything is loaded
    check_device(device)
    if tasks is not None:
        lean.forbid()  # lm-eval uses transformers in its own ways
    import torch

    from quantforge.evaluation import report as reports
    from quantforge.evaluation.evaluate import EvaluationOptions, check_gates
    from quantforge.evaluation.evaluate import evaluate as run
    from quantforge.evaluation.harness import Tasks, check
    from quantforge.numerics.allocator import return_freed_memory

    names = tuple(filter(None, map(str.strip, (tasks or "").split(","))))
    asked = None if tasks is None else Tasks(names, task_limit, allow_code)
    if asked is not None:
        check(asked)
        if allow_code and asked.files:
            console.note("--allow-code: the task files may run code as you")
    return_freed_memory()  # the peaks that are told are of what is alive
    if threads is not None:
        torch.set_num_threads(threads)
    found = run(
        paths[0],
        paths[1:],
        EvaluationOptions(
            text=read_text(text, 32 * windows * length, offline),
            text_name=text_name(text),
            windows=windows,
            length=length,
            device=device,
            speed=speed,
            cache="" if cache == "16bit" else cache,
            engine=engine,
            tasks=asked,
            activations=Path.cwd() if activations == "disk" else None,
            progress=lambda what, done, total: console.progress(
                f"{what}: {done}/{total} windows", last=done == total
            ),
        ),
    )
    for path in report or []:
        save(path, reports.render(found, REPORTS[path.suffix]).encode(), overwrite=overwrite)
    if as_json:
        console.document(found.to_json())
    else:
        table = reports.table(found)
        console.table(table.headers, table.rows)
        for line in reports.notes(found):
            console.text(line)
    check_gates(found, limit, max_kl)


def read_text(source: str, max_bytes: int, offline: bool) -> str:
    """Read the text that is scored, as one document.

    Raises:
        InputError: the source is missing or malformed.
    """
    from quantforge_calibration import SourceError, documents, parse_sources

    try:
        parsed = parse_sources(source)
        if len(parsed) != 1 or parsed[0].kind == "self":
            raise UsageError(
                f"--text {source}: one text is scored at a time", "give one file or source"
            )
        found = documents(parsed[0], max_bytes, corpus="evaluation", offline=offline)
        return "\n\n".join(found)
    except SourceError as error:
        raise InputError(f"--text: {error.message}", error.hint) from error


def text_name(source: str) -> str:
    """Return what a report calls the text: names and digests, no paths; errors as `read_text`."""
    if source == "builtin":
        return "builtin evaluation text"
    from quantforge_calibration import SourceError
    from quantforge_calibration.citation import cite

    try:
        found = cite(source)
    except SourceError as error:
        raise InputError(f"--text: {error.message}", error.hint) from error
    digests = [digest.partition("  ")[0] for digest in found.digests]
    return f"{found.source} (SHA-256 {', '.join(digests)})" if digests else found.source


def _check_reports(paths: list[Path], overwrite: bool) -> None:
    """Check report files before the work: their kind, and whether they can be written."""
    for path in paths:
        if path.suffix not in REPORTS:
            raise UsageError(f"--report {path}: unknown kind", f"end it in {', '.join(REPORTS)}")
        check_new(path, "--report", overwrite=overwrite)
