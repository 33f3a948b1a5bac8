"""Hints at what to type instead: the nearest verb or option, or what other tools call it.

The tables hold words of auto-round, llm-compressor, GPTQModel and AutoGPTQ, llama.cpp's tools, mlx-lm, bitsandbytes and
Hugging Face's command line (2026-11), and what people type who have not read the help.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path

VERBS: Mapping[str, str] = {
    "list ls": "`quantforge formats` and `quantforge recipes` list what there is",
    "convert to-gguf save": "`quantforge export PATH --format gguf` converts; `formats` lists the others",
    "llama-quantize compress quant oneshot gptq awq auto-round autoround": "`quantforge quantize MODEL --bits 4`",
    "evaluate ppl perplexity kl bench benchmark compare test score lm-eval": "`quantforge eval REFERENCE MODEL`",
    "llama-perplexity lm-evaluation-harness": "`quantforge eval REFERENCE MODEL`",
    "info show describe dump gguf-dump": "`quantforge inspect PATH`",
    "check validate": "`quantforge verify PATH`",
    "chat run complete llama-cli llama-run": "`quantforge generate PATH`",
    "server api openai llama-server": "`quantforge serve PATH`; `plan MODEL --for ENGINE` prints what an engine needs",
    "imatrix llama-imatrix calibrate": "`quantforge quantize MODEL --imatrix FILE` makes the file where it is missing",
    "dequantize unquantize": "`quantforge export PATH --format plain`",
    "prune sparsify": "`quantforge quantize MODEL --method wanda --sparsity 50%`",
    "mixed optimize": "`quantforge allocate MODEL --target 3.5bpw -o mixed.toml`",
    "grid ablate": "`quantforge sweep MODEL --over bits=3,4`",
    "merge lora": "`quantforge quantize MODEL --adapter DIR`",
    "dry-run estimate": "`quantforge plan MODEL`",
    "pull download get": "`quantforge quantize org/name` reads a model of the hub",
    "push upload": "`hf upload ORG/NAME PATH`",
    "env system": "`quantforge doctor`",
    "version": "`quantforge --version`",
}
YES, NO = {"yes", "true", "on"}, {"no", "false", "off"}  # of flags
OPTIONS: Mapping[str, str] = {
    "wbits w-bit w-bits bit nbits num-bits q-bits qbits load-in-4bit load-in-8bit": "--bits N",
    "q-group-size group-size groupsize group g": "--scheme, e.g. int4:g128:sym",
    "sym asym zero-point q-mode": "--scheme, e.g. int4:g128:sym",
    "quant quantization outtype ftype qtype preset": "--type for GGUF, e.g. --type Q4_K_M; --scheme otherwise",
    "algorithm algo quant-method q-method": "--method",
    "output-format save-format to export-to": "--format",
    "m model model-path model-id model-name model-name-or-path hf-path pretrained": "MODEL itself, without an option",
    "out outfile output-dir output-path out-dir save-dir save-path mlx-path dest": "-o PATH",
    "nsamples n-samples num-samples num-calibration-samples max-samples": "--samples N",
    "seqlen seq-len max-seq-length max-seq-len sequence-length": "--length N",
    "dataset data data-path calib-data calibration-dataset calibration-data": "--calibration SOURCE",
    "target engine backend runtime": "--for ENGINE",
    "exclude skip modules-to-not-convert ignore-layers fp-layers": "--ignore PATTERN",
    "layer-config tensor-type dynamic overrides mixed": "--rule PATTERN=SCHEME",
    "lm-head quant-lm-head output-tensor-type": "--head SCHEME",
    "embeddings token-embedding-type quant-embedding": "--embedding SCHEME",
    "ctx-size max-model-len context-length": "--length N",
    "c ctx-size n-ctx max-model-len context-length num-ctx": "--context N",
    "c ctx-size n-ctx max-model-len context-length num-ctx context":
        "nothing: the context is as long as the model has positions",
    "p prompt": 'the prompt itself, without an option: `quantforge generate MODEL "..."`',
    "dtype torch-dtype": "nothing: what is not quantized keeps the type that the model has",
    "tp tensor-parallel-size tp-size": "--tensor-parallel N, with --for ENGINE",
    "gpu cuda device-map": "--device cuda",
    "t nthreads num-threads jobs n-threads": "--threads N",
    "force f y yes replace overwrite-output-dir": "--overwrite",
    "resume continue": "nothing: the same command again goes on",
    "dryrun simulate plan": "--dry-run, or `quantforge plan`",
    "damp damp-percent dampening-frac percdamp desc-act act-order batch-size bs":
        "a recipe file: `quantforge recipes balanced-4bit` prints one to start from",
    "iters lr minmax-lr": "nothing: no rounding is learned here; without --method what measured best is taken",
    "static-groups true-sequential": "a recipe file: `quantforge recipes balanced-4bit` prints one to start from",
    "double-quant bnb-4bit-use-double-quant bnb-4bit-quant-type": "--scheme, e.g. nf4:g64:sym:double",
    "vram gpu-memory vram-size device-memory": "--memory SIZE",
    "concurrency max-concurrency num-concurrent max-num-seqs": "--rows N",
    "max-shard-size split-max-size shard-size": "--max-shard-bytes N",
    "allow-requantize": "`quantforge export FILE --type Q4_K_M --requantize`",
    "leave-output-tensor": "--head keep",
    "cache-type-k cache-type-v kv-cache-dtype kv-bits kv-cache-scheme": "--kv-cache fp8",
    "ngl n-gpu-layers gpu-layers": "--device cuda",
    "low-gpu-mem-usage low-cpu-mem-usage offload offload-folder": "--activations disk",
    "local-files-only": "--offline",
    "dequantize de-quantize": "`quantforge export PATH --format plain`",
    "lora peft adapter-path": "--adapter DIR",
    "upload-repo push-to-hub": "nothing: `hf upload ORG/NAME PATH` afterwards",
    "trust-remote-code": "nothing: code of a model is never run",
    "silent no-progress": "-q",
    "v verbose": "nothing: notes are shown unless -q is given; --debug adds the traceback of an error",
    "task": "--tasks NAMES",
    "temp do-sample": "--temperature X, above 0 to draw",
    "repeat-penalty repetition": "--repetition-penalty X",
    "num-beams beam-width beam-size beam use-beam-search": "--beams N",
    "best-of num-return-sequences num-completions": "-n N",
    "top-logprobs n-probs": "--logprobs N, with --json",
    "max-new-tokens n-predict predict num-predict max-completion-tokens": "--max-tokens N",
    "max-tokens max-new-tokens n-predict predict num-predict output-len": "--new-tokens N..M",
    "input-len": "--prompt-tokens N..M",
    "reverse-prompt stop-strings stop-sequence stop-sequences until": "--stop TEXT",
    "ppl-text text-file f-text": "--text SOURCE",
}  # fmt: skip


def for_verb(word: str, known: Collection[str]) -> str:
    """Return what to type in place of a verb that there is not."""
    said = _elsewhere(word.lower(), VERBS)
    named = said.partition("`quantforge ")[2].replace("`", " ").split()
    if said and (not named or named[0].startswith("-") or named[0] in known):
        return said
    close = get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    if Path(word).exists():
        return f"a verb comes first: `quantforge inspect {word}`"
    return f"verbs: {', '.join(known)}"


def for_option(
    word: str,
    verb: str,
    known: Collection[str],
    elsewhere: Mapping[str, str],
    typed: Sequence[str] = (),
) -> str:
    """Return what to type in place of an option that the verb has not.

    Args:
        word: what was typed, with its dashes.
        verb: the verb.
        known: the options of the verb.
        elsewhere: which verbs have an option, by the option.
        typed: the whole line; the size of groups that was typed is said again in a scheme.
    """
    if (verb, word) == ("plan", "--dry-run"):
        return "leave it out: a plan is the dry run"
    if word in elsewhere:
        return f"it is an option of {elsewhere[word]}"
    bare = word.lstrip("-").lower().replace("_", "-")
    if valued := _as_value(bare, known):
        return f"here it is {valued}"
    close = get_close_matches(f"--{bare}", known, n=1, cutoff=0.82)
    said = [one for words, one in OPTIONS.items() if bare in words.split()]
    said = [one for one in said if not one.startswith("-") or re.split("[ ,]", one)[0] in known]
    if said and (not close or said[0].startswith("nothing: ")):
        size, bits = _value(word, typed), _value("--bits", typed) or "4"
        if "g128" in said[0] and size.isdecimal():
            return f"here it is {said[0].replace('int4:g128', f'int{bits}:g{size}')}"
        return f"here it is {said[0]}"
    close = close or get_close_matches(f"--{bare}", known, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"`quantforge help {verb}` lists what it takes"


def _as_value(word: str, known: Collection[str]) -> str:
    """Return the option that takes a word as its value, with it; "" where none of those that are known does."""
    from quantforge.formats import FORMATS
    from quantforge.formats.gguf.mixture import MIXTURES
    from quantforge.quantizers import METHODS

    width = re.fullmatch(r"(?:w|int)?([2-8])-?(?:bits?)?", word)
    values = {
        "--type": word.upper().replace("-", "_")
        if word.upper().replace("-", "_") in MIXTURES
        else "",
        "--method": word if word in METHODS else "",
        "--format": word if word in FORMATS else "",
        "--bits": width[1] if width else "",
    }
    return next(
        (f"{option} {value}" for option, value in values.items() if value and option in known), ""
    )


def for_value(option: str, value: str, known: Collection[str]) -> str:
    """Return what to type in place of a value that an option does not take, "" where nothing is known."""
    if option == "--bits" and "--target" in known and re.fullmatch(r"[2-8]\.\d+", value.strip()):
        return f"widths are mixed by --target {value.strip()}bpw, with --method gptq or none"
    return ""


def for_flag_of_all(word: str, flags: Collection[str], verbs: Collection[str]) -> str:
    """Return what to type in place of an option that stands before any verb."""
    close = get_close_matches(word.lower(), flags, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"verbs: {', '.join(verbs)}"


def _value(option: str, typed: Sequence[str]) -> str:
    """Return what was typed for an option, "" for nothing."""
    for word, following in pairwise((*typed, "")):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else following
    return ""


def typed_option(short: str, typed: Sequence[str]) -> str:
    """Return the option of several letters behind one dash that was read as ``short``; ``short`` where none was."""
    read = [one for one in typed if one.startswith(short) and _elsewhere(one[1:], OPTIONS)]
    return read[0] if read and len(short) == 2 else short


def for_flag(flag: str, value: str, pair: Sequence[str]) -> str:
    """Return what to type in place of a value behind a flag.

    Args:
        flag: what was typed.
        value: behind it.
        pair: the flag that says yes and the one that says no, where there are both.
    """
    if value.lower() in NO:
        return pair[1] if len(pair) == 2 else f"leave {flag} out"
    return pair[0] if len(pair) == 2 else f"{flag} alone"


def for_extra(words: Sequence[str], verb: str, model: str = "") -> str:
    """Return what to type in place of words that no argument takes: a file to make, a type, or the model itself.

    Args:
        words: that are left.
        verb: the verb.
        model: the word that was taken for the model.
    """
    from quantforge.formats.gguf.mixture import MIXTURES

    for word in words:
        if word.upper() in MIXTURES:
            return f"a type is an option: --type {word.upper()}"
    if verb in {"quantize", "export"}:
        if _is_model(words[0]) and not _is_model(model):
            return f"the model comes first: quantforge {verb} {shlex.quote(words[0])} -o {shlex.quote(model)}"
        return f"the result is an option: -o {words[0]}"
    if verb == "generate":
        return "put the whole prompt in quotes; a further model is an option: --compare MODEL"
    return f"`quantforge help {verb}` lists what it takes"


def _is_model(word: str) -> bool:
    try:
        return Path(word).is_dir() or (word.endswith(".gguf") and Path(word).is_file())
    except (OSError, ValueError):  # too long for a name, or a null
        return False


def _elsewhere(word: str, table: Mapping[str, str]) -> str:
    return next((said for words, said in table.items() if word in words.split()), "")
