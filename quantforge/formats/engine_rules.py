"""Rules for which layers of a format each engine can load, and what else an engine needs of a model.

The facts are of 2026-11, from the sources of transformers 5.23 (with compressed-tensors 0.20, gptqmodel 7.7,
bitsandbytes 0.50), vLLM 0.33, SGLang 0.5.23, TensorRT-LLM, LMDeploy 0.18, llama.cpp and mlx-lm 0.32. Those of
transformers, vLLM (its CPU build, 0.32), mlx-lm (0.32.2, on a CPU) and llama.cpp were also run on our files
(``docs/results/interop.md``); SGLang, TensorRT-LLM and LMDeploy were not run.

Each format declares, for each engine, which rules apply (`Engine`). A rule returns "" for a layer that the engine can
load, or the reason why it cannot. `engine_verdicts` applies them to a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from quantforge.grids import PerGroup
from quantforge.scheme import LayerScheme, Scheme

Shape = tuple[int, int]
Rule = Callable[[Scheme, Shape], str]
InputRule = Callable[[LayerScheme], str]


@dataclass(frozen=True, slots=True)
class Engine:
    """Which files of one format an engine loads, and why not the others.

    Attributes:
        never: why it loads no file of the format; "" if it loads some.
        refuses: rules that every layer has to pass.
        inputs: rule about the quantization of inputs.
        mixture: why it does not load a model whose layers have different schemes.
        note: what to know where it loads a layer.
        notes: rules that return such notes.
        transposed: why it does not load families that store linears ``[in, out]``.
        experts: why it does not load packed experts that are stored one by one.
        kept_experts: why it does not load unquantized experts, stored one by one, beside packed layers.
        packed_experts: rule about the scheme of packed experts that are stored one by one.
        mixed_experts: why it does not load such experts with different schemes.
        unrolls: whether it loads experts one by one for families that publish them stacked.
        embedding: whether it loads a quantized embedding.
        decodes: whether it can be configured to decode weights on loading, for blocks that read weights directly.
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


# Rules


def bits_in(*widths: int) -> Rule:
    """Return a rule that allows only codes of these widths."""
    shown = " and ".join(map(str, widths))

    def rule(scheme: Scheme, _: Shape) -> str:
        return "" if scheme.bits in widths else f"kernels for {shown} bits only, not {scheme.bits}"

    return rule


def groups_in(*sizes: int, row: bool = True) -> Rule:
    """Return a rule that allows only these group sizes and, with ``row``, one scale per row."""
    shown = ", ".join(map(str, sizes)) + (" or one per row" if row else "")

    def rule(scheme: Scheme, shape: Shape) -> str:
        size = scheme.group_size(shape[1])
        by_row = row and not isinstance(scheme.granularity, PerGroup)
        return "" if by_row or size in sizes else f"groups of {shown} only, not {size}"

    return rule


def symmetric(reason: str) -> Rule:
    """Return a rule that allows only symmetric schemes, without zero points."""
    return lambda scheme, _: "" if scheme.symmetric else reason


def at_bits(width: int, answer: str) -> Rule:
    """Return a rule that gives the text ``answer`` for codes of one width."""
    return lambda scheme, _: answer if scheme.bits == width else ""


def tiles(out_features: int, in_features: int) -> Rule:
    """Return a rule that allows only shapes that are multiples of a kernel's tile."""

    def rule(_: Scheme, shape: Shape) -> str:
        if shape[0] % out_features == 0 and shape[1] % in_features == 0:
            return ""
        return (
            f"{shape[0]}x{shape[1]} is no multiple of {out_features}x{in_features} (old releases)"
        )

    return rule


def of_integers(*rules: Rule) -> tuple[Rule, ...]:
    """Return the same rules, applied to integer schemes only."""

    def limited(rule: Rule) -> Rule:
        return lambda scheme, shape: rule(scheme, shape) if scheme.integer else ""

    return tuple(limited(rule) for rule in rules)


def grid_in(grids: Iterable[str], answer: str) -> Rule:
    """Return a rule that gives the text ``answer`` for schemes with one of these grids."""
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
    """Return the table of engines for a format of directories, by engine name."""
    return {
        "transformers": transformers, "vllm": vllm, "sglang": sglang, "tensorrt-llm": tensorrt_llm,
        "lmdeploy": lmdeploy, "llama.cpp": llama_cpp, "mlx": mlx,
    }  # fmt: skip
