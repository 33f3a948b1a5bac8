"""``quantforge serve``: serve a model with OpenAI's HTTP API."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantforge.cache_kinds import FORM, WORDS, completions
from quantforge.cli import options, processes
from quantforge.serving.serve_options import DEFAULTS

if TYPE_CHECKING:
    from quantforge.api import ListeningServer

EXAMPLE = "Example: quantforge serve demo-gptq-int4"
LOCAL_HOSTS = ("127.", "::1", "localhost")

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


# By the names of `ServeOptions`, in the order of ``--help``.
SERVE_OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "host": (Host, DEFAULTS["host"]), "port": (Port, DEFAULTS["port"]), "served_name": (ServedName, ""),
    "cache": (Cache, ""), "cache_gib": (CacheGib, DEFAULTS["cache_gib"]), "context": (Context, None),
    "concurrent": (Concurrent, DEFAULTS["concurrent"]), "waiting": (Waiting, DEFAULTS["waiting"]),
    "max_body": (MaxBody, DEFAULTS["max_body"]), "timeout": (Timeout, DEFAULTS["timeout"]),
    "draft": (options.StepDraft, None), "draft_tokens": (options.DraftTokens, DEFAULTS["draft_tokens"]),
    "draft_tree": (options.DraftTree, ""),
}  # fmt: skip


@options.with_option_groups(
    serve_options=options.parameters(SERVE_OPTIONS),
    run_options=options.run_options(
        "device", "threads", "input_bits", "offline", "as_json", "quiet"
    ),
)
def serve(
    model: options.Model, *, serve_options: options.OptionValues, run_options: options.OptionValues
) -> None:
    """Serve a model to clients of OpenAI's API; Ctrl-C stops it."""
    console = processes.console_from_options(run_options)

    def ready(server: ListeningServer) -> None:
        if console.as_json:
            console.print_document({"schema": "quantforge.serve/1", **server.document()})
            return
        console.print_text(f"serving {server.model} at {server.url}")
        console.print_text(example_request(server))
        if not serve_options["host"].startswith(LOCAL_HOSTS):
            console.note(
                f"whoever reaches {serve_options['host']} may use it: there is no password"
            )
        console.note(
            f"{server.concurrent} completions at a time, {server.context} tokens each at most, "
            f"{server.cache_tokens} in all; Ctrl-C stops"
        )
        console.flush()

    from quantforge.api.serve import serve

    settings = processes.settings_from_options(run_options, console)
    given_options = {name: value for name, value in serve_options.items() if value is not None}
    serve(model, settings, ready=ready, **given_options)
    console.note("stopped")


def example_request(server: ListeningServer) -> str:
    """Return a curl command with an example request to the server."""
    body: dict[str, object] = {"model": server.model, "max_tokens": 64, "temperature": 0}
    if server.chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Explain json."}]
    else:
        path, body["prompt"] = "completions", "import json"
    data = shlex.quote(json.dumps(body))
    return f"curl {server.url}/v1/{path} -H 'Content-Type: application/json' -d {data}"
