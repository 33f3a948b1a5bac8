"""Convert errors of the command-line parser into `UsageError` with a helpful hint.

Hints name the nearest verb or option. Two tables map verbs and options of other tools to ours; `docs/other-tools.md`
has whole commands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from quantforge.errors import UsageError

# The base class of click's errors; typer uses click or its own copy of it.
CLICK_ERROR: Any = typer.BadParameter.__bases__[0]
VERBS_OF_OTHER_TOOLS: Mapping[str, str] = {
    "list ls": "`quantforge formats` and `quantforge recipes` list what there is",
    "convert to-gguf save dequantize": "`quantforge export PATH --format gguf`; `formats` lists the others",
    "llama-quantize compress quant oneshot gptq awq auto-round imatrix": "`quantforge quantize MODEL --bits 4`",
    "evaluate ppl perplexity kl benchmark compare lm-eval llama-perplexity": "`quantforge eval REFERENCE MODEL`",
    "info show describe dump gguf-dump": "`quantforge inspect PATH`",
    "check validate": "`quantforge verify PATH`",
    "chat run complete llama-cli": "`quantforge generate PATH`",
    "server api llama-server": "`quantforge serve PATH`",
}
OPTIONS_OF_OTHER_TOOLS: Mapping[str, tuple[str, ...]] = {
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


def convert_parser_error(error: Any, arguments: list[str], group: Any) -> UsageError:
    """Convert an error of the parser into a `UsageError`.

    Args:
        error: an instance of `CLICK_ERROR`.
        arguments: the command line.
        group: the command group with all verbs.
    """
    verb = next((argument for argument in arguments if not argument.startswith("-")), "")
    option, param = getattr(error, "option_name", None), getattr(error, "param", None)
    if option and arguments[0].startswith("-"):
        hint = "options come after the verb: quantforge quantize MODEL --bits 4"
        return UsageError(
            f"no option {option} before the verb", _nearest_option(option, group, hint)
        )
    if verb not in group.commands:
        return UsageError(f"no verb '{verb}'", verb_hint(verb, group.commands))
    command, error_type = group.commands[verb], type(error).__name__
    hint_text = f"`quantforge help {verb}` lists what it takes"
    if error_type == "NoSuchOption":
        return UsageError(f"{verb} has no option {option}", _option_hint(str(option), verb, group))
    if error_type == "BadOptionUsage":
        flags = [parameter for parameter in command.params if getattr(parameter, "is_flag", False)]
        is_flag = any(option in {*parameter.opts, *parameter.secondary_opts} for parameter in flags)
        return UsageError(f"{option} {'takes no value' if is_flag else 'needs a value'}", hint_text)
    if param is None:
        message = error.format_message()
        if verb in {"quantize", "export"}:
            hint_text = "the result is an option: -o PATH; so is a type: --type Q4_K_M"
        elif verb == "generate":
            hint_text = (
                "put the whole prompt in quotes; a further model is an option: --compare MODEL"
            )
        return UsageError(f"{verb}: {message[:1].lower()}{message[1:]}", hint_text)
    is_argument = param.param_type_name == "argument"
    name = param.metavar or param.name.upper() if is_argument else max(param.opts, key=len)
    if error_type == "MissingParameter":
        example = str(command.epilog or "").partition("Example: ")[2]
        return UsageError(f"{verb}: {name} is missing", f"e.g. {example}" if example else hint_text)
    return UsageError(
        f"{name}{_typed_value(param, arguments)}: {_expected_value(param)}", hint_text
    )


def verb_hint(typed_verb: str, verbs: Collection[str]) -> str:
    """Return a hint for an unknown verb."""
    typed_verb = typed_verb.lower()
    for aliases, hint in VERBS_OF_OTHER_TOOLS.items():
        if typed_verb in aliases.split():
            return hint
    if close_matches := get_close_matches(typed_verb, verbs, n=1):
        return f"did you mean '{close_matches[0]}'?"
    if Path(typed_verb).exists():
        return f"a verb comes first: `quantforge inspect {typed_verb}`"
    return f"verbs: {', '.join(verbs)}"


def _option_hint(option: str, verb: str, group: Any) -> str:
    """Return a hint for an option that a verb does not have."""
    typed_name = option.lstrip("-").lower().replace("_", "-")
    known_flags = _flags(group.commands[verb])
    for aliases, our_flags in OPTIONS_OF_OTHER_TOOLS.items():
        if typed_name in aliases.split() and (
            matching := [flag for flag in our_flags if flag in known_flags]
        ):
            return f"here it is {matching[0]}"
    if verbs := [name for name, flag in group.commands.items() if option in _flags(flag)]:
        return f"it is an option of {', '.join(verbs)}"
    return _nearest_option(
        f"--{typed_name}", group.commands[verb], f"`quantforge help {verb}` lists them"
    )


def _nearest_option(option: str, command: Any, otherwise: str) -> str:
    close_matches = get_close_matches(option, [*_flags(command), "--help"], n=1, cutoff=0.7)
    return f"did you mean '{close_matches[0]}'?" if close_matches else otherwise


def _flags(command: Any) -> list[str]:
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    return [flag for parameter in options for flag in (*parameter.opts, *parameter.secondary_opts)]


def _typed_value(param: Any, arguments: list[str]) -> str:
    """Return the value that was typed for an option, after a space; "" if there is none."""
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in param.opts:
            return f" {value}" if equals else f" {' '.join(arguments[index + 1 : index + 2])}"
    return ""


def _expected_value(param: Any) -> str:
    """Return a text about the numbers that an option accepts; versions of typer differ in where these are."""
    descriptor = getattr(param, "type_descriptor", None)
    kind = getattr(descriptor, "annotation", None) or getattr(param.type, "name", "")
    bounds = param if descriptor is not None else param.type
    minimum, maximum = getattr(bounds, "min", None), getattr(bounds, "max", None)
    value_text = "a number" if "float" in str(kind) else "a whole number"
    if minimum is not None and maximum is not None:
        return f"{value_text} from {minimum} to {maximum} is expected"
    return (
        f"{value_text} is expected"
        if minimum is None
        else f"{value_text}, {minimum} at least, is expected"
    )
