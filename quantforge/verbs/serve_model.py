"""Serve: a model of any format behind an HTTP interface in the terms of OpenAI's API, until it is stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from quantforge.architectures.cache_kinds import kinds_of
from quantforge.errors import RefusedError, UsageError
from quantforge.http_api.server_limits import MIB, ServerLimits
from quantforge.runtime.speculation.draft_options import DRAFT_TOKENS, DraftOptions
from quantforge.settings import Settings
from quantforge.verbs.argument_types import check_choices
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.generate_text import check_drafts, guesses_of, loaded_to_answer
from quantforge.verbs.given_options import checks_options

if TYPE_CHECKING:
    from quantforge.http_api.served_model import ServedModel
    from quantforge.runtime.cache_layout import CacheLayout
    from quantforge.runtime.load import Loaded

HOST, PORT = "127.0.0.1", 8000
CONCURRENT = 16
CACHE_GIB = 4.0  # where all answers at their full length would take more
PACKAGES = ("starlette", "uvicorn")


class ServeOptions(TypedDict, total=False):
    """Where a server listens, how much it computes at a time, and what it accepts."""

    host: str
    port: int  # 0 takes a free one
    served_name: str  # by which requests ask for the model; its directory or file when left out
    cache: str  # kind of the cache, see `quantforge.architectures.cache_kinds`; that of the model when left out
    cache_gib: float  # most memory of the cache
    draft: str  # who guesses tokens that the model then checks together; nobody when left out
    draft_tokens: int  # guesses in a row at most
    draft_tree: str  # guesses behind each token, place by place
    context: int  # most tokens of a prompt and its answer; what the model sees when left out
    concurrent: int  # answers that are computed at a time
    waiting: int  # answers that may wait; more are refused
    max_body: int  # MiB of a request
    timeout: float  # seconds from a request to the end of its answers


@dataclass(frozen=True, slots=True)
class ListeningServer:
    """A server that listens.

    Attributes:
        url: where.
        model: name by which requests ask for it.
        chat: whether it has a chat template.
        context: most tokens of a prompt and its answer.
        concurrent: answers that are computed at a time.
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


@checks_options(ServeOptions)
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
        UsageError: a value that means nothing here, or starlette and uvicorn are not installed.
        InputError: the model or its tokenizer cannot be used, or the address cannot be had.
        RefusedError: a family that the own decoder does not compute.
        ResourceError: a GPU has no room for the model or the cache.
    """
    settings, limits = settings or Settings(), _checked(options)
    from quantforge.http_api.run_server import listen, server_of, url_of

    listening = listen(options.get("host", HOST), options.get("port", PORT))
    try:
        served = served_model(model, settings, limits, options)
        serving = ListeningServer(
            url=url_of(listening),
            model=served.name,
            chat=served.side.template is not None,
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
    model: str | Path | Loaded, settings: Settings, limits: ServerLimits, options: ServeOptions
) -> ServedModel:
    """Return a model that is ready to be served; errors as `serve`."""
    check_drafts(model, _drafts(options), settings, steps=True)
    loaded, name = loaded_to_answer(model, settings)
    for event in loaded.events:
        settings.note(f"{event.kind}: {event.where}: {event.detail}")
    import torch

    from quantforge.http_api.served_model import ServedModel
    from quantforge.runtime.cache_layout import CacheLayout
    from quantforge.runtime.computed import supports
    from quantforge.runtime.decoder import Decoder
    from quantforge.runtime.serving.engine import ServingEngine
    from quantforge.runtime.serving.engine_options import EngineOptions
    from quantforge.runtime.text_side import text_side

    if not supports(loaded.model):
        raise RefusedError(
            f"model_type {loaded.model.config.model_type!r} is not computed by the own decoder, which serving needs",
            "`quantforge generate` answers with it; `quantforge plan MODEL --for ENGINE` prints how another serves it",
        )
    side = text_side(loaded.path, loaded.config)
    for note in side.template.notes if side.template else ():
        settings.note(note)
    guesses = guesses_of(loaded, _drafts(options), settings)
    decoder = guesses.decoder if guesses else Decoder(loaded.model, scales=loaded.kv_scales)
    kind = options.get("cache") or ("fp8" if loaded.kv_scales else "")
    context = options.get("context") or min(decoder.positions, side.positions)
    rows = options.get("concurrent", CONCURRENT)
    wanted = EngineOptions(
        rows=rows,
        tokens=context,
        cache=kind,
        token_budget=max(EngineOptions().token_budget, rows),
    )
    layout = CacheLayout(decoder.cache_shape(kind), context, wanted.ahead)
    pages = _pages(layout, rows, options.get("cache_gib", CACHE_GIB))
    engine = ServingEngine(decoder, replace(wanted, pages=pages), guesses)

    def begin() -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)

    return ServedModel(options.get("served_name") or _name(name), side, engine, rows, limits, begin)


def _pages(layout: CacheLayout, rows: int, gib: float) -> int:
    """Return the pages of the cache: for all rows to be full, or as many as the memory holds beside the rings.

    Raises:
        UsageError: not even one.
    """
    from quantforge_kernels.kv import PAGE

    full, rings = rows * -(-layout.tokens // PAGE), rows * layout.ring_bytes
    left = int(gib * (1 << 30)) - rings
    pages = min(full, left // layout.page_bytes) if layout.page_bytes else full * (left >= 0)
    if pages < 1:
        beside = f", beside {rings} of windows" if rings else ""
        raise UsageError(
            f"a cache of {gib:g} GiB: {PAGE} tokens take {layout.page_bytes} bytes{beside}",
            "give it more memory" + (", or less --concurrent" if rings else ""),
        )
    return pages


def _drafts(options: ServeOptions) -> DraftOptions:
    return DraftOptions(
        options.get("draft", ""),
        options.get("draft_tokens", DRAFT_TOKENS),
        options.get("draft_tree", ""),
    )


def _name(name: str) -> str:
    """Return the last part of a path, or a name of the hub without its revision."""
    return Path(name).resolve().name if Path(name).exists() else name.partition("@")[0]


def _checked(options: ServeOptions) -> ServerLimits:
    """Check options that do not depend on the model, and return the limits.

    Raises:
        UsageError: a name or a value that means nothing, or a package is missing.
    """
    check_choices(ServeOptions, options)
    if kind := options.get("cache"):
        kinds_of(kind)
    _drafts(options)
    port, gib = options.get("port", PORT), options.get("cache_gib", CACHE_GIB)
    if type(port) is not int or not 0 <= port < 1 << 16:
        raise UsageError(f"port = {port!a:.60}", "a whole number from 0 to 65535 (0: a free one)")
    if type(gib) not in (int, float) or not 0 < gib < 1e6:
        raise UsageError(f"cache_gib = {gib!a:.60}", "a number of GiB above 0")
    for name in ("context", "concurrent", "max_body"):
        value = options.get(name, 1)
        if type(value) is not int or value < 1:
            raise UsageError(f"{name} = {value!a:.60}", "a whole number from 1 on")
    lacking = [name for name in PACKAGES if find_spec(name) is None]
    if lacking:
        raise UsageError(
            f"serving needs {' and '.join(lacking)}, not installed here",
            "pip install 'quantforge[serve]'",
        )
    usual = ServerLimits()
    return ServerLimits(
        waiting=options.get("waiting", usual.waiting),
        body_bytes=options["max_body"] * MIB if "max_body" in options else usual.body_bytes,
        seconds=options.get("timeout", usual.seconds),
    )
