"""``quantforge serve``: a model behind OpenAI's API over HTTP."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from quantforge.architectures.cache_kinds import FORM, WORDS, completions
from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.serving.serve_options import DEFAULTS, ServeOptions
from quantforge.settings import Settings

if TYPE_CHECKING:
    from quantforge.verbs import ListeningServer

EXAMPLE = "Example: quantforge serve demo-gptq-int4"
LOCAL = ("127.", "::1", "localhost")

Host = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; 0.0.0.0 is everywhere.")
]
Port = Annotated[int, typer.Option("--port", help="Port (0: a free one).")]
ServedName = Annotated[
    str,
    typer.Option(
        "--served-name", metavar="NAME", help="What requests call the model (default: its name)."
    ),
]
Cache = Annotated[
    str,
    typer.Option(
        "--cache",
        metavar="KIND",
        autocompletion=completions,
        help=f"Quantized cache: {', '.join(WORDS[1:])}, or {FORM} (default: as wide as activations).",
    ),
]
CacheGib = Annotated[
    float, typer.Option("--cache-memory", metavar="GIB", help="Most memory of the cache.")
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="N",
        min=1,
        help="Most tokens of a prompt and its completion (default: as many as the model sees).",
    ),
]
Concurrent = Annotated[
    int, typer.Option("--concurrent", metavar="N", min=1, help="Completions computed at a time.")
]
Waiting = Annotated[
    int,
    typer.Option(
        "--waiting", metavar="N", min=0, help="Completions that may wait; more are refused (429)."
    ),
]
MaxBody = Annotated[
    int, typer.Option("--max-body", metavar="MIB", min=1, help="Largest request (413 beyond it).")
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        help="Most time from a request to the end of its completions.",
    ),
]


def serve(
    model: options.Model,
    host: Host = DEFAULTS["host"],
    port: Port = DEFAULTS["port"],
    served_name: ServedName = "",
    cache: Cache = "",
    cache_memory: CacheGib = DEFAULTS["cache_gib"],
    context: Context = None,
    concurrent: Concurrent = DEFAULTS["concurrent"],
    waiting: Waiting = DEFAULTS["waiting"],
    max_body: MaxBody = DEFAULTS["max_body"],
    timeout: Timeout = DEFAULTS["timeout"],
    draft: options.StepDraft = None,
    draft_tokens: options.DraftTokens = DEFAULTS["draft_tokens"],
    draft_tree: options.DraftTree = "",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    input_bits: options.InputBits = 16,
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Serve a model to clients of OpenAI's API; Ctrl-C stops it."""
    console = Console(as_json=as_json, quiet=quiet or as_json)
    given: ServeOptions = {
        "host": host,
        "port": port,
        "served_name": served_name,
        "cache": cache,
        "cache_gib": cache_memory,
        "concurrent": concurrent,
        "waiting": waiting,
        "max_body": max_body,
        "timeout": timeout,
        "draft": draft or "",
        "draft_tokens": draft_tokens,
        "draft_tree": draft_tree,
    }
    if context is not None:
        given["context"] = context
    settings = Settings(
        device=device, threads=threads, offline=offline, input_bits=input_bits, note=console.note
    )

    def ready(server: ListeningServer) -> None:
        if as_json:
            console.document({"schema": "quantforge.serve/1", **server.document()})
            return
        console.text(f"serving {server.model} at {server.url}")
        console.text(example(server))
        if not host.startswith(LOCAL):
            console.note(f"whoever reaches {host} may use it: there is no password")
        console.note(
            f"{server.concurrent} completions at a time, {server.context} tokens each at most, "
            f"{server.cache_tokens} in all; Ctrl-C stops"
        )
        console.flush()

    from quantforge.verbs import serve_model

    serve_model.serve(model, settings, ready=ready, **given)
    console.note("stopped")


def example(server: ListeningServer) -> str:
    """Return a command that asks the server for an answer."""
    body: dict[str, object] = {"model": server.model, "max_tokens": 64, "temperature": 0}
    if server.chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Explain json."}]
    else:
        path, body["prompt"] = "completions", "import json"
    data = shlex.quote(json.dumps(body))
    return f"curl {server.url}/v1/{path} -H 'Content-Type: application/json' -d {data}"
