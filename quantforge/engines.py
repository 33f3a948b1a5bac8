"""Engines that results are made for (``--for``): default format, command that serves a result, code for its card.

`TARGETS` is the one table; each format declares the packages that an engine needs for it
(`FormatInfo.engine_packages`).
The options of the commands are those of vLLM 0.33, SGLang 0.5.23, LMDeploy 0.18 and mlx-lm 0.32 (read in their
packages), and of TensorRT-LLM 1.3, llama.cpp b10749 and Ollama 0.14 (read in their documentation and sources), in
2026-11. ``tests/golden/engine_options.toml`` lists them as they are documented.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantforge.cache_kinds import PLAIN, format_cache_kind, parse_cache_kind
from quantforge.errors import RefusedError, UnknownNameError, UsageError, join_with_or, nearest_hint
from quantforge.formats import DEFAULT_FORMAT, GGUF, FormatInfo, load_format
from quantforge.formats.engine_rules import NOT_RUN
from quantforge.grids import PerGroup, Tile
from quantforge.plans import EngineVerdict, Note, NoteKind, Serving, TensorPlan, kind_of


@dataclass(frozen=True, slots=True)
class Target:
    """One engine.

    Attributes:
        default_options: default options of a recipe by number of bits: ``format``, and ``scheme`` or ``type``.
        verdict_engine: name of the engine whose verdict on a format applies (Ollama runs llama.cpp).
        command: shell command that serves a result. ``{model}`` is the path of the result, ``{from_line}`` the line of
            an Ollama Modelfile that names it, ``{name}`` a name for it, ``{options}`` options, each after a space.
        context: option that sets the maximum number of tokens of a sequence; "" if there is none, as below.
        caches: options that set the type of the KV cache, by type.
        devices: option that sets the number of devices for tensor parallelism.
        named: option that sets the name of the model in requests.
        tokenizer: option that names the original model, whose tokenizer a GGUF file is served with.
        note: what a user should know.
        port: default port of its OpenAI-compatible server; 0 if it has none.
        packages: Python packages to install; "" if it is installed another way.
    """

    default_options: Mapping[int, Mapping[str, str]]
    verdict_engine: str
    command: str
    context: str = ""
    caches: Mapping[str, str] = field(default_factory=dict)
    devices: str = ""
    named: str = ""
    tokenizer: str = ""
    note: str = ""
    port: int = 0
    packages: str = ""


def _packed(scheme: str) -> dict[str, str]:
    return {"format": DEFAULT_FORMAT, "scheme": scheme}


_TYPES = {2: "Q2_K", 3: "Q3_K_M", 4: "Q4_K_M", 5: "Q5_K_M", 6: "Q6_K", 8: "Q8_0"}
_GGUF = {bits: {"format": GGUF, "type": name} for bits, name in _TYPES.items()}
_SERVED = {4: _packed("int4:g128:sym"), 8: _packed("FP8_DYNAMIC")}
TARGETS: Mapping[str, Target] = {
    "vllm": Target(
        _SERVED, "vllm", "vllm serve {model}{options}",
        context="--max-model-len {}",
        caches={
            "fp8": "--kv-cache-dtype fp8", "int8": "--kv-cache-dtype int8_per_token_head",
            "int4": "--kv-cache-dtype int4_per_token_head",
        },
        devices="--tensor-parallel-size {}",
        named="--served-model-name {}",
        tokenizer="--tokenizer {}",
        port=8000, packages="vllm",
    ),
    "sglang": Target(
        _SERVED, "sglang", "python -m sglang.launch_server --model-path {model}{options}",
        context="--context-length {}",
        caches={"fp8": "--kv-cache-dtype fp8_e4m3"},
        devices="--tp-size {}",
        named="--served-model-name {}",
        note=NOT_RUN, port=30000, packages="'sglang[all]'",
    ),
    "tensorrt-llm": Target(
        {4: _packed("NVFP4_W4A4"), 8: _packed("FP8_DYNAMIC")}, "tensorrt-llm", "trtllm-serve {model}{options}",
        context="--max_seq_len {}",
        devices="--tp_size {}",
        note=f"nvfp4 needs a Blackwell GPU; {NOT_RUN}", port=8000, packages="tensorrt-llm",
    ),
    "lmdeploy": Target(
        {4: {"format": "awq", "scheme": "int4:g128:asym"}}, "lmdeploy", "lmdeploy serve api_server {model}{options}",
        context="--session-len {}",
        caches={"int8": "--quant-policy int8", "int4": "--quant-policy int4"},
        devices="--tp {}",
        named="--model-name {}",
        note=NOT_RUN, port=23333, packages="lmdeploy",
    ),
    "transformers": Target(
        {4: _packed("int4:g128:sym"), 8: _packed("int8:g128:sym")}, "transformers", "transformers serve {model}",
        packages="transformers accelerate",
    ),
    "llama.cpp": Target(
        _GGUF, "llama.cpp", "llama-server -m {model}{options}",
        context="--ctx-size {}",
        caches={
            name: f"--flash-attn on --cache-type-k {kind} --cache-type-v {kind}"
            for name, kind in (("int8", "q8_0"), ("int4", "q4_0"))
        },
        named="--alias {}",
        port=8080,
    ),
    "ollama": Target(
        _GGUF, "llama.cpp",
        "printf '%s\\n' {from_line}{options} > Modelfile && ollama create {name} -f Modelfile && ollama run {name}",
        context="'PARAMETER num_ctx {}'",
    ),
    "mlx": Target(
        {bits: {"format": "mlx", "scheme": f"int{bits}:g64:min"} for bits in (2, 3, 4, 5, 6, 8)}, "mlx",
        "mlx_lm.server --model {model}{options}",
        caches={"int8": "--kv-bits 8", "int4": "--kv-bits 4"},
        packages="mlx-lm",
    ),
}  # fmt: skip
# Words of other tools, as `nearest_hint` looks them up.
ENGINE_WORDS: Mapping[str, str] = {
    "hf huggingface pytorch torch accelerate optimum": "--for transformers",
    "trt trtllm tensorrt nim triton tritoninferenceserver": "--for tensorrt-llm",
    "mlxlm apple": "--for mlx",
    "lmstudio koboldcpp kobold gpt4all jan oobabooga ggml gguf llamafile llamaserver": "--for llama.cpp",
    "tgi textgenerationinference hftgi": "it is archived, and reads --format gptq",
    "aphrodite vllmomni": "--for vllm",
    "turbomind": "--for lmdeploy",
    "exllama exllamav2 exllamav3 tabbyapi onnxruntime openvino":
        "it is not known here; `quantforge formats` lists what each format is loaded by",
}  # fmt: skip
_PLACE = "OUT"  # stands for the path of the result in the note with the command that serves it
_UNBOUNDED = "its cache grows with the sequence, no option bounds it"
# Linears that engines split along their inputs; they split all others along their outputs.
_ROW_PARALLEL = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2")


def target_of(engine: str) -> Target:
    """Return the entry of an engine, ignoring case; raise `UsageError` with the nearest name if there is none."""
    if engine.lower() not in TARGETS:
        raise UnknownNameError(
            f"--for {engine}: unknown engine", nearest_hint(engine.lower(), TARGETS, ENGINE_WORDS)
        )
    return TARGETS[engine.lower()]


def with_engine_defaults(engine: str, given_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, completed with the engine's default format and scheme if they name no format, scheme or type.

    Raises:
        UsageError: no such engine, or no default for this number of bits.
    """
    target, options = target_of(engine), dict(given_options)
    if options.get("format") or options.get("scheme") or options.get("type"):
        return options
    bits = options.pop("bits", None) or 4
    if bits not in target.default_options:
        nearest_bits = min(
            target.default_options, key=lambda supported: (abs(supported - bits), supported)
        )
        raise UsageError(
            f"--for {engine} --bits {bits}: it is fast with {join_with_or(target.default_options)} bits",
            f"--bits {nearest_bits}",
        )
    return options | dict(target.default_options[bits])


