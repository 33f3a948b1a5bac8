"""Engines: which of them load which files, and why another would not.

The facts are of 2026-11, from the sources of transformers 5.23 (with compressed-tensors 0.20,
gptqmodel 7.7, bitsandbytes 0.50), vLLM 0.33, SGLang 0.5.23, TensorRT-LLM, llama.cpp and mlx-lm 0.32.
Those of transformers, vLLM (its CPU build, 0.32), mlx-lm (0.32.2, on a CPU) and llama.cpp were also
seen, on files of ours (``docs/results/interop.md``); SGLang and TensorRT-LLM were not run. An engine
is described by rules: each returns "" for a layer that is fine, or what is in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from quantforge.grids import PerGroup, PerTensor
from quantforge.plans import EngineVerdict
from quantforge.scheme import LayerScheme, Scheme

Shape = tuple[int, int]
Rule = Callable[[Scheme, Shape], str]
InputRule = Callable[[LayerScheme], str]


@dataclass(frozen=True, slots=True)
class Engine:
    """Rules by which an engine loads the files of one format.

    Attributes:
        never: why it loads none of them, "" when it loads some.
        refuses: rules that every layer has to pass.
        inputs: a rule about how inputs are quantized.
        note: what is good to know when it loads; ``notes`` are such rules.
    """

    never: str = ""
    refuses: tuple[Rule, ...] = ()
    inputs: InputRule = lambda _: ""
    note: str = ""
    notes: tuple[Rule, ...] = ()


def verdicts(key: str, layers: Iterable[tuple[LayerScheme, Shape]]) -> tuple[EngineVerdict, ...]:
    """Judge the layers of a model in format ``key``, one verdict per engine."""
    distinct = list(dict.fromkeys(layers))
    return tuple(_verdict(name, engine, distinct) for name, engine in ENGINES[key].items())


def _verdict(name: str, engine: Engine, layers: list[tuple[LayerScheme, Shape]]) -> EngineVerdict:
    weights = list(dict.fromkeys((layer.weight, shape) for layer, shape in layers))
    inputs = "; ".join(filter(None, dict.fromkeys(engine.inputs(layer) for layer, _ in layers)))
    if reasons := _answers(engine.never, engine.refuses, weights) or inputs:
        return EngineVerdict(name, False, reasons)
    return EngineVerdict(name, True, _answers(engine.note, engine.notes, weights))


def _answers(general: str, rules: Iterable[Rule], layers: list[tuple[Scheme, Shape]]) -> str:
    answers = [general, *(rule(scheme, shape) for rule in rules for scheme, shape in layers)]
    return "; ".join(dict.fromkeys(filter(None, answers)))


def bits_in(*widths: int) -> Rule:
    """Return a rule: codes of these widths only."""
    shown = " and ".join(map(str, widths))

    def rule(scheme: Scheme, _: Shape) -> str:
        return "" if scheme.bits in widths else f"kernels for {shown} bits only, not {scheme.bits}"

    return rule


def groups_in(*sizes: int, row: bool = True) -> Rule:
    """Return a rule: groups of these sizes; ``row``: one scale per row as well."""
    shown = ", ".join(map(str, sizes)) + (" or one per row" if row else "")

    def rule(scheme: Scheme, shape: Shape) -> str:
        size = scheme.group_size(shape[1])
        by_row = row and not isinstance(scheme.granularity, PerGroup)
        return "" if by_row or size in sizes else f"groups of {shown} only, not {size}"

    return rule


def symmetric(reason: str) -> Rule:
    """Return a rule: no zero points."""
    return lambda scheme, _: "" if scheme.symmetric else reason


def at_bits(width: int, answer: str) -> Rule:
    """Return a rule that gives an answer for codes of one width."""
    return lambda scheme, _: answer if scheme.bits == width else ""


def tiles(out_features: int, in_features: int) -> Rule:
    """Return a rule: both dimensions are multiples of a kernel's tile."""

    def rule(_: Scheme, shape: Shape) -> str:
        if shape[0] % out_features == 0 and shape[1] % in_features == 0:
            return ""
        return (
            f"{shape[0]}x{shape[1]} is no multiple of {out_features}x{in_features} (old releases)"
        )

    return rule


def of_integers(*rules: Rule) -> tuple[Rule, ...]:
    """Return the same rules, for integers only."""

    def limited(rule: Rule) -> Rule:
        return lambda scheme, shape: rule(scheme, shape) if scheme.integer else ""

    return tuple(limited(rule) for rule in rules)


def grid_in(grids: Iterable[str], answer: str) -> Rule:
    """Return a rule that gives an answer for some grids."""
    known = frozenset(grids)
    return lambda scheme, _: answer if scheme.grid in known else ""


def _no_fp8_groups(scheme: Scheme, _: Shape) -> str:
    grouped = scheme.grid.startswith("fp8") and isinstance(scheme.granularity, PerGroup)
    return "fp8 per tensor, row or 128x128 tile only" if grouped else ""


