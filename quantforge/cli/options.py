"""Command-line options that several verbs share, and parsers of their values.

Options that override recipe fields are in `choices`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from quantforge.cache_kinds import FORM, WORDS, completions, parse_cache_kind
from quantforge.errors import UsageError, nearest_hint
from quantforge.events import KINDS, Policy
from quantforge.planning import typed_quantities
from quantforge.planning.gpu_cards import CARDS
from quantforge.plans import Serving
from quantforge.runtime.speculation.draft_options import validate_draft
from quantforge.settings import (
    ACTIVATIONS,
    check_device_name,
    check_jobs,
    check_threads,
)

Completer = Callable[[str], list[str]]


def complete_from(*choice_lists: Iterable[str]) -> Completer:
    """Return a shell completer for words of some lists; of a sum such as ``awq+gptq`` it completes the last part."""
    all_choices = [choice for choices in choice_lists for choice in choices]

    def complete(incomplete: str) -> list[str]:
        head, plus, last = incomplete.rpartition("+")
        return [
            f"{head}{plus}{choice}"
            for choice in all_choices
            if choice.startswith(last) and choice not in head
        ]

    return complete


def _check_activations(value: str) -> str:
    if value not in ACTIVATIONS:
        raise UsageError(f"--activations {value}: unknown", nearest_hint(value, ACTIVATIONS))
    return value


_result: Any = partial(typer.Option, rich_help_panel="Result")
_run: Any = partial(typer.Option, rich_help_panel="How it runs")
_accepted: Any = partial(typer.Option, rich_help_panel="What is accepted")
_shown: Any = partial(typer.Option, rich_help_panel="What is shown")
_size: Any = partial(typer.Option, rich_help_panel="Within a size")
_served: Any = partial(typer.Option, rich_help_panel="Where it is served")
_speculation: Any = partial(typer.Option, rich_help_panel="Speculation")


def _draft_option(names: str) -> Any:
    help_text = f"Draft tokens to check together: {names}."
    return _speculation("--draft", metavar="WHAT", help=help_text, callback=validate_draft)


Model = Annotated[
    str,
    typer.Argument(
        help="A directory, a GGUF file or org/name[@revision].",
        metavar="MODEL",
    ),
]
Output = Annotated[
    Path | None,
    _result(
        "-o",
        "--output",
        metavar="PATH",
        help="Directory to make, or NAME.gguf (default: a name that is said first).",
    ),
]
Log = Annotated[
    Path | None,
    _run("--log", metavar="FILE", help="Add times of the parts to this file (JSON lines)."),
]
Overwrite = Annotated[
    bool,
    _result("--overwrite", help="Replace an output that QuantForge wrote."),
]
Join = Annotated[
    bool, _run("--join", help="Share the work with processes that give the same command.")
]
Jobs = Annotated[
    int,
    _run(
        "--jobs",
        metavar="N",
        min=1,
        callback=check_jobs,
        help="Processes that share the results to be made, each in memory of its own.",
    ),
]
Device = Annotated[
    str,
    _run(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda or cuda:N.",
        callback=check_device_name,
        autocompletion=complete_from(("cpu", "cuda")),
    ),
]
Threads = Annotated[
    int | None,
    _run(
        "--threads", metavar="N", help="CPU threads (default: all).", min=1, callback=check_threads
    ),
]
InputBits = Annotated[
    int,
    _run(
        "--input-bits",
        metavar="BITS",
        help="Products round activations to integers of 16 bits, or 8: faster, less exact (CPU).",
    ),
]
Activations = Annotated[
    str,
    _run(
        "--activations",
        metavar="WHERE",
        help=f"Where hidden states are kept: {', '.join(ACTIVATIONS)}.",
        callback=_check_activations,
        autocompletion=complete_from(ACTIVATIONS),
    ),
]
Strict = Annotated[
    bool, _accepted("--strict", help="Refuse every degradation that --allow does not accept.")
]
Allow = Annotated[
    list[str] | None,
    _accepted(
        "--allow",
        metavar="EVENT=N",
        help="Accept up to N events of a kind (repeatable).",
        autocompletion=complete_from([f"{kind}=" for kind in KINDS]),
    ),
]
AllowInexact = Annotated[
    bool, _accepted("--allow-inexact", help="Accept a conversion that changes values.")
]
Source = Annotated[
    str | None,
    typer.Option(
        "--source",
        metavar="MODEL",
        help="What a quantized model was made from.",
    ),
]
Adapter = Annotated[
    Path | None,
    typer.Option(
        "--adapter",
        metavar="DIR",
        help="The adapter that was merged into the source.",
    ),
]
Requantize = Annotated[
    bool, _accepted("--requantize", help="Quantize decoded weights again, as an event.")
]
Modelfile = Annotated[
    bool, _result("--modelfile", help="GGUF: also write NAME.Modelfile for Ollama.")
]
Mmproj = Annotated[
    bool, _result("--mmproj", help="GGUF: also write the vision tower, mmproj-NAME-F16.gguf.")
]
ImatrixFile = Annotated[
    Path | None,
    typer.Option(
        "--imatrix",
        metavar="FILE",
        help="Importance of columns from this file (llama.cpp's, GGUF or .dat); made there first if it is missing.",
        rich_help_panel="Rounding",
    ),
]
Provenance = Annotated[
    bool,
    _result(
        "--provenance", help="Also write an in-toto statement and a CycloneDX bill of materials."
    ),
]
BaseModel = Annotated[
    str,
    _result(
        "--base-model",
        metavar="ORG/NAME",
        help="For the card: the original model on the hub (default: as its files say).",
    ),
]
Sign = Annotated[
    Path | None,
    _result(
        "--sign", metavar="KEY", help="Sign the result with this private key (elliptic curve, PEM)."
    ),
]
DryRun = Annotated[bool, _run("--dry-run", help="Show the plan and write nothing.")]
Offline = Annotated[bool, _run("--offline", help="Never touch the network.")]
Json = Annotated[bool, _shown("--json", help="Exactly one JSON document on stdout.")]
Quiet = Annotated[bool, _shown("-q", "--quiet", help="No progress and no notes.")]
Verbose = Annotated[
    bool,
    _shown("-v", "--verbose", help="A line for each finished part: error, time, memory."),
]
Reasons = Annotated[
    bool, _shown("-v", "--verbose", help="Also why usual schemes are no candidates.")
]
JsonProgress = Annotated[
    bool,
    _shown("--json-progress", help="Progress, notes and errors as lines of JSON on stderr."),
]
Target = Annotated[
    str | None,
    _size(
        "--target",
        metavar="SIZE",
        help="3.5bpw: bits per weight inside of blocks; 18GB or 17GiB: all weight files; 24GB@32k (24GB@8x32k): "
        "memory, with the cache of one (eight) sequences of so many tokens.",
    ),
]
Like = Annotated[
    str | None,
    _size(
        "--like",
        metavar="FILE.gguf",
        help="In place of --target: as many bytes as this quantized form of the same model, made by anyone.",
    ),
]
Candidates = Annotated[
    str | None,
    _size(
        "--candidates",
        metavar="SCHEME,SCHEME",
        help="Schemes to choose from (default: usual widths that the format, and --for's engine, takes).",
    ),
]
Context = Annotated[
    str | None,
    _served("--context", metavar="TOKENS", help="Tokens of a sequence: 8192, or 32k for 32,768."),
]
Batch = Annotated[int | None, _served("--batch", metavar="N", help="Sequences at a time.", min=1)]
Cache = Annotated[
    str | None,
    _served(
        "--cache",
        metavar="TYPE",
        help=f"Type of the cache: {', '.join(WORDS)}, or {FORM}.",
        autocompletion=completions,
    ),
]
Memory = Annotated[
    str | None,
    _served("--memory", metavar="SIZE", help="Of a device: 24GB (24e9 bytes) or 24GiB."),
]
Bandwidth = Annotated[
    str | None, _served("--bandwidth", metavar="RATE", help="Of that memory: 3.35TB/s.")
]
Compute = Annotated[
    str | None,
    _served("--compute", metavar="RATE", help="Of 16-bit matrix products: 989TFLOPS."),
]
DeviceName = Annotated[
    str | None,
    _served(
        "--device-name",
        metavar="CARD",
        help=f"All three of a known card: {', '.join(CARDS)}.",
        autocompletion=complete_from(tuple(CARDS)),
    ),
]
Price = Annotated[
    str | None, _served("--price", metavar="PRICE", help="Of all devices for an hour: 2.5/h.")
]
Draft = Annotated[
    str | None, _draft_option("ngram, lookahead, int2, int3, int4, mtp, a MODEL or heads")
]
StepDraft = Annotated[str | None, _draft_option("ngram, int2, int3, int4 or a MODEL")]
DraftTokens = Annotated[
    int, _speculation("--draft-tokens", metavar="N", help="Drafted tokens in a row, at most.")
]
DraftTree = Annotated[
    str,
    _speculation(
        "--draft-tree",
        metavar="KxK...",
        help="Drafted tokens after each token, place by place, as 3x2x1, checked in one pass.",
    ),
]

# Options of how a verb runs and what it prints: type and default. `run_options` gives a verb some of them as one group,
# from which `quantforge.cli.processes` makes its console and settings.
RUN_OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "device": (Device, "cpu"), "threads": (Threads, None), "input_bits": (InputBits, 16), "jobs": (Jobs, 1),
    "join": (Join, False), "activations": (Activations, "memory"), "strict": (Strict, False), "allow": (Allow, None),
    "offline": (Offline, False), "as_json": (Json, False), "quiet": (Quiet, False), "reasons": (Reasons, False),
    "json_progress": (JsonProgress, False),
}  # fmt: skip
# Options of the device and load that a result is planned for.
LOAD_OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "context": (Context, None), "batch": (Batch, None), "cache": (Cache, None), "memory": (Memory, None),
    "bandwidth": (Bandwidth, None), "compute": (Compute, None), "device_name": (DeviceName, None),
    "price": (Price, None),
}  # fmt: skip
DEVICE_OPTIONS, PARALLEL_OPTIONS = ("device", "threads", "offline"), ("jobs", "join", "activations")
POLICY_OPTIONS, DISPLAY_OPTIONS = ("strict", "allow"), ("as_json", "quiet", "json_progress")
# Values of a group of options by name; None for a switch that is off
OptionValues = Mapping[str, Any]


def run_options(*names: str) -> list[inspect.Parameter]:
    """Return function parameters for some options of `RUN_OPTIONS`."""
    return parameters({name: option for name, option in RUN_OPTIONS.items() if name in names})


def parameters(options: Mapping[str, tuple[Any, Any]]) -> list[inspect.Parameter]:
    """Return function parameters for options, given as type and default by name."""
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in options.items()
    ]


def with_option_groups(
    **groups: Iterable[inspect.Parameter],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces the parameter NAME of a verb with the options of ``groups[NAME]``.

    The verb receives the values of a group as a mapping in NAME, with None for options that were not given.
    """
    group_parameters = {name: [*parameters] for name, parameters in groups.items()}

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
            parameters += group_parameters.get(name, [parameter])
        parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]

        @wraps(verb)
        def command(**values: Any) -> None:
            options_by_group: dict[str, dict[str, Any]] = {}
            for name, options in group_parameters.items():
                values_of_group = {item.name: values.pop(item.name) for item in options}
                # A switch that is off does not override the recipe.
                options_by_group[name] = {
                    key: None if value is False else value for key, value in values_of_group.items()
                }
            verb(**values, **options_by_group)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {item.name: item.annotation for item in parameters}
        return command

    return decorate


