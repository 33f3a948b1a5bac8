"""Run the same commands with two versions of this repository, and compare everything that they write.

    python scripts/same_results.py compare [--before COMMIT] [--quick] [--only TEXT] [--jobs N] [--saved FILE.json]
    python scripts/same_results.py list

For changes that must not change a byte. `compare` checks COMMIT out into a temporary directory, runs every command with
that version and then with the working tree, on the same machine with the same models, and exits 5 if an exit code, a
file or a JSON document differs. Of an error only the exit code has to be the same; another text is printed.

The commands are listed in `commands`: every method, format, GGUF type and verb with ``--json``, on the bundled models
and on tiny ones that are built first. They use the command line alone (``python -m quantforge``), so that nothing here
depends on where the code is. Each runs in a fork of a process that has imported what such commands import.

Differences on purpose are declared in two files. ``renamed_words.toml`` lists words that were renamed: events, options,
keys of recipes and documents. The commands here have the new words; the older version gets them with the old options,
and its documents are translated before they are compared. ``same_results.toml`` lists patterns of accepted differences,
each with its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
BEFORE = "5cc4a255238e31c50ee107ab6ac0a40fa4eb97f7"  # tagged before-structure
DECLARED = Path(__file__).with_suffix(".toml")
RENAMED = Path(__file__).with_name("renamed_words.toml")
# Files with the words of the source model, or of another tool.
SOURCE_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
PACKAGES = (".", "kernels", "calibration")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "SOURCE_DATE_EPOCH": "1750000000",
    "COLUMNS": "100",
}
# Keys of documents whose values depend on the time, the machine or the versions of libraries.
VOLATILE = {
    "versions", "date", "seconds", "peak_bytes", "free_bytes", "memory_bytes", "processor_share", "tokens_per_second",
    "prompt_tokens_per_second", "speculation",
}  # fmt: skip
# Verbs whose figures are measured: their documents are compared without numbers.
MEASURES = ("bench", "doctor", "serve")

# The directory of what a command writes
OUTPUT = re.compile(r"(?:-o|--report|^demo) ([0-9a-f]{8})/")
CALIBRATION = "--calibration builtin --samples 6 --length 128"
METHODS = ("rtn", "gptq", "awq", "awq+gptq", "smooth", "smooth+gptq", "rotate", "rotate+gptq")
FORMAT_SCHEMES = (
    ("compressed-tensors", "int4:g128:sym"), ("compressed-tensors", "int4:g128:asym"),
    ("compressed-tensors", "int8:row:sym"), ("compressed-tensors", "W8A8"), ("compressed-tensors", "FP8_DYNAMIC"),
    ("compressed-tensors", "fp8_e4m3:tensor:sym"), ("compressed-tensors", "FP8_BLOCK"),
    ("compressed-tensors", "NVFP4"), ("compressed-tensors", "MXFP4"), ("compressed-tensors", "mxfp8"),
    ("gptq", "int4:g128:sym"), ("gptq", "int4:g128:asym"), ("gptq", "int8:g128:sym"), ("gptq", "int3:g64:sym"),
    ("gptq_v2", "int4:g128:asym"), ("awq", "int4:g128:asym"), ("awq", "int4:g128:sym"), ("bnb", "nf4:g64:sym"),
    ("bnb", "nf4:g64:sym:double"), ("bnb", "fp4:g64:sym"), ("bnb", "LLM_INT8"), ("fp8", "FP8_BLOCK"),
    ("mlx", "int4:g64:min"), ("mlx", "int8:g64:min"), ("mlx", "int2:g32:min"), ("mlx", "mxfp4"), ("mlx", "mxfp8"),
)  # fmt: skip
SCHEMES = ("int2:g32:asym", "int3:g64:sym", "int5:g128:asym", "int6:g64:sym", "int7:row:sym", "W8A8_STATIC",
           "FP8_STATIC", "NVFP4_W4A4", "W4A8", "int3:g32:sym:search")  # fmt: skip
TYPES = ("Q4_K_M", "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M",
         "Q3_K_L", "Q4_K_S", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")  # fmt: skip
I_QUANTS = (
    "IQ2_XXS",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XS",
    "IQ2_S",
    "IQ2_M",
    "IQ3_XXS",
    "IQ3_XS",
    "IQ3_S",
    "IQ3_M",
)
FORMATS = ("plain", "compressed-tensors", "gptq", "gptq_v2", "awq", "bnb", "fp8", "mlx", "gguf")
OPTIONS = (
    "--bits 4",
    "--bits 3 --effort low",
    "--bits 4 --scales absmax",
    "--type Q4_K_M --scales reference",
    "--type Q4_0 --scales absmax --max-shard-bytes 2000000",
    "--type Q4_K_M --imatrix {out}/importance.gguf --modelfile",
    "--bits 4 --method gptq --refine 0",
    "--bits 4 --lm-head int8:g128:sym --embedding int8:g64:sym",
    "--bits 4 --rule *down_proj=int8:g64:sym --ignore *k_proj",
    "--scheme FP8_STATIC --kv-cache fp8 --activation-range percentile",
    "--scheme W8A8_STATIC --kv-cache fp8_head --activation-range mse",
    "--bits 4 --method gptq --activations disk --max-shard-bytes 1000000",
    "--bits 4 --method magnitude --sparsity 50% --format plain",
    "--bits 4 --method wanda --sparsity 2:4 --format plain",
    "--method sparsegpt --sparsity 50% --format plain",
    "--method sparsegpt+gptq --sparsity 50% --bits 4",
    "--bits 4 --for vllm --tensor-parallel 2",
    "--bits 4 --for llama.cpp",
    "--bits 4 --provenance",
    "--bits 4 --base-model org/name",
    "--bits 4 --adapter adapter",
    "--bits 4 --calibration self",
    "--bits 4 --calibration text.txt --seed 3",
    "--bits 4 --calibration builtin=2,text.txt=1",
    "--bits 4 --calibration none",
    "--bits 4 --method gptq --strict",
    "--recipe small-3bit",
    "--recipe mlx-4bit",
    "--bits 9",
    "--bits 4 --method nothing",
    "--scheme int4:g100:sym",
)
RELEASE = """model = "demo"
[calibration]
samples = 4
length = 64
[evaluation]
text = "builtin"
windows = 2
length = 64
speed = false
reports = ["md", "json"]
[gates]
max_kl = 0.5
[card]
repository = "org/name"
[[variant]]
name = "demo-Q4_K_M"
recipe = "llama.cpp-4bit"
[[variant]]
name = "demo-Q8_0"
type = "Q8_0"
[[variant]]
name = "demo-int4"
recipe = {method = "gptq", scheme = "int4:g128:sym"}
format = "compressed-tensors"
[[variant]]
name = "demo-gptq"
recipe = {method = "gptq", scheme = "int4:g128:sym"}
format = "gptq"
gates = {max_kl = 0.0001}
"""


# ---- the commands


def commands(*, quick: bool = False) -> list[str]:
    """Return every command line, or the first one of each kind with what it reads."""
    kinds = _kinds()
    if not quick:
        return [line for lines in kinds.values() for line in lines]
    return with_needs([lines[0] for lines in kinds.values()], commands())


def _kinds() -> dict[str, list[str]]:
    """Return the command lines by kind, what each kind shows in the first line."""
    kinds = {
        "written formats": [
            quantize("small", f"--format {form} --scheme {scheme} --method {method}")
            for method, schemes in (
                ("gptq", FORMAT_SCHEMES), ("rtn", FORMAT_SCHEMES), ("awq+gptq", FORMAT_SCHEMES[1::3])
            )
            for form, scheme in schemes
        ],
        "methods": [
            quantize("small", f"--scheme {scheme} --method {method}")
            for method in METHODS
            for scheme in ("int3:g64:sym", "W8A8")
        ],
        "schemes": [
            quantize("small", f"--scheme {scheme} --method {method}")
            for scheme in SCHEMES
            for method in ("rtn", "gptq", "awq")
        ],
        "GGUF types": [
            quantize("small", f"--type {kind} --method {method}")
            for method in ("rtn", "gptq")
            for kind in TYPES
        ] + [quantize("small", "--type Q4_K_M --method awq")],
        "I-quants": [quantize("one", f"--type {kind} --method rtn") for kind in I_QUANTS]
        + [quantize("one", "--type IQ2_XXS --method gptq"), quantize("one", "--type IQ3_S --scales reference"),
           quantize("moe", "--type IQ3_XXS --method rtn --ignore *layers.[12]*")],
        "options": [quantize("small", options) for options in OPTIONS],
        "much work": [
            quantize("one", options)
            for options in (
                "--bits 3 --method gptq --guided-hessians 2 --tune 1", "--bits 2 --effort high",
                "--bits 3 --method gptq --tune 1", "--scheme int3:g64:sym --method gptq --guided-hessians 1",
                "--type Q3_K_S --method gptq --tune 1",
                "--target 3.5bpw --candidates int2:g32:asym,int4:g128:sym,int8:g128:sym",
            )
        ],
        "whole model": [quantize("demo", "--bits 4"), quantize("demo", "--bits 4 --for llama.cpp")],
        "mixtures of experts": [
            quantize("moe", options)
            for options in (
                "--bits 4 --method gptq", "--bits 4 --method rtn", "--bits 3 --method awq+gptq",
                "--bits 4 --method gptq --expert-tokens all",
                "--type Q4_K_M --method rtn", "--type Q4_K_M --method gptq",
                "--scheme MXFP4 --method gptq", "--format mlx --bits 4 --method awq", "--prune-experts 25% --bits 4",
                "--format gptq --bits 4 --method gptq", "--scheme FP8_BLOCK --format fp8", "--bits 4 --for vllm",
                "--method wanda --sparsity 2:4 --format plain",
                "--target 3.5bpw",
            )
        ],
        "hybrids": [
            quantize("hybrid", options)
            for options in (
                "--bits 4 --method gptq", "--bits 4 --method rtn", "--bits 3 --method awq+gptq",
                "--type Q4_K_M --method gptq", "--format mlx --bits 4 --method awq", "--scheme W8A8 --method smooth",
            )
        ],
        "linear attention": [
            quantize("linear", options)
            for options in (
                "--scheme int4:g32:sym --method gptq", "--scheme int4:g32:sym --method awq", "--type Q8_0 --method rtn",
                "--type Q4_0 --method gptq", "--format mlx --scheme int4:g32:min --method rtn",
            )
        ],
        "towers": [
            quantize("vision", options)
            for options in ("--type Q8_0 --mmproj", "--scheme int4:g32:sym --method gptq", "--type Q4_0 --mmproj")
        ] + ["export vision --type Q8_0 --mmproj -o {}/out.gguf"],
    }  # fmt: skip
    made = _outputs(line for lines in kinds.values() for line in lines)
    by_format = [
        made_by(made, f"--format {form} --scheme {scheme} --method rtn")
        for form, scheme in FORMAT_SCHEMES
    ]
    types = [
        made_by(made, f"--type {kind} --method rtn")
        for kind in ("Q4_0", "Q8_0", "Q4_K_M", "F16", "Q4_1")
    ]
    gptq = [
        made_by(made, f"--format {form} --scheme {scheme} --method gptq")
        for form, scheme in FORMAT_SCHEMES[::4]
    ]
    experts = [
        made_by(made, line)
        for line in ("moe --bits 4 --method gptq", "moe --type Q4_K_M --method rtn")
    ]
    others = [
        made_by(made, line)
        for line in ("hybrid --bits 4 --method gptq", "linear --type Q8_0 --method rtn")
    ]
    first, q4 = gptq[0], types[2]
    again = f"export {first} --type Q4_0"
    kinds |= {
        "export": [
            f"export {path} --format {target} --allow-inexact -o {{}}/out{'.gguf' if target == 'gguf' else ''}"
            for path in (first, *by_format, *types, *gptq[1:], *experts, *others)
            for target in (FORMATS if path not in experts else ("gguf", "mlx"))
        ] + [f"{again} --requantize -o {{}}/out.gguf", f"{again} -o {{}}/out.gguf",
             f"{again} --source small --calibration {CALIBRATION.split()[1]} -o {{}}/out.gguf",
             f"export {first} --format gptq --strict -o {{}}/out", "export demo --for mlx -o {}/out",
             "export demo --type Q4_K_M -o {}/out.gguf", "export demo --bits 4 --format awq --dry-run --json"],
        "quantize again": [
            quantize(path, "--bits 3 --method gptq --requantize") for path in (by_format[4], by_format[6], types[1])
        ] + [quantize(by_format[11], "--bits 3 --method gptq")],
        "plan": [f"plan small --bits 4 --method {method} --json" for method in METHODS] + [
            f"plan {model} {options} --json"
            for model in ("demo", "moe", "hybrid", "linear", "vision")
            for options in ("--bits 3", "--type Q4_K_M", "--for vllm", "--target 4.5bpw --context 4k --batch 2")
        ] + ["plan demo --bits 4 --memory 24GB --bandwidth 1TB/s --compute 100TFLOPS --context 8k --price 2/h --json",
             f"plan {first} --device-name rtx-4090 --context 4k --json", "plan demo --recipe vllm-4bit-nvfp4 --json"],
        "inspect": [f"inspect {path} --json" for path in (first, *by_format, *types, *experts, *others)] + [
            "inspect demo --json", "inspect demo --derive --json", "inspect moe --derive --json",
            "inspect linear --json", f"inspect {q4} --tensors * --json", "inspect nothing --json"],
        "verify": [f"verify {path} --source small --json" for path in (first, *by_format, *types, *gptq[1:])] + [
            f"verify {experts[0]} --source moe --json", f"verify {experts[1]} --json", f"verify {first} --json",
            f"verify {others[0]} --source hybrid --for vllm --json", f"verify {first} --source demo --json",
            "verify demo --no-forward --json"],
        "diff": [f"diff {first} {by_format[0]} --json", f"diff {first} {first} --json", f"diff {q4} {types[0]} --json",
                 "diff demo small --json"],
        "reproduce": [f"reproduce {first} --source small --json", f"reproduce {q4} --source small --json"],
        "eval": [f"eval small {path} --no-speed --windows 2 --length 64 --json"
                 for path in (first, *by_format, *types)] + [
            f"eval moe {' '.join(experts)} --no-speed --windows 2 --length 64 --json",
            f"eval hybrid {others[0]} --no-speed --windows 2 --length 64 --json",
            f"eval small {first} --no-speed --windows 2 --length 64 --cache int8,int4 --json",
            f"eval small {first} --no-speed --windows 2 --length 64 --generated builtin --generated-tokens 8 --json",
            f"eval small {first} --no-speed --windows 2 --length 64 --max-kl 0.00001 --json",
            f"eval small {first} --no-speed --windows 2 --length 64 --report {{}}/out.md --report {{}}/out.json"],
        "generate": [f"generate {path} hello --max-tokens 12 --json" for path in (first, q4, *experts, *others)] + [
            "generate demo hello --max-tokens 12 --temperature 0.8 --top-p 0.9 --seed 3 -n 2 --logprobs 2 --json",
            "generate demo hello --max-tokens 12 --beams 2 --json",
            # Two tokens are as likely at the ninth place: how many are computed at once decides between them.
            *(f"generate demo hello --max-tokens 8 --draft {draft} --json"
              for draft in ("ngram", "lookahead", "int4")),
            f"generate demo hello --max-tokens 12 --cache int8 --compare {first} --json"],
        "bench": [f"bench {first} --requests 2 --prompt-tokens 8..16 --new-tokens 4..8 --json"],
        "release": ["release release.toml -o {}/out --json", "release release.toml -o {}/out --dry-run --json",
                    "release release.toml -o {}/out --only demo-Q8_0 --provenance --json"],
        "sweep": ["sweep small --over bits=3,4 --over method=rtn,gptq --samples 4 --length 64 --windows 2"
                  " --window-length 64 --report {}/out.md --report {}/out.json -o {}/out --json",
                  "sweep small --over type=Q4_0,Q8_0 --method rtn --calibration none --windows 2 --window-length 64"
                  " -o {}/out --json"],
        "allocate": ["allocate small --target 3.5bpw --samples 4 --length 64 -o {}/out.toml --json",
                     "allocate moe --target 3.5bpw --samples 4 --length 64 -o {}/out.toml --json",
                     "allocate small --target 4.5bpw --format gguf --samples 4 --length 64 -o {}/out.toml --json"],
        "formats": ["formats --json"],
        "recipes": ["recipes --json", "recipes vllm-4bit", "recipes nothing --json"],
        "demo": ["demo {}/out --json"],
        "doctor": ["doctor --json"],
        "serve": [f"serve {first} --port 0 --json"],
    }  # fmt: skip
    return {kind: [_placed(line) for line in lines] for kind, lines in kinds.items()}


def quantize(model: str, options: str) -> str:
    """Return a command that quantizes a model into a directory, or a GGUF file where the options say so."""
    gguf = any(word in options for word in ("--type", "llama.cpp", "gguf"))
    calibration = CALIBRATION
    if "--calibration" in options:
        calibration = calibration.partition("builtin ")[2]
    if "--calibration none" in options:
        calibration = ""
    line = f"quantize {model} {options.replace('{out}', '{}')} {calibration} -o {{}}/out{'.gguf' if gguf else ''}"
    return _placed(" ".join(line.split()))


def _placed(line: str) -> str:
    """Fill in the directory of a command's outputs, whose name is a digest of the command with its old options."""
    return line.replace("{}", hashlib.sha256(old_command(line).encode()).hexdigest()[:8])


