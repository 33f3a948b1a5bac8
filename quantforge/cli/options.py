"""Options that several verbs share, each with its one name, help and range.

An option that chooses something of a recipe is a line of `RECIPE`; its type, and the least that it may be, are those of
the field of `Recipe` that it stands for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from quantforge.errors import UsageError, nearest
from quantforge.planning.recipe_options import place_of
from quantforge.recipe import LIMITS, Recipe
from quantforge.settings import ACTIVATIONS, check_threads


def _device(value: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise UsageError(f"--device {value}: unknown", "cpu, cuda or cuda:N")
    return value


def _activations(value: str) -> str:
    if value not in ACTIVATIONS:
        raise UsageError(f"--activations {value}: unknown", nearest(value, ACTIVATIONS))
    return value


@dataclass(frozen=True, slots=True)
class Choice:
    """An option of `RECIPE`.

    Attributes:
        help: what it chooses; ``{default}`` is the recipe's, ``{least}`` and ``{most}`` are its `LIMITS`.
        metavar: what stands for its value in ``--help``; its type when left out.
        flag: what is typed; the name of the choice when left out.
        most: whether the command line refuses what is above the most, and says so, or leaves it to the recipe.
    """

    help: str
    metavar: str | None = None
    flag: str = ""
    most: bool = False


# By the names of `RecipeOptions`, in the order of ``--help``; ``recipe`` is what the others override.
RECIPE: Mapping[str, Choice] = {
    "method": Choice("rtn, gptq, awq, or a sum such as awq+gptq."),
    "bits": Choice("The one dial: {least} to {most}.", most=True),
    "scheme": Choice("The expert's dial, e.g. int4:g128:sym or W4A16."),
    "format": Choice("Format of the result (default: what holds the scheme)."),
    "engine": Choice("Make what this engine is fast with, or refuse.", "ENGINE", "--for"),
    "tensor_parallel": Choice("Devices that --for's engine splits it over."),
    "type": Choice("GGUF: the mixture, e.g. Q4_K_M (default by --bits)."),
    "pre": Choice("GGUF: llama.cpp's name of a pre-tokenizer that is not recognised."),
    "ignore": Choice("Leave matching layers alone (repeatable).", "PATTERN"),
    "rules": Choice(
        "Scheme of matching layers (repeatable, first wins).", "PATTERN=SCHEME", "--rule"
    ),
    "recipe": Choice("A TOML recipe, or the name of a built-in one.", "FILE|NAME"),
    "scales": Choice(
        "absmax, {default} (default), or reference: into GGUF, with the bytes of llama.cpp's own quantizer."
    ),
    "inputs": Choice("Range of static inputs: {default} (default), percentile or mse."),
    "kv_cache": Choice("Measure scales of an fp8 KV cache: fp8 (per tensor) or fp8_head."),
    "head": Choice("Quantize the output projection too.", "SCHEME"),
    "embedding": Choice("Quantize the token embedding too.", "SCHEME"),
    "refine": Choice("Sweeps after GPTQ (default {default})."),
    "calibration": Choice("FILE, name:split:column, builtin, self, or a=3,b=1.", "SOURCE"),
    "samples": Choice("Calibration rows."),
    "length": Choice("Tokens of a row."),
    "seed": Choice("Seed of the choice of calibration rows."),
    "chat_template": Choice("Render `messages` through the model's chat template (sandboxed)."),
    "max_shard_bytes": Choice("Size limit of one weight file."),
}
Given = Mapping[str, Any]  # choices by the names of `RECIPE`, None where one was not made


def flag_of(name: str) -> str:
    """Return what is typed for a choice of `RECIPE`."""
    return RECIPE[name].flag or f"--{name.replace('_', '-')}"


def recipe_parameters(names: Sequence[str]) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a command for choices of `RECIPE`, which are None (or False) where they are not made."""
    for name in names:
        choice = RECIPE[name]
        place, hint = ("", str) if name == "recipe" else place_of(name)
        kind: Any = next(item for item in (*get_args(hint), hint) if item is not type(None))
        kind = list[str] if get_origin(hint) is tuple else kind
        least, most = LIMITS.get(place, (None, None))
        default = attrgetter(place)(Recipe()) if place else None
        option = typer.Option(
            False if kind is bool else None,
            flag_of(name),
            help=choice.help.format(default=default, least=least, most=most),
            metavar=choice.metavar,
            min=least,
            max=most if choice.most else None,
        )
        annotation = kind if kind is bool else kind | None
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
        )


Model = Annotated[str, typer.Argument(help="Directory or org/name[@revision].", metavar="MODEL")]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="Directory to make, or NAME.gguf (default: a name that is said first).",
    ),
]
Log = Annotated[
    Path | None,
    typer.Option("--log", metavar="FILE", help="Add times of the parts to this file (JSON lines)."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an output that QuantForge wrote.")
]
Join = Annotated[
    bool,
    typer.Option("--join", help="Share the work with processes that give the same command."),
]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.", callback=_device)]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="CPU threads (default: all).", min=1, callback=check_threads),
]
Activations = Annotated[
    str,
    typer.Option(
        "--activations",
        help="Where hidden states are kept: memory or disk.",
        callback=_activations,
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse every degradation that --allow does not accept.")
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow", metavar="EVENT=N", help="Accept up to N events of a kind (repeatable)."
    ),
]
AllowInexact = Annotated[
    bool, typer.Option("--allow-inexact", help="Accept a conversion that changes values.")
]
Source = Annotated[
    str | None,
    typer.Option("--source", metavar="MODEL", help="What a quantized model was made from."),
]
Requantize = Annotated[
    bool, typer.Option("--requantize", help="Quantize decoded weights again, as an event.")
]
Modelfile = Annotated[
    bool, typer.Option("--modelfile", help="GGUF: also write NAME.Modelfile for Ollama.")
]
ImatrixFile = Annotated[
    Path | None,
    typer.Option(
        "--imatrix",
        help="Importance of columns from this file (llama.cpp's, GGUF or .dat); made there first if it is missing.",
    ),
]
Provenance = Annotated[
    bool,
    typer.Option(
        "--provenance", help="Also write an in-toto statement and a CycloneDX bill of materials."
    ),
]
Sign = Annotated[
    Path | None,
    typer.Option(
        "--sign", metavar="KEY", help="Sign the result with this private key (elliptic curve, PEM)."
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Never touch the network.")]
Json = Annotated[bool, typer.Option("--json", help="Exactly one JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress and no notes.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="More notes.")]
