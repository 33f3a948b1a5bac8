"""Options that several verbs share: one meaning each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from quantforge.errors import UsageError, nearest
from quantforge.settings import check_threads


def _device(value: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise UsageError(f"--device {value}: unknown", "cpu, cuda or cuda:N")
    return value


def _activations(value: str) -> str:
    if value not in {"memory", "disk"}:
        raise UsageError(f"--activations {value}: unknown", nearest(value, ("memory", "disk")))
    return value


Model = Annotated[str, typer.Argument(help="Directory or org/name[@revision].", metavar="MODEL")]
Method = Annotated[
    str | None, typer.Option("--method", help="rtn, gptq, awq, or a sum such as awq+gptq.")
]
Bits = Annotated[int | None, typer.Option("--bits", help="The one dial: 2 to 8.", min=2, max=8)]
SchemeText = Annotated[
    str | None, typer.Option("--scheme", help="The expert's dial, e.g. int4:g128:sym or W4A16.")
]
FormatKey = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="Format of the result (default: what holds the scheme).",
    ),
]
MixtureType = Annotated[
    str | None, typer.Option("--type", help="GGUF: the mixture, e.g. Q4_K_M (default by --bits).")
]
PreTokenizer = Annotated[
    str | None,
    typer.Option("--pre", help="GGUF: llama.cpp's name of a pre-tokenizer that is not recognised."),
]
Engine = Annotated[
    str | None,
    typer.Option("--for", metavar="ENGINE", help="Make what this engine is fast with, or refuse."),
]
TensorParallel = Annotated[
    int | None,
    typer.Option("--tensor-parallel", help="Devices that --for's engine splits it over.", min=1),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="PATTERN", help="Leave matching layers alone (repeatable)."),
]
RuleText = Annotated[
    list[str] | None,
    typer.Option(
        "--rule",
        metavar="PATTERN=SCHEME",
        help="Scheme of matching layers (repeatable, first wins).",
    ),
]
RecipeFile = Annotated[
    str | None,
    typer.Option(
        "--recipe", metavar="FILE|NAME", help="A TOML recipe, or the name of a built-in one."
    ),
]
Scales = Annotated[
    str | None,
    typer.Option(
        "--scales",
        help="absmax, search (default), or reference: into GGUF, with the bytes of llama.cpp's own quantizer.",
    ),
]
Inputs = Annotated[
    str | None,
    typer.Option("--inputs", help="Range of static inputs: absmax (default), percentile or mse."),
]
KvCache = Annotated[
    str | None,
    typer.Option(
        "--kv-cache", help="Measure scales of an fp8 KV cache: fp8 (per tensor) or fp8_head."
    ),
]
Head = Annotated[
    str | None, typer.Option("--head", metavar="SCHEME", help="Quantize the output projection too.")
]
EmbeddingScheme = Annotated[
    str | None,
    typer.Option("--embedding", metavar="SCHEME", help="Quantize the token embedding too."),
]
Refine = Annotated[
    int | None, typer.Option("--refine", help="Sweeps after GPTQ (default 2).", min=0)
]
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="SOURCE",
        help="FILE, name:split:column, builtin, self, or a=3,b=1.",
    ),
]
Samples = Annotated[int | None, typer.Option("--samples", help="Calibration rows.", min=1)]
Length = Annotated[int | None, typer.Option("--length", help="Tokens of a row.", min=2)]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the choice of calibration rows.")]
ChatTemplate = Annotated[
    bool,
    typer.Option(
        "--chat-template", help="Render `messages` through the model's chat template (sandboxed)."
    ),
]
Shard = Annotated[
    int | None, typer.Option("--max-shard-bytes", help="Size limit of one weight file.", min=1)
]
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
