"""Errors of the command line's parser in our own words, each with a hint at what to type instead.

Hints name the nearest verb or option. The two tables hold what other tools call ours: `docs/other-tools.md` has whole
commands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from quantforge.errors import UsageError

# typer carries its own copy of click, or uses it.
CLICK: Any = typer.BadParameter.__bases__[0]
VERBS: Mapping[str, str] = {
    "list ls": "`quantforge formats` and `quantforge recipes` list what there is",
    "convert to-gguf save dequantize": "`quantforge export PATH --format gguf`; `formats` lists the others",
    "llama-quantize compress quant oneshot gptq awq auto-round imatrix": "`quantforge quantize MODEL --bits 4`",
    "evaluate ppl perplexity kl benchmark compare lm-eval llama-perplexity": "`quantforge eval REFERENCE MODEL`",
    "info show describe dump gguf-dump": "`quantforge inspect PATH`",
    "check validate": "`quantforge verify PATH`",
    "chat run complete llama-cli": "`quantforge generate PATH`",
    "server api llama-server": "`quantforge serve PATH`",
}
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "wbits w-bit nbits q-bits num-bits load-in-4bit load-in-8bit": ("--bits",),
    "group-size groupsize q-group-size sym zero-point bnb-4bit-quant-type": ("--scheme",),
    "quantization outtype ftype qtype quant": ("--type", "--scheme"),
    "algorithm quant-method": ("--method",),
    "out outfile output-dir output-path save-dir mlx-path": ("--output",),
    "nsamples num-samples num-calibration-samples": ("--samples",),
    "seqlen max-seq-length sequence-length": ("--length",),
    "dataset data calib-data calibration-dataset": ("--calibration",),
    "backend runtime target": ("--for",),
    "exclude modules-to-not-convert ignore-layers": ("--ignore",),
    "tensor-type layer-config dynamic quant-predicate": ("--rule",),
    "token-embedding-type": ("--embedding",),
    "output-tensor-type": ("--lm-head",),
    "temp": ("--temperature",),
    "ctx-size n-ctx max-model-len context-length": ("--context", "--length"),
    "n-predict max-new-tokens": ("--max-tokens", "--new-tokens"),
    "gpu cuda device-map n-gpu-layers": ("--device",),
    "vram gpu-memory": ("--memory",),
    "num-threads nthreads": ("--threads",),
    "max-shard-size split-max-size": ("--max-shard-bytes",),
    "kv-cache-dtype cache-type-k": ("--kv-cache", "--cache"),
    "lora adapter-path": ("--adapter",),
    "num-beams beam-size": ("--beams",),
    "best-of num-return-sequences": ("-n",),
    "force yes": ("--overwrite",),
    "local-files-only": ("--offline",),
}


def in_our_words(error: Any, arguments: list[str], group: Any) -> UsageError:
    """Return an error of the parser as one of ours.

    Args:
        error: an instance of `CLICK`.
        arguments: what was typed.
        group: the command that has the verbs.
    """
    verb = next((word for word in arguments if not word.startswith("-")), "")
    option, param = getattr(error, "option_name", None), getattr(error, "param", None)
    if option and arguments[0].startswith("-"):
        hint = "options come after the verb: quantforge quantize MODEL --bits 4"
        return UsageError(f"no option {option} before the verb", _nearest(option, group, hint))
    if verb not in group.commands:
        return UsageError(f"no verb '{verb}'", for_verb(verb, group.commands))
    command, kind = group.commands[verb], type(error).__name__
    more = f"`quantforge help {verb}` lists what it takes"
    if kind == "NoSuchOption":
        return UsageError(f"{verb} has no option {option}", _for_option(str(option), verb, group))
    if kind == "BadOptionUsage":
        flags = [one for one in command.params if getattr(one, "is_flag", False)]
        is_flag = any(option in {*one.opts, *one.secondary_opts} for one in flags)
        return UsageError(f"{option} {'takes no value' if is_flag else 'needs a value'}", more)
    if param is None:
        message = error.format_message()
        if verb in {"quantize", "export"}:
            more = "the result is an option: -o PATH; so is a type: --type Q4_K_M"
        elif verb == "generate":
            more = "put the whole prompt in quotes; a further model is an option: --compare MODEL"
        return UsageError(f"{verb}: {message[:1].lower()}{message[1:]}", more)
    is_argument = param.param_type_name == "argument"
    name = param.metavar or param.name.upper() if is_argument else max(param.opts, key=len)
    if kind == "MissingParameter":
        example = str(command.epilog or "").partition("Example: ")[2]
        return UsageError(f"{verb}: {name} is missing", f"e.g. {example}" if example else more)
    return UsageError(f"{name}{_typed_for(param, arguments)}: {_wanted(param)}", more)


def for_verb(word: str, verbs: Collection[str]) -> str:
    """Return what to type instead of a verb that does not exist."""
    word = word.lower()
    for words, hint in VERBS.items():
        if word in words.split():
            return hint
    if close := get_close_matches(word, verbs, n=1):
        return f"did you mean '{close[0]}'?"
    if Path(word).exists():
        return f"a verb comes first: `quantforge inspect {word}`"
    return f"verbs: {', '.join(verbs)}"


def _for_option(option: str, verb: str, group: Any) -> str:
    """Return what to type instead of an option that the verb does not have."""
    word = option.lstrip("-").lower().replace("_", "-")
    known = _flags(group.commands[verb])
    for words, ours in OPTIONS.items():
        if word in words.split() and (same := [one for one in ours if one in known]):
            return f"here it is {same[0]}"
    if others := [name for name, one in group.commands.items() if option in _flags(one)]:
        return f"it is an option of {', '.join(others)}"
    return _nearest(f"--{word}", group.commands[verb], f"`quantforge help {verb}` lists them")


def _nearest(option: str, command: Any, otherwise: str) -> str:
    close = get_close_matches(option, [*_flags(command), "--help"], n=1, cutoff=0.7)
    return f"did you mean '{close[0]}'?" if close else otherwise


def _flags(command: Any) -> list[str]:
    options = [one for one in command.params if one.param_type_name == "option"]
    return [flag for one in options for flag in (*one.opts, *one.secondary_opts)]


def _typed_for(param: Any, arguments: list[str]) -> str:
    """Return the value that was typed for an option, after a blank."""
    for place, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in param.opts:
            return f" {value}" if equals else f" {' '.join(arguments[place + 1 : place + 2])}"
    return ""


def _wanted(param: Any) -> str:
    """Return which values an option takes; each version of typer has them elsewhere."""
    described = getattr(param, "type_descriptor", None)
    kind = getattr(described, "annotation", None) or getattr(param.type, "name", "")
    bounds = param if described is not None else param.type
    least, most = getattr(bounds, "min", None), getattr(bounds, "max", None)
    what = "a number" if "float" in str(kind) else "a whole number"
    if least is not None and most is not None:
        return f"{what} from {least} to {most} is expected"
    return f"{what} is expected" if least is None else f"{what}, {least} at least, is expected"
