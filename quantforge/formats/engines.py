"""Which engines load which files, and why another would not.

The facts are of 2026-11, from the sources of transformers 5.23 (with compressed-tensors 0.20,
gptqmodel 7.7), vLLM 0.33, SGLang 0.5.23, TensorRT-LLM, llama.cpp and mlx-lm 0.32; transformers and
vLLM (its CPU build) were also run. An engine is described by rules: each returns "" for a layer
that is fine, or what is in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from quantforge.planned import EngineVerdict
from quantforge.scheme import LayerScheme, PerGroup, Scheme

Shape = tuple[int, int]
Rule = Callable[[Scheme, Shape], str]


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine does with the files of one format.

    Attributes:
        never: why it loads none of them, "" when it loads some.
        refuses: rules that every layer has to pass.
        note: what is good to know when it loads; ``notes`` are such rules.
    """

    never: str = ""
    refuses: tuple[Rule, ...] = ()
    note: str = ""
    notes: tuple[Rule, ...] = ()


def verdicts(key: str, layers: Iterable[tuple[LayerScheme, Shape]]) -> tuple[EngineVerdict, ...]:
    """Judge the layers of a model in format ``key``, one verdict per engine."""
    distinct = list(dict.fromkeys((layer.weight, shape) for layer, shape in layers))
    return tuple(_verdict(name, engine, distinct) for name, engine in ENGINES[key].items())


def _verdict(name: str, engine: Engine, layers: list[tuple[Scheme, Shape]]) -> EngineVerdict:
    if reasons := _answers(engine.never, engine.refuses, layers):
        return EngineVerdict(name, False, reasons)
    return EngineVerdict(name, True, _answers(engine.note, engine.notes, layers))


def _answers(general: str, rules: Iterable[Rule], layers: list[tuple[Scheme, Shape]]) -> str:
    answers = [general, *(rule(scheme, shape) for rule in rules for scheme, shape in layers)]
    return "; ".join(dict.fromkeys(filter(None, answers)))


def bits_in(*widths: int) -> Rule:
    """Codes of these widths only."""
    shown = " and ".join(map(str, widths))

    def rule(scheme: Scheme, _: Shape) -> str:
        return "" if scheme.bits in widths else f"kernels for {shown} bits only, not {scheme.bits}"

    return rule


def groups_in(*sizes: int, row: bool = True) -> Rule:
    """Groups of these sizes; ``row``: one scale per row as well."""
    shown = ", ".join(map(str, sizes)) + (" or one per row" if row else "")

    def rule(scheme: Scheme, shape: Shape) -> str:
        size = scheme.group_size(shape[1])
        by_row = row and not isinstance(scheme.granularity, PerGroup)
        return "" if by_row or size in sizes else f"groups of {shown} only, not {size}"

    return rule


def symmetric(reason: str) -> Rule:
    """No zero points."""
    return lambda scheme, _: "" if scheme.symmetric else reason


def at_bits(width: int, answer: str) -> Rule:
    """An answer for codes of one width."""
    return lambda scheme, _: answer if scheme.bits == width else ""


def tiles(out_features: int, in_features: int) -> Rule:
    """Both dimensions are multiples of a kernel's tile."""

    def rule(_: Scheme, shape: Shape) -> str:
        if shape[0] % out_features == 0 and shape[1] % in_features == 0:
            return ""
        return (
            f"{shape[0]}x{shape[1]} is no multiple of {out_features}x{in_features} (old releases)"
        )

    return rule


_GGUF_ONLY = Engine(never="reads GGUF files only")
_MODELOPT = Engine(never="reads this format through a ModelOpt configuration only")
_GROUPS = groups_in(32, 64, 128)
_GROUPS_ONLY = groups_in(32, 64, 128, row=False)
_NO_ZEROS = symmetric("no kernel for zero points")
_MARLIN = (tiles(64, 128), at_bits(8, "8-bit kernels run on a GPU only"))
_PACKED = Engine(refuses=(bits_in(4, 8), _GROUPS), notes=_MARLIN)
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
    "plain": {
        "transformers": Engine(),
        "vllm": Engine(),
        "sglang": Engine(),
        "tensorrt-llm": Engine(),
        "llama.cpp": _GGUF_ONLY,
        "mlx": Engine(),
    },
    "compressed-tensors": {
        "transformers": Engine(refuses=(symmetric(_ZERO_POINTS),), notes=_DENSE),
        "vllm": _PACKED,
        "sglang": _PACKED,
        "tensorrt-llm": Engine(never="reads no integer weights of this format"),
        "llama.cpp": _GGUF_ONLY,
        "mlx": Engine(
            refuses=(bits_in(4), groups_in(32, row=False), _NO_ZEROS),
            note="according to its source, not run",
        ),
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
