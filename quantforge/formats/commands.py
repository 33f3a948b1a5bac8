"""Commands that serve a result: one record for each engine, with the options for what a person asks of it.

The options are those of vLLM 0.33, SGLang 0.5.23, LMDeploy 0.18 and mlx-lm 0.32 (read in their packages), and of
TensorRT-LLM 1.3, llama.cpp b10749 and Ollama 0.14 (read in their
documentation and sources), in 2026-11. ``tests/golden/engine_options.toml`` lists them as they are documented.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from quantforge.architectures.cache_kinds import PLAIN, kinds_of, name_of
from quantforge.errors import RefusedError
from quantforge.formats import GGUF
from quantforge.formats.command_parts import Command, Part, PartKind, filled, line_of
from quantforge.plans import Serving

_NEAREST = {"int8": ("fp8", "int4"), "fp8": ("int8", "int4"), "int4": ("int8", "fp8")}


def _line(text: str) -> Part:
    return Part(text, PartKind.LINE)


_TRT_CACHE = {"fp8": _line("kv_cache_config: {{dtype: fp8}}")}
_GGML_CACHES = {"int8": "q8_0", "int4": "q4_0"}
_LAYERS = "it spreads the layers over all devices that it sees, unasked"
_UNBOUNDED = "its cache grows with the sequence, no option bounds it"
COMMANDS: Mapping[str, Command] = {
    "vllm": Command(
        "vllm serve {out}",
        context=Part("--max-model-len {context}"),
        caches={
            "fp8": Part("--kv-cache-dtype fp8"),
            "int8": Part("--kv-cache-dtype int8_per_token_head"),
            "int4": Part("--kv-cache-dtype int4_per_token_head"),
        },
        devices=Part("--tensor-parallel-size {devices}"),
        named="--served-model-name {name}",
        by_format={GGUF: "--tokenizer {source}"},
    ),
    "sglang": Command(
        "python -m sglang.launch_server --model-path {out}",
        context=Part("--context-length {context}"),
        caches={"fp8": Part("--kv-cache-dtype fp8_e4m3")},
        devices=Part("--tp-size {devices}"),
        named="--served-model-name {name}",
    ),
    "tensorrt-llm": Command(
        "trtllm-serve {out}",
        context=Part("--max_seq_len {context}"),
        caches=_TRT_CACHE,
        devices=Part("--tp_size {devices}"),
        file="trtllm.yaml",
    ),
    "lmdeploy": Command(
        "lmdeploy serve api_server {out}",
        context=Part("--session-len {context}"),
        caches={"int8": Part("--quant-policy int8"), "int4": Part("--quant-policy int4")},
        devices=Part("--tp {devices}"),
        named="--model-name {name}",
        lacks={"cache": "its TurboMind engine refuses fp8"},
    ),
    "llama.cpp": Command(
        "llama-server -m {out}",
        context=Part("--ctx-size {context}"),
        caches={
            name: Part(f"--flash-attn on --cache-type-k {kind} --cache-type-v {kind}")
            for name, kind in _GGML_CACHES.items()
        },
        named="--alias {name}",
        lacks={"devices": f"{_LAYERS} (its --split-mode tensor is experimental)"},
    ),
    "ollama": Command(
        "ollama create {name} -f Modelfile && ollama run {name}",
        context=_line("PARAMETER num_ctx {context}"),
        caches={
            name: Part(
                f"OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE={kind} ollama serve &"
                " until ollama ps >/dev/null 2>&1; do sleep 1; done",
                PartKind.BEFORE,
            )
            for name, kind in _GGML_CACHES.items()
        },
        file="Modelfile",
        lines=("FROM {out}",),
        lacks={"devices": _LAYERS},
    ),
    "mlx": Command(
        "mlx_lm.server --model {out}",
        caches={"int8": Part("--kv-bits 8"), "int4": Part("--kv-bits 4")},
        lacks={"context": _UNBOUNDED},
    ),
    "transformers": Command(
        "transformers serve {out}",
        lacks={"context": _UNBOUNDED},
    ),
}  # fmt: skip


def check_serving(engine: str, serving: Serving) -> tuple[str, ...]:
    """Refuse what the command of an engine cannot be asked; return notes on what it need not be.

    Raises:
        UsageError: no such type of cache.
        RefusedError: with the reason, and the nearest that there is.
    """
    command = COMMANDS[engine]
    why = {key: f": {reason}" for key, reason in command.lacks.items()}
    cache = _cache_of(serving)
    if cache not in {PLAIN, *command.caches}:
        if cache not in _NEAREST:
            keys = kinds_of(cache)[0]
            raise RefusedError(
                f"--for {engine}: its command takes one kind of cache for keys and values alike",
                f"--cache {keys}" if keys in command.caches else "leave --cache out",
            )
        near = next((kind for kind in _NEAREST[cache] if kind in command.caches), "")
        raise RefusedError(
            f"--for {engine}: no cache in {cache}{why.get('cache', '')}",
            f"--cache {near}" if near else "leave --cache out",
        )
    if serving.context is not None and command.context is None:
        return (f"{engine}: --context changes nothing{why.get('context', '')}",)
    return ()


def _cache_of(serving: Serving) -> str:
    """Return the one name of the cache that is asked for, however it was written."""
    return name_of(*kinds_of(serving.cache or PLAIN))


def command_of(
    engine: str, out: object, serving: Serving, form: str = "", source: str = "", name: str = ""
) -> str:
    """Return the command that serves a result, for a shell.

    Args:
        engine: one of `COMMANDS`.
        out: the result.
        serving: what is asked; `check_serving` has seen it.
        form: the format of the result.
        source: the original model.
        name: of the model in requests, "" where that is left to the engine.
    """
    command = COMMANDS[engine]
    words = {
        "out": str(out), "context": str(serving.context), "source": source,
        "devices": str(serving.devices), "name": name or "NAME",
    }  # fmt: skip
    parts = [
        command.context if serving.context is not None else None,
        command.caches.get(_cache_of(serving)),
        command.devices if serving.devices > 1 else None,
    ]
    asked = [part for part in parts if part is not None]
    options = [filled(part, words) for part in asked if part.kind is PartKind.OPTION]
    if name and command.named:
        options.append(filled(Part(command.named), words))
    if form in command.by_format:
        options.append(filled(Part(command.by_format[form]), words))
    lines = [*command.lines, *(part.text for part in asked if part.kind is PartKind.LINE)]
    first = [command.before] if command.before else []
    if lines:
        written = " ".join(shlex.quote(line_of(line, words)) for line in lines)
        first.append(f"printf '%s\\n' {written} > {command.file}")
        options += ["--extra_llm_api_options", command.file] if not command.lines else []
    first = [*(part.text for part in asked if part.kind is PartKind.BEFORE), *first]
    last = " ".join((filled(Part(command.start), words), *options))
    return " && ".join((*first, last))