def build_policy(strict: bool, allow: Sequence[str] | None) -> Policy:
    """Build the policy on events from ``--strict`` and ``--allow EVENT=N``.

    Raises:
        UsageError: a count is missing, or an event kind is unknown.
    """
    limits: dict[str, int] = {}
    for text in allow or []:
        kind, separator, count = text.partition("=")
        if not separator or not count.isdecimal():
            raise UsageError(
                f"--allow {text}: no count", "write --allow EVENT=N, e.g. --allow damping-raised=2"
            )
        limits[kind] = int(count)
    return Policy(strict, limits)


def parse_percent(text: str, option: str) -> float:
    """Parse ``2%`` or ``0.02`` to 0.02.

    Raises:
        UsageError: the text is not a fraction, or is ambiguous: a number of 1 or more without ``%``.
    """
    number = text.removesuffix("%")
    try:
        value = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise UsageError(f"{option} {text}: not a share", "write 2% or 0.02")
    if value >= 1 and not text.endswith("%"):
        raise UsageError(
            f"{option} {text}: {value:g}% or {value:.0%}?", f"write {value:g}% or {value / 100:g}"
        )
    return value


def build_serving(context: str | None, cache: str | None, engine: str | None = "any") -> Serving:
    """Return how a result is to be served, from command-line texts.

    Args:
        context: number of tokens, as typed.
        cache: type of the KV cache.
        engine: engine that uses these values; None if there is none.

    Raises:
        UsageError: a value is malformed, or is given without an engine.
    """
    texts = {"--context": context, "--cache": cache}
    for option, text in texts.items():
        if text is not None and engine is None:
            raise UsageError(f"{option} {text}: for which engine", "add --for ENGINE")
    if cache is not None:
        parse_cache_kind(cache)
    tokens = None if context is None else typed_quantities.tokens(context, "--context")
    return Serving(tokens, cache)
