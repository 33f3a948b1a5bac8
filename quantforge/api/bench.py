"""Measure latency and throughput of models, or of a server, under a seeded stream of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantforge.api.generate import (
    check_draft_options,
    load_speculative_decoder,
    open_for_generation,
)
from quantforge.api.scored_text import read_text
from quantforge.api.torch_defaults import torch_defaults
from quantforge.cache_kinds import parse_cache_kind
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.evaluation.bench_requests import (
    BenchFigures,
    RequestStream,
    Slo,
    TimedRequest,
    read_trace,
    summarize,
)
from quantforge.progress import phase, report_step, report_to
from quantforge.runtime.speculation.draft_options import DraftOptions
from quantforge.settings import Settings, check_device

SCHEMA = "quantforge.bench/2"
MAX_TEXT_BYTES = 1 << 20
MAX_ROWS, MAX_TOKEN_BUDGET = 512, 1 << 16


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of a bench: the requests, and the engine or server that answers them.

    Attributes:
        stream: how requests are generated.
        trace: file with requests to send instead of generated ones.
        text: source of the prompts, as for ``--calibration``.
        slo: latency limits that define goodput.
        price: price of the machine for an hour, for the cost.
        rows: maximum number of requests computed at a time.
        token_budget: maximum number of tokens in a step.
        cache: kind of the KV cache, see `quantforge.cache_kinds`.
        drafts: speculative decoding, see `DraftOptions`.
        url: address of a server to measure instead of a model in this process.
        served_name: name of the model at the server.
    """

    stream: RequestStream
    trace: Path | None
    text: str
    slo: Slo | None
    price: float | None
    rows: int
    token_budget: int
    cache: str
    drafts: DraftOptions
    url: str
    served_name: str


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Measurements of one model or server.

    Attributes:
        name: the model as the caller named it, or the URL.
        figures: latency and throughput of the requests.
        engine: counters of the engine, see `EngineCounters`; None for a server.
        unused_cache_fraction: mean fraction of reserved cache slots that were not used; None for a server.
    """

    name: str
    figures: BenchFigures
    engine: dict[str, Any] | None = None
    unused_cache_fraction: float | None = None


def document(rows: Sequence[BenchRow], options: BenchOptions) -> dict[str, Any]:
    """Return the results as the JSON document ``quantforge.bench/2``."""
    trace = None if options.trace is None else options.trace.name
    recorded = {**asdict(options), "trace": trace}
    return {"schema": SCHEMA, "options": recorded, "rows": [_row(row) for row in rows]}


def _row(row: BenchRow) -> dict[str, Any]:
    """Return a row as plain data."""
    return {
        "name": row.name,
        "metrics": asdict(row.figures),
        "engine": row.engine,
        "cache_waste": row.unused_cache_fraction,
    }


@torch_defaults()
def bench(models: Sequence[str], settings: Settings, options: BenchOptions) -> list[BenchRow]:
    """Measure several models in turn, or a server, under the same stream of requests.

    Args:
        models: directories, GGUF files or ``org/name[@revision]``; for a server, the one model whose tokenizer makes
            the prompts.
        settings: device, threads, offline, and which events are accepted.
        options: the requests, and how they are served.

    Raises:
        UsageError: an option does not apply here.
        InputError: a model, the text or the server cannot be used, or a request does not fit.
        RefusedError: the runtime does not support a model.
    """
    _check_options(models, options)
    opened_models = [open_for_generation(name, settings) for name in models]
    for path, _ in opened_models:
        check_draft_options(path, options.drafts, settings, batched=True)
    check_device(settings.device)
    import torch

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with report_to(settings.progress):
        text = read_text(options.text, MAX_TEXT_BYTES, offline=settings.offline)
        rows = []
        for name, (path, config) in zip(models, opened_models, strict=True):
            requests = _requests(path, config, text, options)
            if options.url:
                rows.append(_measure_server(requests, options))
            else:
                with phase(f"serving {name}", 1 / len(models), "loading"):
                    rows.append(_measure_model(name, path, requests, settings, options))
        return rows


def _check_options(models: Sequence[str], options: BenchOptions) -> None:
    if options.url and len(models) != 1:
        raise UsageError(
            "--url measures one server", "give the one MODEL whose tokenizer makes the prompts"
        )
    if options.served_name and not options.url:
        raise UsageError("--served-name is of a server, and none is measured", "add --url")
    if options.url and options.drafts.draft:
        raise UsageError("--draft is of the engine here, and a server is measured", "leave it out")
    parse_cache_kind(options.cache)
    for name, value, maximum in (
        ("--rows", options.rows, MAX_ROWS),
        ("--token-budget", options.token_budget, MAX_TOKEN_BUDGET),
    ):
        if not 1 <= value <= maximum:
            raise UsageError(f"{name} {value}: out of range", f"1 to {maximum}")


def _measure_model(
    name: str,
    path: Path,
    requests: Sequence[TimedRequest],
    settings: Settings,
    options: BenchOptions,
) -> BenchRow:
    """Serve the requests with an engine in this process, with bfloat16 activations as in other engines."""
    import torch

    from quantforge.evaluation.bench_senders import serve_in_process
    from quantforge.runtime.batching.engine import EngineOptions
    from quantforge.runtime.decoder import Decoder
    from quantforge.runtime.load import load

    loaded = load(path, settings.device, torch.bfloat16, input_bits=settings.input_bits)
    settings.policy.check(loaded.events)
    for event in loaded.events:
        settings.note(f"{event.kind}: {event.where}: {event.detail}")
    try:
        speculative = load_speculative_decoder(loaded, options.drafts, settings)
        decoder = (
            speculative.decoder if speculative else Decoder(loaded.model, scales=loaded.kv_scales)
        )
    except RefusedError as error:
        raise RefusedError(
            error.message, "bench it in its engine: quantforge bench MODEL --url ..."
        ) from error
    max_tokens = max(len(request.prompt_ids) + request.new_tokens for request in requests)
    engine_options = EngineOptions(
        rows=options.rows,
        tokens=min(max_tokens, decoder.positions),
        cache=options.cache,
        token_budget=max(options.token_budget, options.rows),
    )
    run = serve_in_process(
        decoder, requests, engine_options, _progress_callback(requests), speculative
    )
    request_figures = summarize(run.served, options.slo, options.price)
    finished = {str(reason): count for reason, count in run.counters.finished.items()}
    return BenchRow(
        name,
        request_figures,
        {**asdict(run.counters), "finished": finished},
        run.unused_cache_fraction,
    )


def _measure_server(requests: Sequence[TimedRequest], options: BenchOptions) -> BenchRow:
    from quantforge.evaluation.bench_senders import send_to_server

    with phase(f"serving {options.url}", 1.0):
        served_requests = send_to_server(
            options.url, options.served_name, requests, _progress_callback(requests)
        )
    return BenchRow(options.url, summarize(served_requests, options.slo, options.price))


def _progress_callback(requests: Sequence[TimedRequest]) -> Callable[[int], None]:
    """Return a callback that reports how many requests are finished."""
    return lambda done: report_step(done=done, total=len(requests))


def _requests(
    path: Path, config: Mapping[str, Any], text: str, options: BenchOptions
) -> list[TimedRequest]:
    """Return the requests in tokens of a model; raise `InputError` for one that exceeds its context length."""
    from quantforge.runtime.text_processing import as_input_errors, load_text_processor

    processor = load_text_processor(path, config)
    with as_input_errors():
        ids = processor.tokenizer.encode(text, "the text of the requests")
    if options.trace is not None:
        requests = read_trace(options.trace, ids, options.stream.seed)
    else:
        requests = options.stream.draw(ids)
    max_tokens = max(len(request.prompt_ids) + request.new_tokens for request in requests)
    if max_tokens > processor.positions:
        raise InputError(
            f"a request has {max_tokens} tokens, old and new; the model has {processor.positions} positions",
            "smaller --prompt-tokens, --new-tokens or --shared-tokens",
        )
    return requests
