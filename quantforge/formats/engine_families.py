"""Engines and families: which engine loads a quantized model, by its layers, by its family, by how that stores them.

`HOW` is the one list of families whose artifacts are known not to load, until loaders and writers agree about them.
Seen with transformers 5.23 on tiny models of every family: the source loads, what is quantized does not, or loads with
layers left random. A format of one file is not meant: it has names of its own for every tensor. Experts that are stored
one by one load in compressed-tensors and in fp8 tiles (mixtral, qwen3_moe), and not packed by bitsandbytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quantforge.formats import About
from quantforge.formats.engines import Engine, verdicts
from quantforge.plans import EngineVerdict
from quantforge.scheme import LayerScheme

_RENAMED = "it looks for layers under the names of the running model, and leaves them random"
_UNROLLED = "its loader unrolls the experts, which are stored as one tensor"
_WEIGHT = "its blocks read the weights of their linears themselves"
_TYPES = "its blocks mix float32 with the type of the packed layers"
_EMBEDDING = "transformers cannot load a quantized embedding, no other engine is known to; quantforge eval does"
_EXPERT = re.compile(r"\bexperts\.\d+\.")
HOW: Mapping[str, Mapping[str, str]] = {
    "transformers": {
        "phimoe": _RENAMED, "deepseek_v4": _RENAMED, "kimi_k25": _RENAMED, "kimi_linear": _RENAMED, "step3p7": _RENAMED,
        "llama4": _UNROLLED, "llama4_text": _UNROLLED, "mistral_large4": _UNROLLED,
        "mamba": _WEIGHT, "mamba2": _WEIGHT, "zamba": _WEIGHT, "zamba2": _WEIGHT, "falcon": _WEIGHT, "rwkv": _WEIGHT,
        "xlstm": _WEIGHT, "recurrent_gemma": _WEIGHT, "longcat_flash": _TYPES,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelToLoad:
    """Facts of a quantized model on which it depends whether an engine loads it.

    Attributes:
        layers: scheme and shape of each module that is quantized, by name.
        model_types: of the text model and of the whole.
        transposed: whether its family stores linears ``[in, out]``.
        embedding: whether the embedding is quantized.
        kept: names of the tensors that stay as they are.
    """

    layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]
    model_types: tuple[str, ...]
    transposed: bool = False
    embedding: bool = False
    kept: tuple[str, ...] = ()

    @property
    def experts(self) -> tuple[LayerScheme, ...]:
        """Return the distinct schemes of experts that are stored one by one."""
        found = (layer for module, (layer, _) in self.layers.items() if _EXPERT.search(module))
        return tuple(dict.fromkeys(found))

    @property
    def kept_experts(self) -> bool:
        """Return whether experts that are stored one by one stay as they are."""
        return any(_EXPERT.search(name) for name in self.kept)


def judged(about: About, model: ModelToLoad) -> tuple[EngineVerdict, ...]:
    """Return which engines load a model in a format, and why another would not."""
    found = verdicts(about.engines, model.layers.values())
    if about.one_file or not model.layers:
        return found
    return tuple(_judged(verdict, about.engines[verdict.engine], model) for verdict in found)


def computes_itself(*model_types: str) -> str:
    """Return the family among these whose blocks take no packed linears, "" for none."""
    reasons = HOW["transformers"]
    return next((name for name in model_types if reasons.get(name) == _WEIGHT), "")


def _judged(verdict: EngineVerdict, engine: Engine, model: ModelToLoad) -> EngineVerdict:
    if model.transposed and engine.transposed:
        return EngineVerdict(verdict.engine, False, engine.transposed)
    if not verdict.loads:
        return verdict
    obstacles = (
        _family(verdict.engine, model.model_types),
        _EMBEDDING if model.embedding and not engine.embedding else "",
        engine.experts if model.experts else "",
        engine.mixed_experts if len(model.experts) > 1 else "",
        *map(engine.packed_experts, model.experts),
        engine.kept_experts if model.kept_experts else "",
    )
    reason = next(filter(None, obstacles), "")
    return EngineVerdict(verdict.engine, False, reason) if reason else verdict


def _family(engine: str, model_types: Iterable[str]) -> str:
    reasons = HOW.get(engine, {})
    family = next((name for name in model_types if name in reasons), "")
    return f"{family} does not load: {reasons[family]}" if family else ""
