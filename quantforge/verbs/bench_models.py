"""Bench: latency and throughput of models, or of a server, under a seeded stream of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.architectures.cache_kinds import kinds_of
from quantforge.checkpoint.hub import resolve
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.evaluation.serving_load.load_options import LoadFound, LoadOptions, LoadRow
from quantforge.evaluation.serving_load.stream_of_requests import TimedRequest, read_trace
from quantforge.execution.progress import followed, phase, tell
from quantforge.formats import detect
from quantforge.formats.opening import open_model
from quantforge.formats.sources.low_precision import readable
from quantforge.runtime.speculation.draft_options import DraftOptions
from quantforge.settings import Settings, check_device
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.generate_text import check_drafts, guesses_of
from quantforge.verbs.scored_text import read_text

if TYPE_CHECKING:
    from quantforge.runtime.decoder import Decoder
    from quantforge.runtime.serving.counters import Counters
    from quantforge.runtime.serving.engine_options import EngineOptions
    from quantforge.runtime.speculation.draft_choice import GuessedDecoder
    from quantforge.runtime.text_side import TextSide

TEXT_BYTES = 1 << 20
MOST_ROWS, MOST_BUDGET = 512, 1 << 16


@torch_defaults()
def bench(
    models: Sequence[str | Path],
    settings: Settings | None = None,
    options: LoadOptions | None = None,
) -> LoadFound:
    """Measure models one after another, or a server, under the same stream of requests.

    Args:
        models: directories, GGUF files or ``org/name[@revision]``. With a server, the one model whose tokenizer makes
            the prompts.
        settings: device, threads, offline, and which events are accepted.
        options: what is sent, and to what.

    Raises:
        UsageError: an option that means nothing here.
        InputError: a model, the text or the server cannot be used, or a request can never fit.
        RefusedError: a model that the own decoder does not compute.
    """
    settings, options = settings or Settings(), options or LoadOptions()
    _check(models, options)
    paths = [resolve(str(name), settings.offline) for name in models]
    for path in paths:
        detect(readable(open_model(path)).config)  # what cannot be read shows before torch is there
        check_drafts(path, options.drafts, settings, steps=True)
    check_device(settings.device)
    import torch

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with followed(settings.progress):
        text = read_text(options.text, TEXT_BYTES, offline=settings.offline)
        if options.url:
            return _server(paths[0], text, options)
        return _each([str(name) for name in models], paths, text, settings, options)


def _check(models: Sequence[str | Path], options: LoadOptions) -> None:
    if not models:
        raise UsageError("no model", "quantforge bench MODEL")
    if options.url and len(models) != 1:
        raise UsageError(
            "--url measures one server", "give the one MODEL whose tokenizer makes the prompts"
        )
    if options.served_name and not options.url:
        raise UsageError("--served-name is of a server, and none is measured", "add --url")
    if options.url and options.drafts.draft:
        raise UsageError("--draft is of the engine here, and a server is measured", "leave it out")
    kinds_of(options.cache)
    for name, value, most in (
        ("--rows", options.rows, MOST_ROWS),
        ("--token-budget", options.token_budget, MOST_BUDGET),
    ):
        if not 1 <= value <= most:
            raise UsageError(f"{name} {value}: out of range", f"1 to {most}")


def _each(
    names: Sequence[str],
    paths: Sequence[Path],
    text: str,
    settings: Settings,
    options: LoadOptions,
) -> LoadFound:
    from quantforge.evaluation.serving_load.latency_figures import figures
    from quantforge.evaluation.serving_load.on_engine import serve_here

    rows = []
    for name, path in zip(names, paths, strict=True):
        with phase(f"serving {name}", 1 / len(names), "loading"):
            decoder, side, guesses = _decoder(path, settings, options.drafts)
            requests = _requests(side, text, options)
            engine = _engine(decoder, requests, options)
            run = serve_here(decoder, requests, engine, _follower(len(requests)), guesses)
            found = figures(run.served, options.slo, options.price)
            rows.append(LoadRow(name, found, _counts(run.counters), run.wasted))
            del decoder, guesses
    return LoadFound(rows, options)


def _server(path: Path, text: str, options: LoadOptions) -> LoadFound:
    from quantforge.evaluation.serving_load.latency_figures import figures
    from quantforge.evaluation.serving_load.on_server import serve_there
    from quantforge.runtime.text_side import text_side

    side = text_side(path, readable(open_model(path)).config)
    requests = _requests(side, text, options)
    with phase(f"serving {options.url}", 1.0):
        served = serve_there(options.url, options.served_name, requests, _follower(len(requests)))
    row = LoadRow(options.url, figures(served, options.slo, options.price), None, None)
    return LoadFound([row], options)


def _follower(total: int) -> Callable[[int], None]:
    """Return what tells how many of all requests are finished."""
    return lambda done: tell(done=done, total=total)


def _decoder(
    path: Path, settings: Settings, drafts: DraftOptions
) -> tuple[Decoder, TextSide, GuessedDecoder | None]:
    """Load a model for the own decoder, with 16-bit activations as engines have them, and who guesses for it."""
    import torch

    from quantforge.runtime.decoder import Decoder
    from quantforge.runtime.load import load
    from quantforge.runtime.text_side import text_side

    loaded = load(path, settings.device, torch.bfloat16, input_bits=settings.input_bits)
    settings.policy.check(loaded.events)
    for event in loaded.events:
        settings.note(f"{event.kind}: {event.where}: {event.detail}")
    try:
        guesses = guesses_of(loaded, drafts, settings)
        decoder = guesses.decoder if guesses else Decoder(loaded.model, scales=loaded.kv_scales)
    except RefusedError as error:
        raise RefusedError(
            error.message, "bench it in its engine: quantforge bench MODEL --url ..."
        ) from error
    return decoder, text_side(loaded.path, loaded.config), guesses


def _requests(side: TextSide, text: str, options: LoadOptions) -> list[TimedRequest]:
    from quantforge.runtime.text_side import as_input_errors

    with as_input_errors():
        ids = side.tokenizer.encode(text, "the text of the requests")
    if options.trace is not None:
        found = read_trace(options.trace, ids, options.stream.seed)
    else:
        found = options.stream.made(ids)
    longest = max(len(one.ids) + one.new_tokens for one in found)
    if longest > side.positions:
        raise InputError(
            f"a request has {longest} tokens, old and new; the model has {side.positions} positions",
            "smaller --prompt-tokens, --new-tokens or --shared-tokens",
        )
    return found


def _engine(
    decoder: Decoder, requests: Sequence[TimedRequest], options: LoadOptions
) -> EngineOptions:
    from quantforge.runtime.serving.engine_options import EngineOptions

    longest = max(len(one.ids) + one.new_tokens for one in requests)
    return EngineOptions(
        rows=options.rows,
        tokens=min(longest, decoder.positions),
        cache=options.cache,
        token_budget=max(options.token_budget, options.rows),
        batching=options.batching,
        chunked_prefill=options.chunked_prefill,
        prefix_cache=options.prefix_cache,
    )


def _counts(counters: Counters) -> dict[str, Any]:
    finished = {str(reason): count for reason, count in counters.finished.items()}
    return {**asdict(counters), "finished": finished}
