"""``quantforge generate``: a model continues a text or answers; without a prompt, a terminal gets a chat."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from quantforge.architectures.cache_kinds import FORM, WORDS, completions, kinds_of
from quantforge.checkpoint.hub import is_hub_name
from quantforge.cli import draft_flags, options, ranks
from quantforge.cli.answer_options import takes_answer_options
from quantforge.cli.console import Console
from quantforge.errors import InputError, UsageError
from quantforge.runtime.speculation.options import DRAFT_TOKENS, DraftOptions
from quantforge.settings import Settings, under_torchrun
from quantforge.verbs.generate_text import (
    check_drafts,
    limits_of,
    open_speaker,
    opened_to_answer,
)

EXAMPLE = 'Example: quantforge generate demo "Explain json."'
INTERRUPTED = 130
MOST_BYTES = 1 << 22  # of a prompt that is piped in: more than any model has positions for

ANSWERS = "Who answers, and to what"

Prompt = Annotated[
    str | None,
    typer.Argument(help="What is said (default: what is piped in, on a terminal a chat).", metavar="[PROMPT]"),
]  # fmt: skip
Compare = Annotated[
    list[str] | None,
    typer.Option(
        "--compare",
        metavar="MODEL",
        help="Let this model answer too (repeatable), side by side.",
        rich_help_panel=ANSWERS,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system", metavar="TEXT", help="Said to a chat model before all.", rich_help_panel=ANSWERS
    ),
]
Raw = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Complete the prompt as text, without the chat template.",
        rich_help_panel=ANSWERS,
    ),
]


Cache = Annotated[
    str,
    typer.Option("--cache", metavar="KIND", autocompletion=completions,
                 help=f"How keys and values are stored: {', '.join(WORDS)}, or {FORM}."),
]  # fmt: skip


@takes_answer_options
def generate(
    model: options.Model,
    prompt: Prompt = None,
    compare: Compare = None,
    system: System = None,
    raw: Raw = False,
    *,
    given: dict[str, Any],
    draft: draft_flags.Draft = None,
    draft_tokens: draft_flags.DraftTokens = DRAFT_TOKENS,
    draft_tree: draft_flags.DraftTree = "",
    cache: Cache = "",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    input_bits: options.InputBits = 16,
    offline: options.Offline = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Let models of any format continue a text, or answer where they have a chat template."""
    console = Console(as_json=as_json, quiet=quiet or as_json or ranks.silent())
    _check_order(model, prompt or "")
    _check_ranks(prompt, draft)
    text = _piped() if prompt in {None, "-"} else prompt
    if text is None and (as_json or compare or given["n"] > 1):
        needing = "--json, --compare and -n need a PROMPT"
        raise UsageError(needing, 'quantforge generate MODEL "..."')
    if system is not None and raw:
        raise UsageError("--system and --raw: there is nothing to tell", "leave one out")
    if compare:
        _check_compared(given, draft)
    _check_effect(given, cache, as_json=as_json)
    drafts = DraftOptions(draft or "", draft_tokens, draft_tree)
    limits = limits_of(**given)
    settings = Settings(
        ranks.own_device(device), threads, offline=offline, input_bits=input_bits, note=console.note,
        split=under_torchrun(),
    )  # fmt: skip
    _check_headers((model, *(compare or ())), drafts, settings)
    console.note(f"loading {model}")  # what comes next imports torch
    if text is None:
        from quantforge.cli.terminal_chat import chat

        speaker = open_speaker(model, settings, drafts, cache)
        chat(console, speaker, limits, system=system, raw=raw)
        return
    from quantforge.cli.answers import Asked, ask_all

    asked = Asked(text, limits, system, raw, drafts, cache)
    with ranks.one_speaks():
        found = ask_all(console, (model, *(compare or ())), settings, asked)
        if as_json:
            answers = [one.document() for one in found]
            console.document(
                {"schema": "quantforge.generate/1", "prompt": text, "answers": answers}
            )
    if found[-1].stopped == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _check_ranks(prompt: str | None, draft: str | None) -> None:
    """Refuse under torchrun what its processes could not do alike, as `UsageError`."""
    if not under_torchrun():
        return
    if prompt in {None, "-"}:
        raise UsageError(
            "torchrun: its processes have no terminal and no standard input in common",
            'torchrun ... -m quantforge generate MODEL "..."',
        )
    if draft:
        raise UsageError(
            f"--draft {draft}: torchrun's processes share one model", "leave --draft out"
        )


def _check_compared(given: dict[str, Any], draft: str | None) -> None:
    """Refuse what is of one model where several answer, as `UsageError`."""
    if draft or given["n"] > 1:
        other = (
            "--draft: a draft is of one model" if draft else "-n: one answer of each is compared"
        )
        raise UsageError(f"--compare and {other}", "leave one out")


def _check_effect(given: dict[str, Any], cache: str, *, as_json: bool) -> None:
    """Refuse options that mean nothing, or have no effect without others, as `UsageError`."""
    if cache:
        kinds_of(cache)
    if "logprobs" in given and not as_json:
        raise UsageError("--logprobs is told in the JSON document", "add --json")
    if given["include_stop"] and not given.get("stop"):
        raise UsageError("--include-stop: no text ends the answer", "add --stop TEXT")


def _check_headers(models: Sequence[str], drafts: DraftOptions, settings: Settings) -> None:
    """Refuse what headers refuse of models and their draft, before one is said to load; errors as `open_speaker`."""
    for one in models:
        if not is_hub_name(one.partition("@")[0]):
            opened_to_answer(one, settings)
    check_drafts(models[0], drafts, settings)


def _check_order(model: str, prompt: str) -> None:
    """Refuse a prompt that stands before its model.

    Raises:
        UsageError: with the two exchanged.
    """
    try:
        swapped = Path(prompt).exists() and not Path(model).exists()
    except (OSError, ValueError):  # too long for a name, or a null
        return
    if swapped and (Path(prompt).is_dir() or prompt.endswith(".gguf")):
        raise UsageError(
            f"{model:.60}: no such model, and the prompt '{prompt}' is one: the model comes first",
            f"quantforge generate {shlex.quote(prompt)} {shlex.quote(model)}",
        )


def _piped() -> str | None:
    """Read the prompt from standard input, without the end of its last line; None on a terminal.

    Raises:
        InputError: it is not UTF-8, or longer than any prompt.
        UsageError: there is none.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        data = sys.stdin.buffer.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise InputError(
                f"the prompt on standard input has more than {MOST_BYTES} bytes", "a shorter one"
            )
        text = data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"the prompt on standard input is not UTF-8: {error}", "convert it"
        ) from error
    if not text:
        raise UsageError(
            "no prompt, and nothing on standard input", 'quantforge generate MODEL "..."'
        )
    return text