def check_engine(
    engine: str | None,
    serving: Serving,
    tensors: Iterable[TensorPlan],
    verdicts: Iterable[EngineVerdict],
    key: str,
    source: str = "",
) -> tuple[Note, ...]:
    """Refuse a plan whose result the engine does not load; return notes for the plan otherwise.

    Args:
        engine: its name; None returns no notes.
        serving: settings of the command that serves the result.
        tensors: tensors of the plan.
        verdicts: verdicts of engines on the result.
        key: the format.
        source: the original model.

    Raises:
        RefusedError: the engine does not load the result, a layer cannot be split over the devices, or the engine has
            no such cache.
    """
    if engine is None:
        return ()
    target = target_of(engine)
    option_text = f"--bits {join_with_or(target.default_options)}"
    for verdict in verdicts:
        if verdict.engine == target.verdict_engine and verdict.loads is False:
            raise RefusedError(
                f"{engine} does not load this in {key}: {verdict.reason}",
                f"drop --format and --scheme and take {option_text}, which --for {engine} knows how to make",
            )
    if serving.devices > 1 and not target.devices:
        raise RefusedError(f"{engine} does not split a model by tensors", "drop --tensor-parallel")
    for tensor in tensors:
        if tensor.scheme is not None and serving.devices > 1:
            _check_split(tensor, serving.devices)
    if _cache_of(serving) not in {PLAIN, *target.caches}:
        raise RefusedError(
            f"--for {engine}: no cache in {_cache_of(serving)}",
            f"--cache {join_with_or(target.caches)}" if target.caches else "leave --cache out",
        )
    unbounded = serving.context is not None and not target.context
    needed = load_format(key).INFO.engine_packages.get(engine, "")
    facts = (
        target.note,
        f"{key} files need pip install {needed}" if needed else "",
        f"--context changes nothing: {_UNBOUNDED}" if unbounded else "",
    )
    command = command_of(engine, _PLACE, serving, tokenizer=source if key == GGUF else "")
    return (
        *(Note(f"{engine}: {fact}", NoteKind.ENGINE) for fact in facts if fact),
        Note(f"serve it with: {command}", NoteKind.SERVE),
    )