def _outputs(lines: Iterator[str] | Sequence[str]) -> dict[str, str]:
    """Return the commands by their output."""
    words = ((line, line.split()) for line in lines)
    return {words[words.index("-o") + 1]: line for line, words in words if "-o" in words}


def made_by(made: Mapping[str, str], text: str) -> str:
    """Return the first output whose command contains the text."""
    return next(path for path, line in made.items() if f"{text} " in line)


def with_needs(lines: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return the lines and those that make what they read, the latter first."""
    made, found = _outputs(every), dict[str, None]()
    for line in lines:
        for word in line.split(" -o ")[0].split():
            if word in made and made[word] != line:
                found |= dict.fromkeys(with_needs([made[word]], every))
        found[line] = None
    return list(found)


# ---- words that were renamed


@cache
def renamed_words() -> Mapping[str, Any]:
    """Return the tables of renamed words."""
    return tomllib.loads(RENAMED.read_text())


def old_command(line: str) -> str:
    """Return a command line with the options of the older version."""
    old = {new: old for old, new in renamed_words()["options"].items()}
    return " ".join(old.get(word, word) for word in line.split(" "))


def new_words(document: Any, line: str, file: str) -> Any:
    """Translate a document that the older version wrote.

    Args:
        document: the parsed document.
        line: the command that wrote it.
        file: its path below the command's directory, or ``stdout``.
    """
    if PurePosixPath(file).name in SOURCE_FILES:
        return document
    words = renamed_words()
    keys = {f"recipe.{old}": new for old, new in words["recipe"].items()}
    if file.endswith(".toml"):
        keys |= words["recipe"]
    for table in words.get("documents", ()):
        if fnmatchcase(line, table["command"]) and fnmatchcase(file, table["file"]):
            keys |= table["keys"]
    return _translated(document, keys, words, "")


def _translated(value: Any, keys: Mapping[str, str], words: Mapping[str, Any], path: str) -> Any:
    if isinstance(value, dict):
        for end, names in {
            "event_counts": "events",
            "skipped": "checks",
            "partial": "checks",
        }.items():
            if path.endswith(f".{end}"):
                return {words[names].get(key, key): item for key, item in value.items()}
        return {
            _new_key(f"{path}.{key}", key, keys): _translated(item, keys, words, f"{path}.{key}")
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_translated(item, keys, words, path) for item in value]
    if not isinstance(value, str):
        return value
    if path.endswith(".kind"):
        return words["events"].get(value, value)
    if path.endswith((".check", ".checked")):
        return words["checks"].get(value, value)
    return words["values"].get(value) or _renamed_in_text(value)


def _renamed_in_text(text: str) -> str:
    """Translate the options and the keys of recipes (``KEY = VALUE``) in a sentence."""
    options, keys = renamed_words()["options"], renamed_words()["recipe"]
    text = re.sub(r"(?<!\S)--[a-z-]+", lambda found: options.get(found[0], found[0]), text)
    return re.sub(r"[\w.]+(?= = )", lambda found: keys.get(found[0], found[0]), text)


def _new_key(path: str, key: str, keys: Mapping[str, str]) -> str:
    """Return the new last part of a dotted path, by the longest end of the path that was renamed."""
    parts = path.split(".")[1:]
    ends = (".".join(parts[first:]) for first in range(len(parts)))
    return next((keys[end].rpartition(".")[2] for end in ends if end in keys), key)


# ---- running them, in a process that imports one version


@dataclass
class Result:
    """The exit code of a command, its error message, digests of files, JSON documents whole, its processor time."""

    code: int = 0
    error: str = ""
    files: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def run_all(tree: Path, lines: Sequence[str], jobs: int) -> dict[str, Result]:
    """Run command lines with the version in ``tree``, in the current directory."""
    _import_beforehand(tree)
    made, results = _outputs(lines), dict[str, Result]()
    waiting = list(lines)
    with ThreadPoolExecutor(jobs) as pool:
        while waiting:
            left = {path for path, line in made.items() if line in waiting}
            ready = [line for line in waiting if not left & set(line.split(" -o ")[0].split())]
            results |= dict(zip(ready, pool.map(run, ready), strict=True))
            waiting = [line for line in waiting if line not in ready]
    return {line: results[line] for line in lines}


def _import_beforehand(tree: Path) -> None:
    """Import the modules that a command imports, as a child has found out: a fork then has them.

    Raises:
        SystemExit: a module of the product comes from somewhere else.
    """
    path = Path("modules")
    _fork(f"quantize small --bits 4 --method awq+gptq {CALIBRATION} -o modules-out", modules=path)
    for name in path.read_text().split():
        with contextlib.suppress(Exception):
            __import__(name)
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", "") or tree)
        if name.startswith("quantforge") and not Path(file).is_relative_to(tree):
            raise SystemExit(f"{name} is imported from {file}, not from {tree}")
    import torch

    torch.set_num_threads(1)


def run(line: str) -> Result:
    """Run one command and collect what it wrote."""
    match = OUTPUT.search(line)
    folder = Path(match[1]) if match else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    code, seconds, output, errors = _fork(line)
    result = Result(code, seconds=round(seconds, 2))
    if "SAME_RESULTS_VERBOSE" in os.environ:
        print(f"{seconds:6.1f} s  {line}", file=sys.stderr, flush=True)
    if code:
        shown = [text for text in errors.splitlines() if text.startswith(("error", "hint", "bug"))]
        result.error = " ".join(shown)[:300]
    if output.strip():
        result.files["stdout"] = _document(output, line.partition(" ")[0])
    if folder:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        result.files |= {str(path.relative_to(folder)): _content(path) for path in paths}
        if not line.startswith("quantize "):
            shutil.rmtree(folder)
    return result


def _fork(line: str, *, modules: Path | None = None) -> tuple[int, float, str, str]:
    """Run a command in a fork; return exit code, processor time, stdout, stderr; write the names of its modules."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            _command(line.split(), modules)
        if line.startswith("serve "):  # it runs until it is interrupted
            deadline = time.monotonic() + 60
            while os.fstat(output.fileno()).st_size == 0 and time.monotonic() < deadline:
                time.sleep(0.1)
            os.kill(child, signal.SIGINT)
        _, status, used = os.wait4(child, 0)
        code, seconds = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return code, seconds, texts[0], texts[1]


def _command(words: Sequence[str], modules: Path | None) -> None:
    """Be the command line; never returns."""
    code = 70
    try:
        sys.argv = ["quantforge", *words]
        if words[0] in {
            "quantize",
            "export",
            "allocate",
            "sweep",
            "release",
            "verify",
            "eval",
            "reproduce",
        }:
            sys.argv += ["--threads", "1"]
        try:
            runpy.run_module("quantforge", run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
        if modules:
            modules.write_text("\n".join(name for name in sys.modules if name != "__main__"))
    finally:
        os._exit(code)


def _content(path: Path) -> Any:
    """Return a document of JSON or TOML, digests of what a GGUF file holds, or the digest of another file."""
    if path.suffix == ".json":
        with contextlib.suppress(ValueError):
            return _document(path.read_text(), "")
    if path.suffix == ".toml":
        return tomllib.loads(path.read_text())
    if path.suffix == ".gguf":
        with contextlib.suppress(ValueError):  # an importance file of another kind
            return _gguf(path)
    return _digest(path.read_bytes())


def _gguf(path: Path) -> dict[str, dict[str, str]]:
    """Return digests of the keys and tensors of a GGUF file, by name."""
    from gguf import GGUFReader

    file = GGUFReader(path)
    keys = {
        name: _digest(b"".join(part.tobytes() for part in field.parts))
        for name, field in file.fields.items()
    }
    tensors = {
        one.name: f"{one.tensor_type.name} {one.shape.tolist()} {_digest(one.data.tobytes())}"
        for one in file.tensors
    }
    return {"keys": keys, "tensors": tensors}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def _document(text: str, verb: str) -> Any:
    """Return what of an output is compared: a document of JSON without volatile values, or the text's digest."""
    try:
        return _stable(json.loads(text), measured=verb in MEASURES)
    except ValueError:
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def _stable(value: Any, *, measured: bool) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in VOLATILE}
        if isinstance(kept.get("recipe"), str):
            with contextlib.suppress(ValueError):
                kept["recipe"] = tomllib.loads(kept["recipe"])
        return {key: _stable(item, measured=measured) for key, item in kept.items()}
    if isinstance(value, list):
        return [_stable(item, measured=measured) for item in value]
    if measured and not isinstance(value, bool | None):
        return re.sub(r"[\d.]+(e-?\d+)?", "0", str(value))
    return value


# ---- comparing two versions


def compare(options: argparse.Namespace) -> int:
    """Run both versions, print what differs and return the exit code."""
    chosen = [
        line
        for line in commands(quick=options.quick)
        if not options.only or any(text in line for text in options.only)
    ]
    lines = with_needs(chosen, commands())
    older = {line: old_command(line) for line in lines}
    results: list[dict[str, Result]] = []
    with tempfile.TemporaryDirectory(prefix="same-results-") as name:
        place = Path(name)
        make_models(place / "models")
        with checkout(options.before, place / "before") as before:
            for tree in (before, ROOT):
                if tree == ROOT:
                    results.append(_in_process(tree, lines, options.jobs, place))
                    continue
                if options.saved and options.saved.exists():
                    saved = json.loads(options.saved.read_text())
                    found = {
                        line: Result(**saved[line]) for line in older.values() if line in saved
                    }
                else:
                    found = _in_process(tree, list(older.values()), options.jobs, place)
                    if options.saved:
                        text = json.dumps({line: asdict(one) for line, one in found.items()})
                        options.saved.write_text(text)
                results.append({line: found[old] for line, old in older.items() if old in found})
    return report(results[0], results[1], tomllib.loads(DECLARED.read_text()))


def _in_process(tree: Path, lines: Sequence[str], jobs: int, place: Path) -> dict[str, Result]:
    """Run command lines with one version, in a process of its own, in a new directory of the same name."""
    work = place / "work"
    work.mkdir()
    for path in (place / "models").iterdir():
        (work / path.name).symlink_to(path)
    (place / "lines").write_text("\n".join(lines))
    paths = os.pathsep.join(str(tree / name) for name in PACKAGES)
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": paths,
        "XDG_CACHE_HOME": str(place / "cache"),
    }
    words = [__file__, "run", "--tree", str(tree), "--place", str(place), "--jobs", str(jobs)]
    subprocess.run([sys.executable, *words], cwd=work, env=environment, check=True)
    for folder in (work, place / "cache"):
        shutil.rmtree(folder, ignore_errors=True)
    return {
        line: Result(**one) for line, one in json.loads((place / "results").read_text()).items()
    }


