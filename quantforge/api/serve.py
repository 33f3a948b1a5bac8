"""``serve``: serve a model of any format with OpenAI's HTTP API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from quantforge.api.generate import (
    check_draft_options,
    load_for_generation,
    load_speculative_decoder,
)
from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.errors import RefusedError, UsageError
from quantforge.serving.serve_options import ServeOptions, complete_options, draft_options
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.runtime.cache import CacheLayout
    from quantforge.runtime.load import Loaded
    from quantforge.serving.routes import ServedModel


@dataclass(frozen=True, slots=True)
class ListeningServer:
    """Address and limits of a running server.

    Attributes:
        url: its address.
        model: name of the model in requests.
        chat: whether the model has a chat template.
        context: maximum number of tokens of a prompt and its completion.
        concurrent: maximum number of completions computed at a time.
        cache_tokens: capacity of the KV cache in tokens.
    """

    url: str
    model: str
    chat: bool
    context: int
    concurrent: int
    cache_tokens: int

    def document(self) -> dict[str, Any]:
        """Return the fields as plain data (``quantforge.serve/1``)."""
        return {name: getattr(self, name) for name in self.__slots__}


@check_arguments(ServeOptions)
@torch_defaults()
def serve(
    model: str | Path | Loaded,
    settings: Settings | None = None,
    *,
    ready: Callable[[ListeningServer], object] = lambda _: None,
    **options: Unpack[ServeOptions],
) -> None:
    """Serve a model until a signal (SIGINT, SIGTERM, SIGHUP) asks it to stop.

    Args:
        model: a directory, a GGUF file, ``org/name[@revision]``, or the result of `load`.
        settings: device, threads, offline, and which events are accepted.
        ready: called once the server listens.
        options: see `ServeOptions`.

    Raises:
        UsageError: an invalid value, or a package of the extra `serve` is not installed.
        InputError: the model or its tokenizer cannot be used, or the address is not available.
        RefusedError: QuantForge's decoder does not support the model family.
        ResourceError: the model or the cache does not fit into GPU memory.
    """
    settings, checked_options = settings or Settings(), complete_options(options)
    from quantforge.serving.server import create_server, listen, server_url

    listening_socket = listen(checked_options["host"], checked_options["port"])
    try:
        served_text_model = served_model(model, settings, checked_options)
        server_info = ListeningServer(
            url=server_url(listening_socket),
            model=served_text_model.name,
            chat=served_text_model.processor.template is not None,
            context=served_text_model.max_total_tokens,
            concurrent=served_text_model.rows,
            cache_tokens=served_text_model.cache_tokens,
        )
        try:
            create_server(served_text_model, lambda: ready(server_info)).run(
                sockets=[listening_socket]
            )
        finally:
            served_text_model.engine.stop()
    finally:
        listening_socket.close()


def served_model(
    model: str | Path | Loaded, settings: Settings, options: ServeOptions
) -> ServedModel:
    """Load a model for serving, with options that `complete_options` has checked; errors as `serve`."""
    drafts = draft_options(options)
    check_draft_options(model, drafts, settings, batched=True)
    loaded, name = load_for_generation(model, settings)
    for event in loaded.events:
        settings.note(f"{event.kind}: {event.where}: {event.detail}")
    import torch

    from quantforge.runtime.batching.engine import EngineOptions, ServingEngine
    from quantforge.runtime.cache import CacheLayout
    from quantforge.runtime.decoder import Decoder, supports
    from quantforge.runtime.text_processing import load_text_processor
    from quantforge.serving.routes import ServedModel

    if not supports(loaded.model):
        raise RefusedError(
            f"model_type {loaded.model.config.model_type!r} is not computed by the own decoder, which serving needs",
            "`quantforge generate` answers with it; `quantforge plan MODEL --for ENGINE` prints how another serves it",
        )
    processor = load_text_processor(loaded.path, loaded.config)
    for note in processor.template.notes if processor.template else ():
        settings.note(note)
    speculative = load_speculative_decoder(loaded, drafts, settings)
    decoder = speculative.decoder if speculative else Decoder(loaded.model, scales=loaded.kv_scales)
    cache_kind = options["cache"] or ("fp8" if loaded.kv_scales else "")
    context = options.get("context") or min(decoder.positions, processor.positions)
    rows = options["concurrent"]
    engine_options = EngineOptions(
        rows=rows,
        tokens=context,
        cache=cache_kind,
        token_budget=max(EngineOptions().token_budget, rows),
    )
    layout = CacheLayout(decoder.cache_shape(cache_kind), context, engine_options.chunk)
    pages = _num_cache_pages(layout, rows, options["cache_gib"])
    engine = ServingEngine(decoder, replace(engine_options, pages=pages), speculative)

    def prepare() -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)

    return ServedModel(
        options["served_name"] or _short_name(name),
        processor,
        engine,
        rows,
        options["waiting"],
        options["max_body"] << 20,
        options["timeout"],
        prepare,
    )


def _num_cache_pages(layout: CacheLayout, rows: int, gib: float) -> int:
    """Return the number of cache pages: enough for all rows, or as many as fit beside the ring buffers.

    Raises:
        UsageError: not even one page fits.
    """
    from quantforge_kernels.kv import PAGE_SIZE

    max_pages, ring_bytes = rows * -(-layout.tokens // PAGE_SIZE), rows * layout.ring_bytes
    remaining_bytes = int(gib * (1 << 30)) - ring_bytes
    pages = (
        min(max_pages, remaining_bytes // layout.page_bytes)
        if layout.page_bytes
        else max_pages * (remaining_bytes >= 0)
    )
    if pages < 1:
        ring_text = f", beside {ring_bytes} of windows" if ring_bytes else ""
        raise UsageError(
            f"a cache of {gib:g} GiB: {PAGE_SIZE} tokens take {layout.page_bytes} bytes{ring_text}",
            "give it more memory" + (", or less --concurrent" if ring_bytes else ""),
        )
    return pages


def _short_name(name: str) -> str:
    """Return the last part of a path, or a hub name without its revision."""
    return Path(name).resolve().name if Path(name).exists() else name.partition("@")[0]
