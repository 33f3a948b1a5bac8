"""Serve: a model of any format behind OpenAI's API over HTTP, until it is stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from quantforge.api.generate import check_drafts, loaded_to_answer, speculative_of
from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.errors import RefusedError, UsageError
from quantforge.serving.serve_options import ServeOptions, complete, drafts_of
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.runtime.cache import CacheLayout
    from quantforge.runtime.load import Loaded
    from quantforge.serving.routes import ServedModel


@dataclass(frozen=True, slots=True)
class ListeningServer:
    """A server that listens.

    Attributes:
        url: where.
        model: name by which requests ask for it.
        chat: whether it has a chat template.
        context: most tokens of a prompt and its completion.
        concurrent: completions that are computed at a time.
        cache_tokens: that the cache has room for.
    """

    url: str
    model: str
    chat: bool
    context: int
    concurrent: int
    cache_tokens: int

    def document(self) -> dict[str, Any]:
        """Return it as plain data (``quantforge.serve/1``)."""
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
        model: a directory, a GGUF file, ``org/name[@revision]``, or what `load` has returned.
        settings: device, threads, offline, and which events are accepted.
        ready: is called when it listens.
        options: see `ServeOptions`.

    Raises:
        UsageError: a value that means nothing here, or a package of the extra `serve` is not installed.
        InputError: the model or its tokenizer cannot be used, or the address cannot be had.
        RefusedError: a family that the own decoder does not compute.
        ResourceError: a GPU has no room for the model or the cache.
    """
    settings, wanted = settings or Settings(), complete(options)
    from quantforge.serving.server import listen, server_of, url_of

    listening = listen(wanted["host"], wanted["port"])
    try:
        served = served_model(model, settings, wanted)
        serving = ListeningServer(
            url=url_of(listening),
            model=served.name,
            chat=served.processor.template is not None,
            context=served.room,
            concurrent=served.rows,
            cache_tokens=served.cache_tokens,
        )
        try:
            server_of(served, lambda: ready(serving)).run(sockets=[listening])
        finally:
            served.engine.stop()
    finally:
        listening.close()


def served_model(
    model: str | Path | Loaded, settings: Settings, options: ServeOptions
) -> ServedModel:
    """Return a model that is ready to be served, by options that `complete` has checked; errors as `serve`."""
    drafts = drafts_of(options)
    check_drafts(model, drafts, settings, steps=True)
    loaded, name = loaded_to_answer(model, settings)
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
    side = load_text_processor(loaded.path, loaded.config)
    for note in side.template.notes if side.template else ():
        settings.note(note)
    speculative = speculative_of(loaded, drafts, settings)
    decoder = speculative.decoder if speculative else Decoder(loaded.model, scales=loaded.kv_scales)
    kind = options["cache"] or ("fp8" if loaded.kv_scales else "")
    context = options.get("context") or min(decoder.positions, side.positions)
    rows = options["concurrent"]
    wanted = EngineOptions(
        rows=rows,
        tokens=context,
        cache=kind,
        token_budget=max(EngineOptions().token_budget, rows),
    )
    layout = CacheLayout(decoder.cache_shape(kind), context, wanted.chunk)
    pages = _pages(layout, rows, options["cache_gib"])
    engine = ServingEngine(decoder, replace(wanted, pages=pages), speculative)

    def prepare() -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)

    return ServedModel(
        options["served_name"] or _name(name),
        side,
        engine,
        rows,
        options["waiting"],
        options["max_body"] << 20,
        options["timeout"],
        prepare,
    )


def _pages(layout: CacheLayout, rows: int, gib: float) -> int:
    """Return the pages of the cache: for all rows to be full, or as many as the memory holds beside the rings.

    Raises:
        UsageError: not even one.
    """
    from quantforge_kernels.kv import PAGE_SIZE

    full, rings = rows * -(-layout.tokens // PAGE_SIZE), rows * layout.ring_bytes
    left = int(gib * (1 << 30)) - rings
    pages = min(full, left // layout.page_bytes) if layout.page_bytes else full * (left >= 0)
    if pages < 1:
        beside = f", beside {rings} of windows" if rings else ""
        raise UsageError(
            f"a cache of {gib:g} GiB: {PAGE_SIZE} tokens take {layout.page_bytes} bytes{beside}",
            "give it more memory" + (", or less --concurrent" if rings else ""),
        )
    return pages


def _name(name: str) -> str:
    """Return the last part of a path, or a name of the hub without its revision."""
    return Path(name).resolve().name if Path(name).exists() else name.partition("@")[0]