def _cache_of(serving: Serving) -> str:
    """Return the name of the requested type of cache."""
    return format_cache_kind(*parse_cache_kind(serving.cache or PLAIN))


def command_of(
    engine: str, model: object, serving: Serving, *, name: str = "", tokenizer: str = ""
) -> str:
    """Return the shell command that serves a result.

    Args:
        engine: one of `TARGETS`.
        model: path of the result.
        serving: settings that `check_engine` has accepted.
        name: name of the model in requests; "" leaves it to the engine.
        tokenizer: the original model, if the result is served with its tokenizer.
    """
    target, path = TARGETS[engine], str(model)
    is_plain = re.fullmatch(r"[\w./+-]+", path)  # other text stands in quotes in a Modelfile
    options = (
        target.context.format(serving.context) if serving.context is not None else "",
        target.caches.get(_cache_of(serving), ""),
        target.devices.format(serving.devices) if serving.devices > 1 else "",
        target.named.format(shlex.quote(name)) if name else "",
        target.tokenizer.format(shlex.quote(tokenizer)) if tokenizer else "",
    )
    return target.command.format(
        model=shlex.quote(path),
        from_line=shlex.quote(f"FROM {path if is_plain else json.dumps(path)}"),
        name=shlex.quote(name or "NAME"),
        options="".join(f" {option}" for option in options if option),
    )


def with_output_path(note: str, out: object) -> str:
    """Fill the path of the result into the note with the command that serves it; return other notes unchanged."""
    if kind_of(note) is not NoteKind.SERVE:
        return note

    def filled_in(match: re.Match[str]) -> str:
        quoted = note.count("'", 0, match.start()) % 2
        path_prefix = "" if "/" in str(out) else "./"  # or an engine takes it for a name
        return f"{path_prefix}{out}".replace("'", "'\\''") if quoted else shlex.quote(str(out))

    return re.sub(rf"\b{_PLACE}\b", filled_in, note)


def preferred_formats(engine: str) -> tuple[str, ...]:
    """Return the default formats of an engine."""
    option_sets = target_of(engine).default_options.values()
    return tuple(dict.fromkeys(options["format"] for options in option_sets))


def _check_split(tensor: TensorPlan, parallel: int) -> None:
    assert tensor.scheme is not None
    rows, columns = tensor.matrix
    granularity = tensor.scheme.weight.granularity
    module = tensor.name.removesuffix(".weight")
    if module.rpartition(".")[2] in _ROW_PARALLEL:
        size = granularity.size if isinstance(granularity, PerGroup) else 1
        size = granularity.columns if isinstance(granularity, Tile) else size
        size_to_split, description = columns, f"inputs in groups of {size}"
    else:
        size = granularity.rows if isinstance(granularity, Tile) else 1
        size_to_split, description = rows, f"outputs in runs of {size}"
    if size_to_split % (parallel * size):
        raise RefusedError(
            f"{module}: {size_to_split} {description} cannot be split over {parallel} devices",
            f"a smaller --tensor-parallel, smaller groups, or --ignore '{module}'",
            tensor=tensor.name,
        )


