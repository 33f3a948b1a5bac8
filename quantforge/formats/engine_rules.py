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
    """Which quantized layers of one format an engine loads, and why not the others.

    Attributes:
        unsupported_reason: why it loads no file of the format; "" if it loads some.
        layer_rules: rules that every layer must pass.
        input_rule: rule about the quantization of inputs.
        mixed_schemes_reason: why it does not load a model whose layers have different schemes.
        note: a note for users whose layers it loads.
        note_rules: rules that return such notes.
        transposed_reason: why it does not load families that store linears ``[in, out]``.
        unstacked_experts_reason: why it does not load packed experts that are separate tensors.
        unquantized_experts_reason: why it does not load unquantized separate experts together with packed layers.
        expert_rule: rule about the scheme of packed experts that are separate tensors.
        mixed_experts_reason: why it does not load such experts with different schemes.
        loads_unstacked_experts: whether it loads separate experts for families that publish them stacked.
        loads_embedding: whether it loads a quantized embedding.
        can_decode: whether it can be configured to decode weights on loading, for blocks that read weights directly.
    """

    unsupported_reason: str = ""
    layer_rules: tuple[Rule, ...] = ()
    input_rule: InputRule = lambda _: ""
    mixed_schemes_reason: str = ""
    note: str = ""
    note_rules: tuple[Rule, ...] = ()
    transposed_reason: str = ""
    unstacked_experts_reason: str = ""
    unquantized_experts_reason: str = ""
    expert_rule: InputRule = lambda _: ""
    mixed_experts_reason: str = ""
    loads_unstacked_experts: bool = False
    loads_embedding: bool = False
    can_decode: bool = False


# Rules


def require_bits(*widths: int) -> Rule:
    """Return a rule that allows only codes of these widths."""
    width_text = " and ".join(map(str, widths))

    def rule(scheme: Scheme, _: Shape) -> str:
        return (
            ""
            if scheme.bits in widths
            else f"kernels for {width_text} bits only, not {scheme.bits}"
        )

    return rule


def require_group_sizes(*sizes: int, row: bool = True) -> Rule:
    """Return a rule that allows only these group sizes and, with ``row``, one scale per row."""
    size_text = ", ".join(map(str, sizes)) + (" or one per row" if row else "")

    def rule(scheme: Scheme, shape: Shape) -> str:
        size = scheme.group_size(shape[1])
        by_row = row and not isinstance(scheme.granularity, PerGroup)
        return "" if by_row or size in sizes else f"groups of {size_text} only, not {size}"

    return rule


def require_symmetric(reason: str) -> Rule:
    """Return a rule that allows only symmetric schemes, without zero points."""
    return lambda scheme, _: "" if scheme.symmetric else reason


def message_at_bits(width: int, message: str) -> Rule:
    """Return a rule that gives a message for codes of one width."""
    return lambda scheme, _: message if scheme.bits == width else ""


def require_tile_multiples(out_features: int, in_features: int) -> Rule:
    """Return a rule that allows only shapes that are multiples of a kernel's tile."""

    def rule(_: Scheme, shape: Shape) -> str:
        if shape[0] % out_features == 0 and shape[1] % in_features == 0:
            return ""
        return (
            f"{shape[0]}x{shape[1]} is no multiple of {out_features}x{in_features} (old releases)"
        )

    return rule


def for_integers_only(*rules: Rule) -> tuple[Rule, ...]:
    """Return the same rules, limited to integer schemes."""

    def apply_to_integers(rule: Rule) -> Rule:
        return lambda scheme, shape: rule(scheme, shape) if scheme.integer else ""

    return tuple(apply_to_integers(rule) for rule in rules)


def message_for_grids(grids: Iterable[str], message: str) -> Rule:
    """Return a rule that gives a message for schemes with one of these grids."""
    grid_set = frozenset(grids)
    return lambda scheme, _: message if scheme.grid in grid_set else ""


GGUF_ONLY = Engine(unsupported_reason="reads GGUF files only")
MODELOPT = Engine(unsupported_reason="reads this format through a ModelOpt configuration only")
GROUPS_OR_ROW = require_group_sizes(32, 64, 128)
GROUPS_ONLY = require_group_sizes(32, 64, 128, row=False)
MARLIN_RULES = (
    require_tile_multiples(64, 128),
    message_at_bits(8, "8-bit kernels run on a GPU only"),
)
NOT_RUN = "according to its source, not run"
# Rules of LMDeploy
TURBOMIND = Engine(layer_rules=(require_bits(4), require_group_sizes(128, row=False)), note=NOT_RUN)


def engine_table(
    *, transformers: Engine, vllm: Engine, sglang: Engine, tensorrt_llm: Engine, lmdeploy: Engine, mlx: Engine,
    llama_cpp: Engine = GGUF_ONLY,
) -> Mapping[str, Engine]:  # fmt: skip
    """Return the table of engines for a format whose results are directories, by engine name."""
    return {
        "transformers": transformers, "vllm": vllm, "sglang": sglang, "tensorrt-llm": tensorrt_llm,
        "lmdeploy": lmdeploy, "llama.cpp": llama_cpp, "mlx": mlx,
    }  # fmt: skip
