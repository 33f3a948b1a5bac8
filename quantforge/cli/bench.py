"""``quantforge bench``: latency and throughput of models, or of a server, under a stream of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantforge.artifacts.number_text import significant
from quantforge.cache_kinds import FORM, WORDS, completions
from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.evaluation.columns import ABSENT, Column, describe_omitted, select_columns
from quantforge.planning import typed_quantities
from quantforge.runtime.speculation.draft_options import DRAFT_TOKENS, DraftOptions
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.api.bench import BenchRow
    from quantforge.evaluation.bench_requests import BenchFigures

EXAMPLE = "Example: quantforge bench demo demo-gptq-int4 --rate 4 --slo ttft=500ms,tpot=50ms"
FAILED_EXIT_CODE = 5


def _request_option(*flags: str, **keywords: Any) -> Any:
    return typer.Option(*flags, rich_help_panel="What is sent", **keywords)


def _engine_option(*flags: str, **keywords: Any) -> Any:
    return typer.Option(*flags, rich_help_panel="Engine", **keywords)


Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Models of any format, one after another; with --url the one whose tokenizer makes the prompts.",
    ),
]
Wide = Annotated[bool, typer.Option("--wide", help="All columns, however wide.")]
Requests = Annotated[int, _request_option("--requests", metavar="N", help="How many.", min=1)]
Rate = Annotated[
    float | None,
    _request_option(
        "--rate",
        metavar="N",
        help="Requests a second, as a Poisson process (default: all at once).",
    ),
]
Trace = Annotated[
    Path | None,
    _request_option(
        "--trace",
        metavar="FILE",
        help='JSON lines in their place: {"at": s, "prompt_tokens": n, "new_tokens": n}.',
    ),
]
PromptTokens = Annotated[
    str,
    _request_option("--prompt-tokens", metavar="N..M", help="Tokens of a prompt, drawn evenly."),
]
NewTokens = Annotated[
    str, _request_option("--new-tokens", metavar="N..M", help="Tokens of an answer, drawn evenly.")
]
Shared = Annotated[
    int,
    _request_option(
        "--shared-tokens",
        metavar="N",
        help="Tokens that prompts begin with alike, as a system prompt.",
        min=0,
    ),
]
Share = Annotated[
    str, _request_option("--share", metavar="SHARE", help="Of the requests that begin with these.")
]
Text = Annotated[
    str,
    _request_option(
        "--text", metavar="SOURCE", help="Text of the prompts: a SOURCE as for --calibration."
    ),
]
Seed = Annotated[
    int, _request_option("--seed", metavar="N", help="The same seed makes the same requests.")
]
Rows = Annotated[
    int, _engine_option("--rows", metavar="N", help="Requests that are computed at a time.")
]
Budget = Annotated[
    int, _engine_option("--token-budget", metavar="N", help="Tokens of a step, at most.")
]
CacheKind = Annotated[
    str,
    _engine_option(
        "--cache",
        metavar="KIND",
        autocompletion=completions,
        help=f"KV cache: {', '.join(WORDS)}, or {FORM}.",
    ),
]
Url = Annotated[
    str,
    _engine_option(
        "--url", metavar="URL", help="Measure a server: the address of its API, up to /v1."
    ),
]
ServedName = Annotated[
    str, _engine_option("--served-name", metavar="NAME", help="Of the model at the server.")
]
Limits = Annotated[
    str | None,
    typer.Option(
        "--slo", metavar="LIMITS", help="For goodput, e.g. ttft=500ms,tpot=50ms (or e2e)."
    ),
]
Price = Annotated[
    str | None,
    typer.Option(
        "--price", metavar="N/h", help="Of the machine, for the cost of a million tokens."
    ),
]


def bench(
    models: Models,
    requests: Requests = 32,
    rate: Rate = None,
    trace: Trace = None,
    prompt_tokens: PromptTokens = "64..256",
    new_tokens: NewTokens = "16..64",
    shared_tokens: Shared = 0,
    share: Share = "100%",
    text: Text = "builtin",
    seed: Seed = 0,
    rows: Rows = 16,
    token_budget: Budget = 512,
    cache: CacheKind = "16bit",
    draft: options.StepDraft = None,
    draft_tokens: options.DraftTokens = DRAFT_TOKENS,
    draft_tree: options.DraftTree = "",
    url: Url = "",
    served_name: ServedName = "",
    slo: Limits = None,
    price: Price = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    input_bits: options.InputBits = 16,
    offline: options.Offline = False,
    wide: Wide = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    json_progress: options.JsonProgress = False,
) -> None:
    """Measure how long requests wait that come at their own times: TTFT, TPOT, throughput, goodput."""
    from quantforge.api import bench
    from quantforge.evaluation.bench_requests import LengthRange, RequestStream, Slo

    console = Console(as_json=as_json, quiet=quiet or as_json, machine=json_progress)
    prompts = LengthRange.parse(prompt_tokens, "--prompt-tokens")
    answers = LengthRange.parse(new_tokens, "--new-tokens")
    bench_options = bench.BenchOptions(
        stream=RequestStream(
            requests,
            rate,
            prompts,
            answers,
            shared_tokens,
            options.parse_percent(share, "--share"),
            seed,
        ),
        trace=trace,
        text=text,
        slo=None if slo is None else Slo.parse(slo, "--slo"),
        url=url,
        served_name=served_name,
        price=None if price is None else typed_quantities.price(price, "--price"),
        rows=rows,
        token_budget=token_budget,
        cache=cache,
        drafts=DraftOptions(draft or "", draft_tokens, draft_tree),
    )
    settings = Settings(
        device,
        threads,
        offline=offline,
        input_bits=input_bits,
        progress=console.show_progress,
        note=console.note,
    )
    with console.progress_meter():
        results = bench.bench(models, settings, bench_options)
    if as_json:
        console.print_document(bench.document(results, bench_options))
    else:
        _show(console, results, drafting=bool(draft), wide=wide)
    if any(row.figures.failed for row in results):
        raise typer.Exit(FAILED_EXIT_CODE)


def _show(console: Console, rows: list[BenchRow], *, drafting: bool, wide: bool) -> None:
    """Print the table of figures, the errors of failed requests, and the counters of the engines."""
    columns = _columns(rows)
    shown_columns = select_columns(columns, console.width, wide=wide)
    console.print_columns(shown_columns, "Latency (ms) and throughput")
    if hidden_text := describe_omitted(columns, shown_columns):
        console.print_wrapped(hidden_text)
    console.print_text()
    for row in rows:
        for message, count in row.figures.errors.items():
            console.note(f"{row.name}: {count} failed: {message}")
    stream = rows[-1].figures
    console.print_wrapped(
        f"{stream.requests} requests, {stream.prompt_tokens} tokens of prompts and {stream.new_tokens} new ones; "
        "TTFT counts from the arrival, waiting included; TPOT is the mean time of an answer's further tokens; "
        "p50 and p99 are percentiles"
    )
    for row in rows:
        if row.engine is not None:
            console.print_wrapped(
                f"{row.name}: {_engine_counts(row.engine, row.unused_cache_fraction, drafting=drafting)}"
            )


def _columns(rows: list[BenchRow]) -> list[Column]:
    def column(title: str, value: Callable[[BenchFigures], float | None], rank: int = 0) -> Column:
        values = (value(row.figures) for row in rows)
        return Column(title, tuple(ABSENT if v is None else significant(v) for v in values), rank)

    def latency(title: str, key: str, percentile: int, rank: int) -> Column:
        def milliseconds(figures: BenchFigures) -> float | None:
            seconds: float | None = getattr(figures, key).get(percentile)
            return None if seconds is None else 1e3 * seconds

        return column(f"{title} p{percentile}", milliseconds, rank)

    return [
        Column("model", tuple(row.name for row in rows)),
        column("tokens/s", lambda figures: figures.tokens_per_second),
        *(
            latency(title, key, percentile, rank)
            for title, key, rank in (
                ("TTFT", "ttft", 2),
                ("TPOT", "tpot", 2),
                ("e2e", "end_to_end", 3),
            )
            for percentile in (50, 99)
        ),
        column("goodput/s", lambda figures: figures.goodput, 1),
        column("cost/M", lambda figures: figures.cost, 1),
        Column("failed", tuple(str(row.figures.failed or ABSENT) for row in rows)),
    ]


def _engine_counts(counts: Mapping[str, Any], wasted: float | None, *, drafting: bool) -> str:
    scheduling = counts["scheduling_seconds"] / (counts["step_seconds"] or 1)
    text = f"{counts['steps']} steps, {scheduling:.1%} of their time spent scheduling"
    text += f"; {wasted:.1%} of the reserved cache unused"
    if counts["preemptions"]:
        text += f"; {counts['preemptions']} preemptions"
    speculation = counts["speculation"]
    if speculation["drafted"]:
        accepted_text = (
            f"{speculation['accepted']} of {speculation['drafted']} drafted tokens right"
        )
        per_pass = speculation["draft_pass_tokens"] / speculation["draft_passes"]
        text += f"; {accepted_text}, {per_pass:.3g} tokens a checked pass"
    elif drafting:
        text += "; nothing was drafted"
    return text
