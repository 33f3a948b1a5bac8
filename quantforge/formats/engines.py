"""Engines: the rules by which they load files or not; which rules hold of a format stands in its record.

The facts are of 2026-11, from the sources of transformers 5.23 (with compressed-tensors 0.20,
gptqmodel 7.7, bitsandbytes 0.50), vLLM 0.33, SGLang 0.5.23, TensorRT-LLM, LMDeploy 0.18, llama.cpp and mlx-lm 0.32.
Those of transformers, vLLM (its CPU build, 0.32), mlx-lm (0.32.2, on a CPU) and llama.cpp were also
seen, on files of ours (``docs/results/interop.md``); SGLang, TensorRT-LLM and LMDeploy were not run. An engine
is described by rules: each returns "" for a layer that is fine, or what is in the way. What depends on the family of
a model beside its layers is in `engine_families`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from quantforge.grids import PerGroup
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
        mixture: why it loads no layers of several schemes in one model.
        note: what is good to know where it loads a layer.
        notes: rules that return such notes.
        transposed: why it loads none of a family that stores linears ``[in, out]``.
        experts: why it loads no packed experts that are stored one by one.
        kept_experts: why it loads no such experts as they are beside packed layers.
        packed_experts: a rule about how such experts are stored.
        mixed_experts: why it loads no such experts that are not all stored alike.
        unrolls: whether it takes experts one by one of families whose own files stack them, where it knows such.
        embedding: whether it loads a quantized embedding.
        decodes: whether the configuration can make it decode weights on loading, for blocks that read them themselves.
    """

    never: str = ""
    refuses: tuple[Rule, ...] = ()
    inputs: InputRule = lambda _: ""
    mixture: str = ""
    note: str = ""
    notes: tuple[Rule, ...] = ()
    transposed: str = ""
    experts: str = ""
    kept_experts: str = ""
    packed_experts: InputRule = lambda _: ""
    mixed_experts: str = ""
    unrolls: bool = False
    embedding: bool = False
    decodes: bool = False


def verdicts(
    engines: Mapping[str, Engine], layers: Iterable[tuple[LayerScheme, Shape]]
) -> tuple[EngineVerdict, ...]:
    """Judge the layers of a model by the rules of a format's engines, one verdict per engine."""
    distinct = list(dict.fromkeys(layers))
    return tuple(_verdict(name, engine, distinct) for name, engine in engines.items())


def _verdict(name: str, engine: Engine, layers: list[tuple[LayerScheme, Shape]]) -> EngineVerdict:
    weights = list(dict.fromkeys((layer.weight, shape) for layer, shape in layers))
    inputs = "; ".join(filter(None, dict.fromkeys(engine.inputs(layer) for layer, _ in layers)))
    mixed = engine.mixture if len({layer for layer, _ in layers}) > 1 else ""
    if reasons := _answers(engine.never, engine.refuses, weights) or inputs or mixed:
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


GGUF_ONLY = Engine(never="reads GGUF files only")
MODELOPT = Engine(never="reads this format through a ModelOpt configuration only")
GROUPS = groups_in(32, 64, 128)
GROUPS_ONLY = groups_in(32, 64, 128, row=False)
MARLIN = (tiles(64, 128), at_bits(8, "8-bit kernels run on a GPU only"))
UNTRIED = "according to its source, not run"
TURBOMIND = Engine(refuses=(bits_in(4), groups_in(128, row=False)), note=UNTRIED)  # of LMDeploy


def by_engine(
    *, transformers: Engine, vllm: Engine, sglang: Engine, tensorrt_llm: Engine, lmdeploy: Engine, mlx: Engine,
    llama_cpp: Engine = GGUF_ONLY,
) -> Mapping[str, Engine]:  # fmt: skip
    """Return the rules of every engine that directories are written for, by its name."""
    return {
        "transformers": transformers, "vllm": vllm, "sglang": sglang, "tensorrt-llm": tensorrt_llm,
        "lmdeploy": lmdeploy, "llama.cpp": llama_cpp, "mlx": mlx,
    }  # fmt: skip
