"""Verdicts: whether each engine loads a quantized model, and why not, by the rules of its format and by its family.

`_NOT_IN_TRANSFORMERS` lists the families whose quantized models transformers is known not to load. A plan consults this
list, because it runs no loader; `verify --for transformers` runs transformers' loader on headers
(`quantforge.model.transformers_loading`), whose answer about names and shapes wins. Where transformers is not known to
look for the names of tensors, a plan leaves the question open. Seen with transformers 5.23 on tiny models of every
family: the source loads, and what is quantized does not, or loads with layers left random. Formats of one file are
exempt: they have names of their own for every tensor. Experts that are stored one by one load in compressed-tensors and
in fp8 tiles (mixtral, qwen3_moe), but not from bitsandbytes. vLLM 0.32 compares the projections of a mixture's first
expert, and takes the others for alike. `engine_rules` names the versions of all engines.
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
from quantforge.formats.engine_rules import UNTRIED, Engine, Rule, Shape
from quantforge.plans import EngineVerdict
from quantforge.scheme import LayerScheme

TRANSFORMERS = "transformers"
_JOINED = "its loader takes tensors that it joins or cuts for quantized ones, and finds none"
_CONVERTED = f"{_JOINED}; --for transformers stores them as it runs them"
_CUT = "it cannot cut tensors of its tower on loading beside packed layers, nor builds its rules for that"
_SPLIT = "its loader shares the experts out to text and images on loading, which it cannot beside packed layers"
_UNROLLED = "its loader unrolls the experts, which are stored as one tensor"
_WEIGHT = "its blocks read the weights of their linears themselves"
_DECODED = f"{_WEIGHT}, so that these are decoded on loading: no memory is saved"
_TURNED_BACK = "its Conv1D layers take no packed weights, so that these are decoded on loading: no memory is saved"
TURNED = "the matrices of its Conv1D layers are stored for transformers to decode"
_BARE_INPUTS = "inputs stay as they are"
_ONE_SCHEME = "it decodes this family on loading, by the first scheme alone"
_TYPES = "its blocks mix float32 with the type of the packed layers"
_EMBEDDING = "transformers cannot load a quantized embedding, no other engine is known to; quantforge eval does"
_UNSTACKED = (
    "it knows the experts of this family stacked in one tensor, and these are stored one by one; quantforge eval and "
    "--format gguf know them, and --ignore '*experts*' leaves them as they are"
)
_OF_EAGLE3 = "as the draft model of EAGLE-3, from its change 28435 (2025-11) on; according to its source, not run"
_NOT_READ = "nothing says that it reads quantized draft heads; quantforge generate --draft does"
_NOT_READ_MIXED = (
    "it takes one scheme for all linears of draft heads, and no quantized head or embedding"
)
_ALIKE = (
    "it holds the experts of a mixture as one module, so that all of them are packed alike, or none"
)
_TURNED_ROWS = (
    "it reorders the rows of q and k of this family on loading, those of packed ones wrongly or not at all (vLLM: "
    "changes 34243, 34471 and 34997); --ignore '*self_attn*' leaves them as they are"
)
_UNDECLARED = "names of a family without declarations are not compared by a plan; verify --for transformers does"
_UNMAPPED = "transformers is not known to look for {}; verify --for transformers compares all names"
_OF_NAMES = frozenset({_CONVERTED, _CUT, _SPLIT, _UNROLLED})
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_STACK = re.compile(r"\bexperts\.[^\W\d]\w*$")
# Families whose experts engines take one by one beside packed layers, though their own files stack them. Seen with
# transformers, in the formats that say so (`Engine.unrolls`); of vLLM according to its source.
_LLAMA4 = ("llama4", "llama4_text")
_TURNS_ROWS = ("vllm", "sglang")  # engines that reorder rows of these families
_NOT_IN_TRANSFORMERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("bailing_hybrid", "glm5_next", "glm5_next_text", "hrm_text", "inkling_mm_model", "kimi_linear",
         "minimax_m3_vl", "molmo2", "olmo_hybrid", "step3p7"), _CONVERTED),
    "qianfan_ocr": _CUT,
    **dict.fromkeys(("ernie4_5_vl_moe", "ernie4_5_vl_moe_text"), _SPLIT),
    **dict.fromkeys(_LLAMA4, _UNROLLED),
    **dict.fromkeys(
        ("blt", "falcon", "falcon_mamba", "gpt_bigcode", "kosmos-2", "mamba", "mamba2", "modernbert-decoder",
         "nanochat", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"), _WEIGHT),
    "longcat_flash": _TYPES,
}  # fmt: skip


@dataclass(frozen=True)
class ModelToLoad:
    """Facts about a quantized model that decide whether an engine loads it.

    Attributes:
        layers: scheme and shape of each quantized module, by name.
        model_types: ``model_type`` of the text model and of the whole model.
        transposed: whether its family stores linears ``[in, out]``.
        turned: whether files hold the codes of these linears ``[in, out]`` too.
        embedding: whether the embedding is quantized.
        kept: names of the tensors that are not quantized.
        unstacked: whether experts are stored one by one although the family publishes them in one tensor.
        running: whether tensors that transformers joins or cuts on loading are stored as it runs them.
        unmapped: why it is unknown whether transformers finds its tensors by their names, as returned by `unmapped`.
        compared: whether transformers' own loader has compared names and shapes; then the list of families is ignored.
        draft: the kind of draft heads that it is; "" for a model.
    """

    layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]
    model_types: tuple[str, ...]
    transposed: bool = False
    turned: bool = False
    embedding: bool = False
    kept: tuple[str, ...] = ()
    unstacked: bool = False
    running: bool = False
    unmapped: str = ""
    compared: bool = False
    draft: str = ""

    @cached_property
    def experts(self) -> tuple[LayerScheme, ...]:
        """Return the distinct schemes of unstacked experts."""
        found = (layer for module, (layer, _) in self.layers.items() if _EXPERT.search(module))
        return tuple(dict.fromkeys(found))

    @cached_property
    def kept_experts(self) -> bool:
        """Return whether any unstacked experts are not quantized."""
        return any(_EXPERT.search(name) for name in self.kept)

    def among(self, families: tuple[str, ...]) -> bool:
        """Return whether the text model or the whole model belongs to one of these families."""
        return any(name in families for name in self.model_types)

    @cached_property
    def divided_mixtures(self) -> bool:
        """Return whether unstacked experts of one MoE layer differ in scheme, or only some are quantized."""
        packed = ((module, layer) for module, (layer, _) in self.layers.items())
        bare = ((name, None) for name in self.kept if name.endswith(".weight"))
        ways: dict[str, set[LayerScheme | None]] = {}
        for name, way in (*packed, *bare):
            if found := _EXPERT.search(name):
                ways.setdefault(name[: found.start()], set()).add(way)
        return any(len(found) > 1 for found in ways.values())


def unmapped(
    architecture: Architecture | None, config: Mapping[str, Any], names: Iterable[str]
) -> str:
    """Return why it is unknown whether transformers finds tensors by their names; "" if it does find them.

    Args:
        architecture: the declarations, written or derived; None where there are none.
        config: of the whole model.
        names: of its tensors in files.
    """
    if architecture is None:
        return _UNDECLARED
    pattern = architecture.unmapped_prefixes.get(str(config.get("model_type")))
    if pattern is None or architecture.derivation is not None:
        return ""
    lost = next((name for name in names if re.match(pattern, name)), "")
    return _UNMAPPED.format(lost) if lost else ""


def engine_verdicts(about: FormatInfo, model: ModelToLoad) -> tuple[EngineVerdict, ...]:
    """Return for each engine whether it loads a model in a format."""
    found = layer_verdicts(about.engines, model.layers.values())
    if model.draft:
        return tuple(_of_draft(verdict, model) for verdict in found)
    if about.is_single_file:
        return found
    if model.layers:
        found = tuple(_of_model(verdict, about.engines[verdict.engine], model) for verdict in found)
    elif model.unstacked and model.kept_experts:
        return tuple(EngineVerdict(verdict.engine, False, _UNSTACKED) for verdict in found)
    if model.compared or not model.unmapped:
        return found
    return tuple(
        EngineVerdict(TRANSFORMERS, None, _joined(model.unmapped, verdict.reason), verdict.reason)
        if verdict.engine == TRANSFORMERS and verdict.loads
        else verdict
        for verdict in found
    )


def _joined(*reasons: str) -> str:
    """Return reasons as one text, each once, without empty ones."""
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def layer_verdicts(
    engines: Mapping[str, Engine], layers: Iterable[tuple[LayerScheme, Shape]]
) -> tuple[EngineVerdict, ...]:
    """Return for each engine whether it loads the layers of a model, by the rules of a format."""
    distinct = list(dict.fromkeys(layers))
    return tuple(_layer_verdict(name, engine, distinct) for name, engine in engines.items())


def _layer_verdict(
    name: str, engine: Engine, layers: list[tuple[LayerScheme, Shape]]
) -> EngineVerdict:
    weights = list(dict.fromkeys((layer.weight, shape) for layer, shape in layers))

    def answers(rules: Iterable[Rule]) -> list[str]:
        return [rule(scheme, shape) for rule in rules for scheme, shape in weights]

    inputs = _joined(*(engine.inputs(layer) for layer, _ in layers))
    mixed = engine.mixture if len({layer for layer, _ in layers}) > 1 else ""
    if reasons := _joined(engine.never, *answers(engine.refuses)) or inputs or mixed:
        return EngineVerdict(name, False, reasons)
    return EngineVerdict(name, True, _joined(engine.note, *answers(engine.notes)))


def reads_weights(*model_types: str) -> bool:
    """Return whether one of these is a family whose blocks read weights directly and so take no packed linears."""
    return any(_NOT_IN_TRANSFORMERS.get(name) == _WEIGHT for name in model_types)


def _of_model(verdict: EngineVerdict, engine: Engine, model: ModelToLoad) -> EngineVerdict:
    if model.turned and not engine.decodes:
        return EngineVerdict(verdict.engine, False, TURNED)
    if model.transposed and engine.transposed and not model.turned:
        return EngineVerdict(verdict.engine, False, engine.transposed)
    if not verdict.loads:
        return verdict
    decoded = engine.decodes and (model.turned or reads_weights(*model.model_types))
    llama4, of_vllm = model.among(_LLAMA4), verdict.engine == "vllm"
    unrolls = engine.unrolls and llama4
    rotated = any(module.endswith((".q_proj", ".k_proj")) for module in model.layers)
    turns = rotated and llama4 and verdict.engine in _TURNS_ROWS
    of_family = _family(model, unrolls=unrolls) if verdict.engine == TRANSFORMERS else ""
    obstacles = (
        _one_scheme(model) if decoded else of_family,
        _EMBEDDING if model.embedding and not engine.embedding else "",
        _TURNED_ROWS if turns else "",
        *(() if unrolls else _of_experts(engine, model)),
        _ALIKE if of_vllm and model.divided_mixtures else "",
    )
    if reason := next(filter(None, obstacles), ""):
        return EngineVerdict(verdict.engine, False, reason)
    if unrolls and model.experts and of_vllm:
        return EngineVerdict(verdict.engine, True, _joined(verdict.reason, UNTRIED))
    if not decoded:
        return verdict
    inputs = any(layer.input is not None for layer, _ in model.layers.values())
    why = _TURNED_BACK if model.turned else _DECODED
    said = _joined(verdict.reason, why, _BARE_INPUTS if inputs else "")
    return EngineVerdict(verdict.engine, True, said)


def _of_experts(engine: Engine, model: ModelToLoad) -> Iterator[str]:
    """Yield why an engine does not load the unstacked experts of a model, "" for each rule it meets."""
    if model.experts:
        yield engine.experts
        yield _UNSTACKED if model.unstacked else ""
    yield engine.mixed_experts if len(model.experts) > 1 else ""
    yield from map(engine.packed_experts, model.experts)
    yield engine.kept_experts if model.kept_experts else ""


def _of_draft(verdict: EngineVerdict, model: ModelToLoad) -> EngineVerdict:
    if (verdict.engine, model.draft) != ("vllm", EAGLE3):
        return EngineVerdict(verdict.engine, False, _NOT_READ)
    outside = any(module.endswith(("lm_head", "embed_tokens")) for module in model.layers)
    if verdict.loads and (_one_scheme(model) or outside):
        return EngineVerdict(verdict.engine, False, _NOT_READ_MIXED)
    said = _joined(verdict.reason, _OF_EAGLE3 if verdict.loads else "")
    return EngineVerdict(verdict.engine, verdict.loads, said)


def converts(config: Mapping[str, Any]) -> bool:
    """Return whether transformers joins or splits tensors of a family on loading, impossible for packed weights."""
    types = (text_config(config).get("model_type"), config.get("model_type"))
    return any(_NOT_IN_TRANSFORMERS.get(str(name)) == _CONVERTED for name in types)


def _one_scheme(model: ModelToLoad) -> str:
    return _ONE_SCHEME if len({layer for layer, _ in model.layers.values()}) > 1 else ""


def _family(model: ModelToLoad, *, unrolls: bool) -> str:
    """Return why transformers does not load the family of a model, "" if it does."""
    family = next((name for name in model.model_types if name in _NOT_IN_TRANSFORMERS), "")
    reason = _NOT_IN_TRANSFORMERS.get(family, "")
    settled = (model.running and reason == _CONVERTED) or (model.compared and reason in _OF_NAMES)
    if not reason or settled or (unrolls and not any(map(_STACK.search, model.kept))):
        return ""
    return f"{family} does not load: {reason}"