def _fp8_rows_or_tiles(scheme: Scheme, _: Shape) -> str:
    whole = scheme.grid.startswith("fp8") and isinstance(scheme.granularity, PerTensor)
    return "fp8 per row or tile only" if whole else ""


def _four_by_four(layer: LayerScheme) -> str:
    bare = layer.weight.grid == "nvfp4" and layer.input is None
    return "nvfp4 with nvfp4 inputs only (NVFP4_W4A4)" if bare else ""


def _no_cpu_tiles(_: Scheme, __: Shape) -> str:
    return "no kernel for tiles on a CPU without AMX"


_GGUF_ONLY = Engine(never="reads GGUF files only")
_MODELOPT = Engine(never="reads this format through a ModelOpt configuration only")
_GROUPS = groups_in(32, 64, 128)
_GROUPS_ONLY = groups_in(32, 64, 128, row=False)
_NO_ZEROS = symmetric("no kernel for zero points")
_MARLIN = (tiles(64, 128), at_bits(8, "8-bit kernels run on a GPU only"))
_FLOATS = (
    grid_in(
        ("fp8_e4m3",),
        "8-bit floats are fast from compute capability 8.9 on; a CPU has kernels with inputs by token (or tiles, "
        "with AMX) only",
    ),
    grid_in(("nvfp4", "mxfp4", "mxfp8"), "kernels run on a GPU only"),
)
_PACKED = Engine(
    refuses=(*of_integers(bits_in(4, 8), _GROUPS), _no_fp8_groups),
    notes=(*of_integers(*_MARLIN), *_FLOATS),
)
_GPTQ = Engine(refuses=(bits_in(4, 8), _GROUPS, _NO_ZEROS), notes=_MARLIN)
_AWQ = Engine(refuses=(_GROUPS_ONLY,), notes=_MARLIN)
_ZERO_POINTS = (
    "compressed-tensors 0.18 to 0.20 cannot load packed zero points: load with "
    "CompressedTensorsConfig(dequantize=True)"
)
_DENSE = tuple(at_bits(width, "needs compressed-tensors 0.18 or later") for width in (3, 5, 6, 7))

_GPTQ_ENGINES = {
    "transformers": Engine(note="through gptqmodel and optimum"),
    "vllm": _GPTQ,
    "sglang": _GPTQ,
    "tensorrt-llm": _MODELOPT,
    "llama.cpp": _GGUF_ONLY,
    "mlx": Engine(never="refuses files with g_idx"),
}
ENGINES: Mapping[str, Mapping[str, Engine]] = {
    "bnb": {
        "transformers": Engine(note="through bitsandbytes"),
        "vllm": Engine(note="through vllm-bnb-plugin (since vLLM 0.28)"),
        "sglang": Engine(note="according to its source, not run"),
        "tensorrt-llm": Engine(never="does not read bitsandbytes"),
        "llama.cpp": _GGUF_ONLY,
        "mlx": Engine(never="does not read bitsandbytes"),
    },
    "fp8": {
        "transformers": Engine(note="decoded to the model's type without a GPU"),
        "vllm": Engine(notes=(_no_cpu_tiles,)),
        "sglang": Engine(note="according to its source, not run"),
        "tensorrt-llm": Engine(note="according to its source, not run"),
        "llama.cpp": Engine(never="reads GGUF files only (its converter decodes fp8)"),
        "mlx": Engine(never="does not read fp8"),
    },
    "mlx": {
        name: Engine(never="does not read MLX files")
        for name in ("transformers", "vllm", "sglang", "tensorrt-llm")
    }
    | {"llama.cpp": _GGUF_ONLY, "mlx": Engine()},
    "plain": {
        "transformers": Engine(),
        "vllm": Engine(),
        "sglang": Engine(),
        "tensorrt-llm": Engine(),
        "llama.cpp": _GGUF_ONLY,
        "mlx": Engine(),
    },
    "compressed-tensors": {
        "transformers": Engine(refuses=(symmetric(_ZERO_POINTS),), notes=of_integers(*_DENSE)),
        "vllm": _PACKED,
        "sglang": _PACKED,
        "tensorrt-llm": Engine(
            refuses=(
                lambda scheme, _: "reads no integers of this format" if scheme.integer else "",
                _no_fp8_groups,
                _fp8_rows_or_tiles,
                grid_in(("mxfp8",), "no kernel for mxfp8"),
            ),
            inputs=_four_by_four,
            note="according to its source, not run",
        ),
        "llama.cpp": _GGUF_ONLY,
        "mlx": Engine(never="knows the tensors of this format in single families only"),
    },
    "gptq": _GPTQ_ENGINES,
    "gptq_v2": _GPTQ_ENGINES,
    "awq": {
        "transformers": Engine(note="through gptqmodel"),
        "vllm": _AWQ,
        "sglang": _AWQ,
        "tensorrt-llm": _MODELOPT,
        "llama.cpp": _GGUF_ONLY,
        "mlx": Engine(refuses=(_GROUPS_ONLY,), note="converted on loading"),
    },
}
