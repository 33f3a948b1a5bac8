"""Verdicts: whether each engine loads a quantized model, and why not, by the rules of its format and by its family.

`_NOT_IN_TRANSFORMERS` lists the families whose quantized models transformers is known not to load. A plan uses this
list, because it runs no loader; `verify --for transformers` runs transformers' loader on headers
(`quantforge.model.transformers_loading`), whose result about names and shapes takes precedence. If it is unknown
whether transformers looks for the names of tensors, a plan leaves the question open. The list is from transformers 5.23
with tiny models of every family: the source loads, but the quantized model does not, or some layers are initialized at
random. Formats of one file are exempt: they have their own names for every tensor. Separate experts load in
compressed-tensors and in fp8 tiles (mixtral, qwen3_moe), but not from bitsandbytes. vLLM 0.32 compares the projections
of an MoE layer's first expert, and assumes that the others are the same. `engine_rules` has the versions of all
engines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quantforge.architectures import Architecture, text_config
from quantforge.architectures.draft_heads import EAGLE3
from quantforge.formats import FormatInfo
from quantforge.formats.engine_rules import NOT_RUN, Engine, Rule, Shape
from quantforge.plans import EngineVerdict
from quantforge.scheme import LayerScheme

TRANSFORMERS = "transformers"
_JOINS_TENSORS = "its loader takes tensors that it joins or cuts for quantized ones, and finds none"
_CONVERTS_TENSORS = f"{_JOINS_TENSORS}; --for transformers stores them as it runs them"
_CUTS_TOWER = "it cannot cut tensors of its tower on loading beside packed layers, nor builds its rules for that"
_SPLITS_EXPERTS = (
    "its loader shares the experts out to text and images on loading, which it cannot "
    "beside packed layers"
)
_UNROLLS_EXPERTS = "its loader unrolls the experts, which are stored as one tensor"
_READS_WEIGHTS = "its blocks read the weights of their linears themselves"
_DECODES_ON_LOADING = f"{_READS_WEIGHTS}, so that these are decoded on loading: no memory is saved"
_DECODES_CONV1D = "its Conv1D layers take no packed weights, so that these are decoded on loading: no memory is saved"
TRANSPOSED_CODES = "the matrices of its Conv1D layers are stored for transformers to decode"
_UNQUANTIZED_INPUTS = "inputs stay as they are"
_TAKES_ONE_SCHEME = "it decodes this family on loading, by the first scheme alone"
_MIXES_TYPES = "its blocks mix float32 with the type of the packed layers"
_QUANTIZED_EMBEDDING = (
    "transformers cannot load a quantized embedding, no other engine is known to; "
    "quantforge eval does"
)
_UNSTACKED_EXPERTS = (
    "it knows the experts of this family stacked in one tensor, and these are stored one by one; quantforge eval and "
    "--format gguf know them, and --ignore '*experts*' leaves them as they are"
)
_EAGLE3_NOTE = "as the draft model of EAGLE-3, from its change 28435 (2025-11) on; according to its source, not run"
_NO_DRAFT_HEADS = (
    "nothing says that it reads quantized draft heads; quantforge generate --draft does"
)
_NO_MIXED_DRAFT_HEADS = (
    "it takes one scheme for all linears of draft heads, and no quantized head or embedding"
)
_EXPERTS_PACKED_ALIKE = (
    "it holds the experts of a mixture as one module, so that all of them are packed alike, or none"
)
_REORDERS_QK_ROWS = (
    "it reorders the rows of q and k of this family on loading, those of packed ones wrongly or not at all (vLLM: "
    "changes 34243, 34471 and 34997); --ignore '*self_attn*' leaves them as they are"
)
_UNDECLARED = "names of a family without declarations are not compared by a plan; verify --for transformers does"
_UNMAPPED = "transformers is not known to look for {}; verify --for transformers compares all names"
_NAME_OBSTACLES = frozenset({_CONVERTS_TENSORS, _CUTS_TOWER, _SPLITS_EXPERTS, _UNROLLS_EXPERTS})
_EXPERT_MODULE = re.compile(r"\bexperts\.\d+\.")
_STACKED_EXPERTS = re.compile(r"\bexperts\.[^\W\d]\w*$")
# Families whose experts engines take one by one beside packed layers, though their own files stack them. Seen with
# transformers, in the formats that say so (`Engine.loads_unstacked_experts`); of vLLM according to its source.
_LLAMA4_TYPES = ("llama4", "llama4_text")
_QK_REORDERING_ENGINES = ("vllm", "sglang")  # engines that reorder rows of these families
_NOT_IN_TRANSFORMERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("bailing_hybrid", "glm5_next", "glm5_next_text", "hrm_text", "inkling_mm_model", "kimi_linear",
         "minimax_m3_vl", "molmo2", "olmo_hybrid", "step3p7"), _CONVERTS_TENSORS),
    "qianfan_ocr": _CUTS_TOWER,
    **dict.fromkeys(("ernie4_5_vl_moe", "ernie4_5_vl_moe_text"), _SPLITS_EXPERTS),
    **dict.fromkeys(_LLAMA4_TYPES, _UNROLLS_EXPERTS),
    **dict.fromkeys(
        ("blt", "falcon", "falcon_mamba", "gpt_bigcode", "kosmos-2", "mamba", "mamba2", "modernbert-decoder",
         "nanochat", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"), _READS_WEIGHTS),
    "longcat_flash": _MIXES_TYPES,
}  # fmt: skip


@dataclass(frozen=True)
class ModelToLoad:
    """Facts about a quantized model that decide whether an engine loads it.

    Attributes:
        layers: scheme and shape of each quantized module, by name.
        model_types: ``model_type`` of the text model and of the whole model.
        transposed: whether its family stores linears ``[in, out]``.
        transposed_codes: whether files hold the codes of these linears ``[in, out]`` as well.
        quantized_embedding: whether the embedding is quantized.
        unquantized: names of the tensors that are not quantized.
        unstacked_experts: whether experts are separate tensors although the family publishes them stacked.
        running_layout: whether tensors that transformers joins or splits on loading are stored as it runs them.
        unmapped_reason: why it is unknown whether transformers finds its tensors by their names; see `unmapped_reason`.
        names_compared: whether transformers' own loader has compared names and shapes; then the list of families is
            ignored.
        draft_kind: the kind of draft heads if it is not a full model; "" for a full model.
    """

    layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]
    model_types: tuple[str, ...]
    transposed: bool = False
    transposed_codes: bool = False
    quantized_embedding: bool = False
    unquantized: tuple[str, ...] = ()
    unstacked_experts: bool = False
    running_layout: bool = False
    unmapped_reason: str = ""
    names_compared: bool = False
    draft_kind: str = ""

    @cached_property
    def expert_schemes(self) -> tuple[LayerScheme, ...]:
        """Return the distinct schemes of unstacked experts."""
        schemes = (
            layer for module, (layer, _) in self.layers.items() if _EXPERT_MODULE.search(module)
        )
        return tuple(dict.fromkeys(schemes))

    @cached_property
    def has_unquantized_experts(self) -> bool:
        """Return whether any unstacked experts are not quantized."""
        return any(_EXPERT_MODULE.search(name) for name in self.unquantized)

    def is_any_family(self, families: tuple[str, ...]) -> bool:
        """Return whether the text model or the whole model belongs to one of these families."""
        return any(name in families for name in self.model_types)

    @cached_property
    def has_mixed_experts(self) -> bool:
        """Return whether unstacked experts of one MoE layer differ in scheme, or only some are quantized."""
        packed_layers = ((module, layer) for module, (layer, _) in self.layers.items())
        unquantized_weights = (
            (name, None) for name in self.unquantized if name.endswith(".weight")
        )
        schemes_by_mixture: dict[str, set[LayerScheme | None]] = {}
        for name, scheme in (*packed_layers, *unquantized_weights):
            if match := _EXPERT_MODULE.search(name):
                schemes_by_mixture.setdefault(name[: match.start()], set()).add(scheme)
        return any(len(match) > 1 for match in schemes_by_mixture.values())


def unmapped_reason(
    architecture: Architecture | None, config: Mapping[str, Any], names: Iterable[str]
) -> str:
    """Return why it is unknown whether transformers finds tensors by their names; "" if it does find them.

    Args:
        architecture: the declarations, written or derived; None if there are none.
        config: configuration of the whole model.
        names: stored names of its tensors.
    """
    if architecture is None:
        return _UNDECLARED
    pattern = architecture.unmapped_prefixes.get(str(config.get("model_type")))
    if pattern is None or architecture.derivation is not None:
        return ""
    unmapped_name = next((name for name in names if re.match(pattern, name)), "")
    return _UNMAPPED.format(unmapped_name) if unmapped_name else ""


def engine_verdicts(format_info: FormatInfo, model: ModelToLoad) -> tuple[EngineVerdict, ...]:
    """Return whether each engine loads a model in a format."""
    verdicts = layer_verdicts(format_info.engines, model.layers.values())
    if model.draft_kind:
        return tuple(_draft_verdict(verdict, model) for verdict in verdicts)
    if format_info.is_single_file:
        return verdicts
    if model.layers:
        verdicts = tuple(
            _model_verdict(verdict, format_info.engines[verdict.engine], model)
            for verdict in verdicts
        )
    elif model.unstacked_experts and model.has_unquantized_experts:
        return tuple(
            EngineVerdict(verdict.engine, False, _UNSTACKED_EXPERTS) for verdict in verdicts
        )
    if model.names_compared or not model.unmapped_reason:
        return verdicts
    return tuple(
        EngineVerdict(
            TRANSFORMERS, None, _join_reasons(model.unmapped_reason, verdict.reason), verdict.reason
        )
        if verdict.engine == TRANSFORMERS and verdict.loads
        else verdict
        for verdict in verdicts
    )


def _join_reasons(*reasons: str) -> str:
    """Join reasons to one text, each once, without empty ones."""
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def layer_verdicts(
    engines: Mapping[str, Engine], layers: Iterable[tuple[LayerScheme, Shape]]
) -> tuple[EngineVerdict, ...]:
    """Return whether each engine loads the layers of a model, by the rules of a format."""
    distinct = list(dict.fromkeys(layers))
    return tuple(_layer_verdict(name, engine, distinct) for name, engine in engines.items())


def _layer_verdict(
    name: str, engine: Engine, layers: list[tuple[LayerScheme, Shape]]
) -> EngineVerdict:
    weights = list(dict.fromkeys((layer.weight, shape) for layer, shape in layers))

    def apply_rules(rules: Iterable[Rule]) -> list[str]:
        return [rule(scheme, shape) for rule in rules for scheme, shape in weights]

    input_reasons = _join_reasons(*(engine.input_rule(layer) for layer, _ in layers))
    mixed_reason = engine.mixed_schemes_reason if len({layer for layer, _ in layers}) > 1 else ""
    if (
        reasons := _join_reasons(engine.unsupported_reason, *apply_rules(engine.layer_rules))
        or input_reasons
        or mixed_reason
    ):
        return EngineVerdict(name, False, reasons)
    return EngineVerdict(name, True, _join_reasons(engine.note, *apply_rules(engine.note_rules)))


def blocks_read_weights(*model_types: str) -> bool:
    """Return whether the blocks of one of these families read weights directly, so that linears cannot be packed."""
    return any(_NOT_IN_TRANSFORMERS.get(name) == _READS_WEIGHTS for name in model_types)


def _model_verdict(verdict: EngineVerdict, engine: Engine, model: ModelToLoad) -> EngineVerdict:
    if model.transposed_codes and not engine.can_decode:
        return EngineVerdict(verdict.engine, False, TRANSPOSED_CODES)
    if model.transposed and engine.transposed_reason and not model.transposed_codes:
        return EngineVerdict(verdict.engine, False, engine.transposed_reason)
    if not verdict.loads:
        return verdict
    is_decoded = engine.can_decode and (
        model.transposed_codes or blocks_read_weights(*model.model_types)
    )
    is_llama4, is_vllm = model.is_any_family(_LLAMA4_TYPES), verdict.engine == "vllm"
    loads_unstacked = engine.loads_unstacked_experts and is_llama4
    has_qk = any(module.endswith((".q_proj", ".k_proj")) for module in model.layers)
    reorders_qk = has_qk and is_llama4 and verdict.engine in _QK_REORDERING_ENGINES
    family_reason = (
        _family_reason(model, loads_unstacked=loads_unstacked)
        if verdict.engine == TRANSFORMERS
        else ""
    )
    obstacles = (
        _mixed_schemes_reason(model) if is_decoded else family_reason,
        _QUANTIZED_EMBEDDING if model.quantized_embedding and not engine.loads_embedding else "",
        _REORDERS_QK_ROWS if reorders_qk else "",
        *(() if loads_unstacked else _expert_obstacles(engine, model)),
        _EXPERTS_PACKED_ALIKE if is_vllm and model.has_mixed_experts else "",
    )
    if reason := next(filter(None, obstacles), ""):
        return EngineVerdict(verdict.engine, False, reason)
    if loads_unstacked and model.expert_schemes and is_vllm:
        return EngineVerdict(verdict.engine, True, _join_reasons(verdict.reason, NOT_RUN))
    if not is_decoded:
        return verdict
    has_quantized_inputs = any(layer.input is not None for layer, _ in model.layers.values())
    decoding_note = _DECODES_CONV1D if model.transposed_codes else _DECODES_ON_LOADING
    notes = _join_reasons(
        verdict.reason, decoding_note, _UNQUANTIZED_INPUTS if has_quantized_inputs else ""
    )
    return EngineVerdict(verdict.engine, True, notes)


def _expert_obstacles(engine: Engine, model: ModelToLoad) -> Iterator[str]:
    """Yield why an engine does not load the unstacked experts of a model, "" for each rule that is met."""
    if model.expert_schemes:
        yield engine.unstacked_experts_reason
        yield _UNSTACKED_EXPERTS if model.unstacked_experts else ""
    yield engine.mixed_experts_reason if len(model.expert_schemes) > 1 else ""
    yield from map(engine.expert_rule, model.expert_schemes)
    yield engine.unquantized_experts_reason if model.has_unquantized_experts else ""


def _draft_verdict(verdict: EngineVerdict, model: ModelToLoad) -> EngineVerdict:
    if (verdict.engine, model.draft_kind) != ("vllm", EAGLE3):
        return EngineVerdict(verdict.engine, False, _NO_DRAFT_HEADS)
    has_head_or_embedding = any(
        module.endswith(("lm_head", "embed_tokens")) for module in model.layers
    )
    if verdict.loads and (_mixed_schemes_reason(model) or has_head_or_embedding):
        return EngineVerdict(verdict.engine, False, _NO_MIXED_DRAFT_HEADS)
    notes = _join_reasons(verdict.reason, _EAGLE3_NOTE if verdict.loads else "")
    return EngineVerdict(verdict.engine, verdict.loads, notes)


def needs_conversion(config: Mapping[str, Any]) -> bool:
    """Return whether transformers joins or splits a family's tensors on loading, impossible for packed weights."""
    types = (text_config(config).get("model_type"), config.get("model_type"))
    return any(_NOT_IN_TRANSFORMERS.get(str(name)) == _CONVERTS_TENSORS for name in types)


def _mixed_schemes_reason(model: ModelToLoad) -> str:
    return _TAKES_ONE_SCHEME if len({layer for layer, _ in model.layers.values()}) > 1 else ""


def _family_reason(model: ModelToLoad, *, loads_unstacked: bool) -> str:
    """Return why transformers does not load the family of a model, "" if it does."""
    family = next((name for name in model.model_types if name in _NOT_IN_TRANSFORMERS), "")
    reason = _NOT_IN_TRANSFORMERS.get(family, "")
    is_resolved = (model.running_layout and reason == _CONVERTS_TENSORS) or (
        model.names_compared and reason in _NAME_OBSTACLES
    )
    if (
        not reason
        or is_resolved
        or (loads_unstacked and not any(map(_STACKED_EXPERTS.search, model.unquantized)))
    ):
        return ""
    return f"{family} does not load: {reason}"
