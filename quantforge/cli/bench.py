"""``quantforge bench``: latency and throughput of models, or of a server, under a stream of requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantforge.architectures.cache_kinds import FORM, WORDS, completions
from quantforge.cli import draft_flags, options
from quantforge.cli.completion import models
from quantforge.cli.console import Console
from quantforge.cli.request import percent
from quantforge.evaluation.columns import fitting, left_out
from quantforge.planning import quantities
from quantforge.runtime.speculation.draft_options import DRAFT_TOKENS, DraftOptions
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.evaluation.serving_load.load_options import LoadFound, LoadOptions

EXAMPLE = "Example: quantforge bench demo demo-gptq-int4 --rate 4 --slo ttft=500ms,tpot=50ms"
FAILED = 5


def _load(*flags: str, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel="What is sent", **more)


def _engine(*flags: str, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel="Engine", **more)


Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...", autocompletion=models,
        help="Models of any format, one after another; with --url the one whose tokenizer makes the prompts.",
    ),
]  # fmt: skip
Wide = Annotated[bool, typer.Option("--wide", help="All columns, however wide.")]
Requests = Annotated[int, _load("--requests", metavar="N", help="How many.", min=1)]
Rate = Annotated[
    float | None,
    _load("--rate", metavar="N", help="Requests a second, as a Poisson process (default: all at once)."),
]  # fmt: skip
Trace = Annotated[
    Path | None,
    _load("--trace", metavar="FILE", help='JSON lines in their place: {"at": s, "prompt_tokens": n, "new_tokens": n}.'),
]  # fmt: skip
PromptTokens = Annotated[
    str, _load("--prompt-tokens", metavar="N..M", help="Tokens of a prompt, drawn evenly.")
]
NewTokens = Annotated[
    str, _load("--new-tokens", metavar="N..M", help="Tokens of an answer, drawn evenly.")
]
Shared = Annotated[
    int,
    _load("--shared-tokens", metavar="N", help="Tokens that prompts begin with alike, as a system prompt.", min=0),
]  # fmt: skip
Share = Annotated[
    str, _load("--share", metavar="SHARE", help="Of the requests that begin with these.")
]
Text = Annotated[
    str,
    _load("--text", metavar="SOURCE", help="Text of the prompts: a SOURCE as for --calibration."),
]
Seed = Annotated[int, _load("--seed", metavar="N", help="The same seed makes the same requests.")]
Rows = Annotated[int, _engine("--rows", metavar="N", help="Requests that are computed at a time.")]
Budget = Annotated[int, _engine("--token-budget", metavar="N", help="Tokens of a step, at most.")]
Batching = Annotated[
    bool, _engine("--continuous/--static", help="Requests join at every step, or in batches.")
]
Chunked = Annotated[
    bool, _engine("--chunked/--whole-prompts", help="Prompts are cut between steps, or not.")
]
Prefix = Annotated[
    bool, _engine("--prefix-cache/--no-prefix-cache", help="Prompts share what begins alike.")
]
CacheKind = Annotated[
    str,
    _engine(
        "--cache", metavar="KIND", autocompletion=completions, help=f"KV cache: {', '.join(WORDS)}, or {FORM}."
    ),
]  # fmt: skip
Url = Annotated[
    str,
    _engine("--url", metavar="URL", help="Measure a server: the address of its API, up to /v1."),
]
ServedName = Annotated[
    str, _engine("--served-name", metavar="NAME", help="Of the model at the server.")
]
Limits = Annotated[
    str | None,
    typer.Option("--slo", metavar="LIMITS", help="For goodput, e.g. ttft=500ms,tpot=50ms (or e2e)."),
]  # fmt: skip
Price = Annotated[
    str | None,
    typer.Option("--price", metavar="N/h", help="Of the machine, for the cost of a million tokens."),
]  # fmt: skip


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
    continuous: Batching = True,
    chunked: Chunked = True,
    prefix_cache: Prefix = True,
    cache: CacheKind = "16bit",
    draft: draft_flags.StepDraft = None,
    draft_tokens: draft_flags.DraftTokens = DRAFT_TOKENS,
    draft_tree: draft_flags.DraftTree = "",
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
    from quantforge.evaluation.serving_load.latency_figures import Slo
    from quantforge.evaluation.serving_load.load_options import LoadOptions
    from quantforge.evaluation.serving_load.stream_of_requests import LengthRange, RequestStream

    console = Console(as_json=as_json, quiet=quiet or as_json, machine=json_progress)
    prompts = LengthRange.parse(prompt_tokens, "--prompt-tokens")
    answers = LengthRange.parse(new_tokens, "--new-tokens")
    drafts = DraftOptions(draft or "", draft_tokens, draft_tree)
    asked = LoadOptions(
        stream=RequestStream(requests, rate, prompts, answers, shared_tokens, percent(share, "--share"), seed),
        trace=trace, text=text, slo=None if slo is None else Slo.parse(slo, "--slo"), url=url, served_name=served_name,
        price=None if price is None else quantities.price(price, "--price"),
        rows=rows, token_budget=token_budget, batching="continuous" if continuous else "static",
        chunked_prefill=chunked, prefix_cache=prefix_cache, cache=cache, drafts=drafts,
    )  # fmt: skip
    settings = Settings(
        device, threads, offline=offline, input_bits=input_bits, progress=console.show, note=console.note
    )  # fmt: skip
    found = _measured(console, models, settings, asked)
    _show(console, found, wide=wide)
    if any(row.figures.failed for row in found.rows):
        raise typer.Exit(FAILED)


def _measured(
    console: Console, models: list[str], settings: Settings, asked: LoadOptions
) -> LoadFound:
    from quantforge.verbs.bench_models import bench as measure

    with console.watch():
        return measure(models, settings, asked)


def _show(console: Console, found: LoadFound, *, wide: bool) -> None:
    """Print a table of the rows, and what is to be known of them."""
    from quantforge.evaluation.serving_load.load_tables import columns_of, lines_of

    if console.as_json:
        console.document(found.document())
        return
    columns = columns_of(found)
    drawn = fitting(columns, console.width, wide=wide)
    console.columns(drawn, "Latency (ms) and throughput")
    if absent := left_out(columns, drawn):
        console.wrapped(absent)
    console.text()
    for row in found.rows:
        for why, count in row.figures.errors.items():
            console.note(f"{row.name}: {count} failed: {why}")
    for line in lines_of(found):
        console.wrapped(line)
