"""Targets of a quantization: each engine with its format of choice, what it refuses, and how it is served.

One table, data only; the facts are those of `quantforge.formats.engines` (2026-11, sources of vLLM 0.33, SGLang 0.5.23,
TensorRT-LLM's PyTorch backend, llama.cpp 0c1e570, mlx-lm 0.32).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.errors import RefusedError, UnknownNameError, UsageError, either, nearest
from quantforge.formats import DEFAULT, GGUF, format_of, libraries
from quantforge.formats.commands import COMMANDS, check_serving, command_of
from quantforge.formats.libraries import Library
from quantforge.formats.unknown_names import ENGINE_WORDS
from quantforge.grids import PerGroup, Tile
from quantforge.plans import EngineVerdict, Serving, TensorPlan


@dataclass(frozen=True, slots=True)
class Target:
    """One engine; how it is started is in `quantforge.formats.commands`.

    Attributes:
        wanted: by bits, what a recipe takes that says nothing else: ``format``, and ``scheme`` or ``type``.
        judged: name of the engine whose verdict on a format counts (the one it is made of).
        note: what a user has to know.
        port: where its server answers unless told otherwise, 0 for none that speaks OpenAI's protocol.
        packages: of Python that it consists of, "" where it is installed in other ways.
        library: the program that loads a result, where it is a library.
    """

    wanted: Mapping[int, Mapping[str, str]]
    judged: str
    note: str = ""
    port: int = 0
    packages: str = ""
    library: Library | None = None


def _packed(scheme: str) -> dict[str, str]:
    return {"format": DEFAULT, "scheme": scheme}


_TYPES = {2: "Q2_K", 3: "Q3_K_M", 4: "Q4_K_M", 5: "Q5_K_M", 6: "Q6_K", 8: "Q8_0"}
_GGUF = {bits: {"format": GGUF, "type": name} for bits, name in _TYPES.items()}
_SERVED = {4: _packed("int4:g128:sym"), 8: _packed("FP8_DYNAMIC")}
_TENSORRT = {4: _packed("NVFP4_W4A4"), 8: _packed("FP8_DYNAMIC")}
_BLACKWELL = "nvfp4 needs a Blackwell GPU; according to its source, not run"
TARGETS: Mapping[str, Target] = {
    "vllm": Target(_SERVED, "vllm", port=8000, packages="vllm"),
    "sglang": Target(
        _SERVED, "sglang", "according to its source, not run", port=30000, packages="'sglang[all]'"
    ),
    "tensorrt-llm": Target(
        _TENSORRT, "tensorrt-llm", _BLACKWELL, port=8000, packages="tensorrt-llm"
    ),
    "lmdeploy": Target(
        {4: {"format": "awq", "scheme": "int4:g128:asym"}}, "lmdeploy", "according to its source, not run",
        port=23333, packages="lmdeploy",
    ),
    "transformers": Target(
        {4: _packed("int4:g128:sym"), 8: _packed("int8:g128:sym")}, "transformers",
        packages="transformers accelerate", library=libraries.TRANSFORMERS,
    ),
    "llama.cpp": Target(_GGUF, "llama.cpp", port=8080),
    "ollama": Target(_GGUF, "llama.cpp"),
    "mlx": Target(
        {bits: {"format": "mlx", "scheme": f"int{bits}:g64:min"} for bits in (2, 3, 4, 5, 6, 8)}, "mlx",
        packages="mlx-lm", library=libraries.MLX,
    ),
}  # fmt: skip
_SERVE, _PLACE = "serve it with: ", "OUT"  # of notes
# Linears that engines split along their inputs; all others are split along their outputs.
_ROW_PARALLEL = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2")


def target_of(engine: str) -> Target:
    """Return the entry of an engine, in letters of either case, or raise `UsageError` naming the nearest."""
    if engine.lower() not in TARGETS:
        raise UnknownNameError(
            f"--for {engine}: unknown engine", nearest(engine.lower(), TARGETS, ENGINE_WORDS)
        )
    return TARGETS[engine.lower()]


def filled(engine: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, with the engine's format and scheme where they name no format, scheme or type.

    Raises:
        UsageError: no such engine, or bits that nothing is made for it in.
    """
    target, options = target_of(engine), dict(given)
    if options.get("format") or options.get("scheme") or options.get("type"):
        return options
    bits = options.pop("bits", None) or 4
    if bits not in target.wanted:
        close = min(target.wanted, key=lambda known: (abs(known - bits), known))
        raise UsageError(
            f"--for {engine} --bits {bits}: it is fast with {either(target.wanted)} bits",
            f"--bits {close}",
        )
    return options | dict(target.wanted[bits])