@contextlib.contextmanager
def checkout(commit: str, place: Path) -> Iterator[Path]:
    """Check a commit out into a directory that is removed in the end."""
    git = ["git", "-C", str(ROOT)]
    subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(place), commit], check=True)
    try:
        yield place
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(place)], check=True)


def make_models(place: Path) -> None:
    """Make the models and other inputs that the commands name."""
    sys.path[:0] = [str(ROOT / name) for name in PACKAGES]
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    from scripts import tiny_families
    from tests import vision_models
    from tests.conftest import tiny_tokenizer

    transformers.utils.logging.disable_progress_bar()
    place.mkdir()
    for name, folder in (("demo", "demo"), ("moe", "demo-moe"), ("hybrid", "demo-hybrid")):
        shutil.copytree(ROOT / "models" / folder, place / name)
    for name, layers in (("small", 2), ("one", 1)):
        shutil.copytree(ROOT / "models" / "demo", place / name)
        tensors = load_file(place / name / "model.safetensors")
        config = json.loads((place / name / "config.json").read_text())
        (place / name / "config.json").write_text(
            json.dumps(config | {"num_hidden_layers": layers})
        )
        removed = tuple(
            f"model.layers.{number}." for number in range(layers, config["num_hidden_layers"])
        )
        kept = {key: value for key, value in tensors.items() if not key.startswith(removed)}
        save_file(kept, place / name / "model.safetensors", {"format": "pt"})
    tiny_families.write("qwen3_next", place / "linear", tiny_tokenizer())
    vision_models.make("gemma3", place / "vision", torch.bfloat16)
    (place / "adapter").mkdir()
    generator = torch.Generator().manual_seed(0)
    module, shapes = "base_model.model.model.layers.1.mlp.up_proj", {"A": (4, 256), "B": (768, 4)}
    factors = {f"{module}.lora_{key}.weight": 0.02 * torch.randn(shape, generator=generator)
               for key, shape in shapes.items()}  # fmt: skip
    save_file(factors, place / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    adapter = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["up_proj"],
        "bias": "none",
    }
    (place / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    (place / "text.txt").write_text((ROOT / "LICENSE").read_text())
    (place / "release.toml").write_text(RELEASE)


def report(
    before: Mapping[str, Result], after: Mapping[str, Result], declared: Mapping[str, Any]
) -> int:
    """Print what differs; return 5 if anything does that is not accepted."""
    different, accepted = 0, dict[str, int]()
    for line in dict.fromkeys([*before, *after]):
        if line not in before or line not in after:
            print(f"{line}\n  {'not in the older version' if line in after else 'not run'}")
            different += 1
            continue
        found = list(differences(before[line], after[line], line))
        left = []
        for place, text in found:
            reason = _reason(line, place, declared.get("accepted", ()))
            if reason:
                accepted[reason] = accepted.get(reason, 0) + 1
            else:
                left.append(f"{place}: {text}")
        if left:
            different += 1
            print("\n  ".join([line, *left[:12], *(["..."] if len(left) > 12 else [])]))
        elif before[line].error != after[line].error:
            print(f"{line}\n  another error text: {before[line].error}\n  now: {after[line].error}")
    print(f"{len(after)} commands, {sum(len(one.files) for one in after.values())} files and documents: "
          f"{different} commands differ")  # fmt: skip
    for reason, count in sorted(accepted.items()):
        print(f"accepted, {count} places: {reason}")
    seconds = [sum(one.seconds for one in results.values()) for results in (before, after)]
    print(f"{seconds[0]:.0f} s before, {seconds[1]:.0f} s now")
    return 5 if different else 0


def differences(before: Result, after: Result, line: str) -> Iterator[tuple[str, str]]:
    """Yield every place at which two results of a command differ, as ``FILE:key.key`` and a text."""
    if before.code != after.code:
        yield "exit code", f"{before.code}, now {after.code} {after.error}"
    for name in sorted({*before.files, *after.files}):
        if name not in before.files or name not in after.files:
            yield name, "is new" if name in after.files else "is missing"
            continue
        for place, text in _places(new_words(before.files[name], line, name), after.files[name]):
            yield f"{name}:{place}" if place else name, text


def _places(old: Any, new: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            below = f"{place}.{key}".lstrip(".")
            if key not in old or key not in new:
                yield below, "is new" if key in new else "is missing"
            else:
                yield from _places(old[key], new[key], below)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (first, second) in enumerate(zip(old, new, strict=True)):
            yield from _places(first, second, f"{place}.{number}".lstrip("."))
    elif old != new or type(old) is not type(new):
        yield place, f"{json.dumps(old)[:100]}, now {json.dumps(new)[:100]}"


def _reason(line: str, place: str, accepted: Sequence[Mapping[str, str]]) -> str:
    """Return why a difference is accepted, or an empty text."""
    for entry in accepted:
        if fnmatchcase(line, entry.get("command", "*")) and fnmatchcase(place, entry["place"]):
            return entry["reason"]
    return ""


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("verb", choices=("compare", "list", "run"), help="run: used by compare")
    parser.add_argument("--before", default=BEFORE, help=f"a commit (default: {BEFORE})")
    parser.add_argument("--quick", action="store_true", help="one command of each kind")
    parser.add_argument(
        "--only",
        action="append",
        help="commands that contain this, with what they read (repeatable)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes, each on one thread")
    parser.add_argument(
        "--saved", type=Path, help="keep results of the older version here, and use them again"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print the processor time of each command"
    )
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.verbose:
        os.environ["SAME_RESULTS_VERBOSE"] = "1"
    if options.verb == "list":
        print("\n".join(commands(quick=options.quick)))
        return 0
    if options.verb == "run":
        lines = (options.place / "lines").read_text().splitlines()
        results = run_all(options.tree, lines, options.jobs)
        text = json.dumps({line: asdict(one) for line, one in results.items()})
        (options.place / "results").write_text(text)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the checkout is removed in the end
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