# Code for the card of a result: a program for engines that are libraries, else a command and a request


_CALLED = "model"  # in requests: a directory has another name wherever it is copied
_PROMPT, _QUESTION = "The first thing to know is", "What can you do?"
_MESSAGES = f'messages = [{{"role": "user", "content": "{_QUESTION}"}}]\n'
# For engines that are libraries: a program, and its inputs for a model without and with a chat template.
_PROGRAMS: Mapping[str, tuple[str, str, str]] = {
    "transformers": (
        """\
from transformers import AutoModelForCausalLM, AutoTokenizer

place = "{name}"
tokenizer = AutoTokenizer.from_pretrained(place)
model = AutoModelForCausalLM.from_pretrained(place, dtype="auto", device_map="auto")
{inputs}
output = model.generate(**inputs.to(model.device), max_new_tokens=64)
print(tokenizer.decode(output[0], skip_special_tokens=True))""",
        f'inputs = tokenizer("{_PROMPT}", return_tensors="pt")',
        f"{_MESSAGES}inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n)',
    ),
    "mlx": (
        """\
from mlx_lm import generate, load

model, tokenizer = load("{name}")
{inputs}
print(generate(model, tokenizer, prompt=prompt, max_tokens=64))""",
        f'prompt = "{_PROMPT}"',
        f"{_MESSAGES}prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)",
    ),
}


@dataclass(frozen=True, slots=True)
class Snippet:
    """Code for one engine, and its language as Markdown names it."""

    engine: str
    language: str
    code: str


def snippets(
    format_info: FormatInfo,
    verdicts: Iterable[EngineVerdict],
    path: str,
    *,
    chat: bool,
    repository: str = "",
) -> list[Snippet]:
    """Return code for every engine that loads a result; none if the path has characters that a line cannot hold.

    Args:
        format_info: facts of the format.
        verdicts: verdicts of engines on the result.
        path: a directory, a file, or a name on the hub.
        chat: whether the model has a chat template.
        repository: repository on the hub from which the file is downloaded first; "" for none.
    """
    result = []
    if not path.isprintable():  # a line of it could end the block that the code stands in
        return []
    for engine in (verdict.engine for verdict in verdicts if verdict.loads):
        if engine not in TARGETS:
            continue
        packages = (
            f"{TARGETS[engine].packages} {format_info.engine_packages.get(engine, '')}".strip()
        )
        install = f"pip install {packages}\n" if packages else ""
        if repository:
            install += f"hf download {shlex.quote(repository)} {shlex.quote(path)} --local-dir .\n"
        if engine in _PROGRAMS:
            comments = "".join(f"# {line}\n" for line in install.splitlines())
            code = comments + _program(engine, path, chat=chat)
            result.append(Snippet(engine, "python", code))
        else:
            result.append(Snippet(engine, "bash", install + _served(engine, path, chat=chat)))
    return result


def _program(engine: str, path: str, *, chat: bool) -> str:
    """Return the program that loads a result and generates text."""
    program, without_template, with_template = _PROGRAMS[engine]
    name = json.dumps(path, ensure_ascii=False)[1:-1]  # between the quotes of the program
    return program.format(name=name, inputs=with_template if chat else without_template)


def _served(engine: str, path: str, *, chat: bool) -> str:
    """Return the command that serves a result, and a request to it."""
    target = TARGETS[engine]
    label = path.rpartition(".gguf")[0] or _CALLED
    command = command_of(engine, path, Serving(), name=label)
    if not target.port:
        return command
    prompt_fields = (
        {"messages": [{"role": "user", "content": _QUESTION}]} if chat else {"prompt": _PROMPT}
    )
    request = json.dumps(
        {"model": label if target.named else path, **prompt_fields, "max_tokens": 64}
    )
    route = "chat/completions" if chat else "completions"
    return (
        f"{command}\n\n# in another terminal\n"
        f"curl http://localhost:{target.port}/v1/{route} -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(request)}"
    )