def check(
    engine: str | None,
    serving: Serving,
    tensors: Iterable[TensorPlan],
    verdicts: Iterable[EngineVerdict],
    key: str,
    source: str = "",
) -> tuple[str, ...]:
    """Refuse a plan that the engine does not load; return notes on one that it loads (none without an engine).

    Args:
        engine: its name.
        serving: what is asked of its command.
        tensors: of the plan.
        verdicts: on the format.
        key: the format.
        source: the original model.

    Raises:
        RefusedError: with the engine's reason, the layer that cannot be split over the devices, or what its command
            cannot be asked.
    """
    if engine is None:
        return ()
    target = target_of(engine)
    wanted = f"--bits {either(target.wanted)}"
    for verdict in verdicts:
        if verdict.engine == target.judged and verdict.loads is False:
            raise RefusedError(
                f"{engine} does not load this in {key}: {verdict.reason}",
                f"drop --format and --scheme and take {wanted}, which --for {engine} knows how to make",
            )
    if serving.devices > 1 and COMMANDS[engine].devices is None:
        why = COMMANDS[engine].lacks.get("devices", "")
        raise RefusedError(
            f"{engine} does not split a model by tensors{why and f': {why}'}",
            "drop --tensor-parallel",
        )
    for tensor in tensors:
        if tensor.scheme is not None and serving.devices > 1:
            _check_split(tensor, serving.devices)
    said = check_serving(engine, serving)
    needed = format_of(key).ABOUT.packages.get(engine, "")
    return (
        *([f"{engine}: {target.note}"] if target.note else []),
        *([f"{engine}: {key} files need pip install {needed}"] if needed else []),
        *said,
        f"{_SERVE}{command_of(engine, _PLACE, serving, key, source)}",
    )


def of_engine(note: str) -> bool:
    """Return whether a note of a plan is about the engine that it is made for."""
    return note.startswith((_SERVE, *(f"{engine}: " for engine in TARGETS)))


def placed(note: str, out: object) -> str:
    """Return a note of a plan; in the one on how a result is served, its path is filled in, for a shell."""
    if not note.startswith(_SERVE):
        return note

    def filled_in(found: re.Match[str]) -> str:
        quoted = note.count("'", 0, found.start()) % 2
        beside = "" if "/" in str(out) else "./"  # or an engine takes it for a name
        return f"{beside}{out}".replace("'", "'\\''") if quoted else shlex.quote(str(out))

    return re.sub(rf"\b{_PLACE}\b", filled_in, note)


def candidates(engine: str) -> tuple[str, ...]:
    """Return the formats that are written for an engine when nothing else is said."""
    wanted = target_of(engine).wanted.values()
    return tuple(dict.fromkeys(options["format"] for options in wanted))


def _check_split(tensor: TensorPlan, parallel: int) -> None:
    assert tensor.scheme is not None
    rows, columns = tensor.matrix
    granularity = tensor.scheme.weight.granularity
    module = tensor.name.removesuffix(".weight")
    if module.rpartition(".")[2] in _ROW_PARALLEL:
        size = granularity.size if isinstance(granularity, PerGroup) else 1
        size = granularity.columns if isinstance(granularity, Tile) else size
        whole, what = columns, f"inputs in groups of {size}"
    else:
        size = granularity.rows if isinstance(granularity, Tile) else 1
        whole, what = rows, f"outputs in runs of {size}"
    if whole % (parallel * size):
        raise RefusedError(
            f"{module}: {whole} {what} cannot be split over {parallel} devices",
            f"a smaller --tensor-parallel, smaller groups, or --ignore '{module}'",
            tensor=tensor.name,
        )
