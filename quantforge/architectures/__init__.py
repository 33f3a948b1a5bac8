"""Architectures as data: one file per ``model_type``, found by its name.

A file declares the tensors of a checkpoint with their shapes in terms of the configuration, which linears read the
same activation, what can absorb a scale of that activation, and what may be absent or dropped. Nothing here runs a
model; planning, checking, folding and streaming are all driven by these declarations. Adding an architecture is one
file and one line in `MODEL_TYPES`.

In this folder:

    declare     Parts of which families compose their layers: linears, norms, and mixers of tokens and of channels
    dimensions  The sizes of a model, read from its configuration by every name that a family gives them, and checked
    gemma2      Gemma 2: norms multiply by 1 + w, four of them per block, soft-capped scores and logits, tied head
    gemma3      Gemma 3: gemma 2 without soft-capping, with norms over the heads of q and k
    generic     Matching without declarations: what is taken for a linear layer in a family that nobody described
    gpt2        GPT-2: LayerNorm with bias, learned positions, q, k, v in one Conv1D (stored ``[in, out]``), tied head
    gpt_oss     GPT-OSS: attention with sinks and biases, and experts that are stored stacked, ``[experts, in, out]``
    layer_kind  Kinds of layers as data: the tensors of one block, which of its linears read the same activation
    lfm2        LFM 2: short convolutions in most layers and attention in the others, a gated MLP in all
    llama       Llama 1 to 3: RMSNorm, rotary embeddings, grouped-query attention, gated MLP
    match       Every tensor of a checkpoint, matched to what its architecture declares: exactly once, or refused
    matched     A checkpoint, understood: every stored tensor with its place in the model
    mistral     Mistral: a llama without biases, with a sliding window
    mixtral     Mixtral: a mistral with experts, stored one by one under names of their own, in place of the MLP
    opt         OPT: LayerNorm with bias, learned positions (two rows of padding before the first), ReLU, tied head
    phi3        Phi 3, 3.5 and 4 (mini): a llama with q, k, v in one matrix and gate, up in another
    qwen2       Qwen 2 and 2.5: a llama whose q, k and v always have a bias, and o never
    qwen3       Qwen 3: a llama with an RMSNorm over each head of q and k, and an explicit head size
    qwen3_moe   Qwen 3 mixtures: a qwen3 in which most layers have experts, stored one by one, in place of the MLP
    routers     Routers of mixtures of experts, by what they are: the one matrix of a module with a row for every expert
    slots       Slots: every tensor that a family declares for one model, by its name in files
    smollm3     SmolLM 3: a llama that skips rotary embeddings in every fourth layer
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from quantforge.architectures.dimensions import Dimensions, dimensions_of
from quantforge.architectures.layer_kind import (
    Absorber,
    Absorbs,
    LayerKind,
    Parameter,
    Place,
    SharedInput,
    Stack,
)
from quantforge.errors import InputError

__all__ = [
    "MODEL_TYPES",
    "Absorber",
    "Absorbs",
    "Architecture",
    "LayerKind",
    "Parameter",
    "Place",
    "SharedInput",
    "Stack",
    "architecture_of",
    "matches",
    "required",
    "text_config",
]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything that the rest of QuantForge knows about one family of models.

    Attributes:
        model_type: the key in ``config.json``.
        blocks: name of the list of decoder blocks, e.g. ``model.layers``.
        outer: tensors outside of the blocks.
        kinds: the kinds of layers: the tensors of a block, and which of its linears read the same activation.
        kind_of: dotted path of a function that returns, for a (text) configuration, the name of each layer's kind;
            "" where there is one kind.
        embedding: module name of the token embedding; ``head`` of the output projection; ``final_norm`` the norm.
        prefixes: prefixes under which checkpoints store the canonical names; each is (stored, canonical).
        droppable: regular expressions (full match on the stored name) of tensors that are left out on purpose.
        optional: regular expressions of declared canonical names that may be absent.
        foreign: regular expressions (full match on the stored name) of tensors of another tower, kept as they are.
        unclipped: linears whose weights are never clipped by a search (queries and keys); ``module:label`` is a
            slice of a fused projection.
        requires: configuration values that the declarations rely on; anything else is refused.
        sizes: dimensions of the family's own, and where they stand: keys of the configuration, of which the first that
            is there counts, or the dotted path of a function of it. ``{"ffn": ...}`` overrides a common one.
        slices: rows of fused projections, e.g. ``{"self_attn.qkv_proj": ("q", "kv", "kv")}`` with their labels in
            ``slice_labels`` (``("q", "k", "v")``).
        transposed: linears are stored ``[in_features, out_features]`` (gpt2's Conv1D).
        defaults: configuration values of the family where ``config.json`` leaves a key out.
        float16: whether engines may compute the family in float16 (gemma overflows).
        text_config: key of the nested configuration of the text tower in multimodal checkpoints.
        fused_attention: whether scores have a fused kernel; soft-capped ones have none and are held twice.
    """

    model_type: str
    blocks: str
    outer: tuple[Parameter, ...]
    kinds: tuple[LayerKind, ...]
    embedding: str
    head: str
    final_norm: str
    prefixes: tuple[tuple[str, str], ...] = (("", ""),)
    droppable: tuple[str, ...] = (
        r".*rotary_emb\.inv_freq",
        r".*\.self_attn\.[kv]_scale",  # of a quantized KV cache, which this runtime does not read
    )
    optional: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    unclipped: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj")
    requires: Mapping[str, object] = field(default_factory=dict)
    slices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slice_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    transposed: bool = False
    float16: bool = True
    text_config: str = ""
    fused_attention: bool = True
    kind_of: str = ""
    sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the linears of all kinds of layers, in computing order."""
        return tuple(dict.fromkeys(name for kind in self.kinds for name in kind.linears))

    def dimensions(self, config: Mapping[str, Any]) -> Dimensions:
        """Read and check the sizes of a (text) configuration; errors as `dimensions_of`."""
        sizes = {
            name: _called(where[0], config) if "." in where[0] else where
            for name, where in self.sizes.items()
        }
        types = frozenset(kind.name for kind in self.kinds if kind.name)
        return dimensions_of(config, self.defaults, sizes, types)

    def layers(self, config: Mapping[str, Any], dimensions: Dimensions) -> tuple[LayerKind, ...]:
        """Return the kind of every layer of a model, with its experts written out.

        Raises:
            InputError: the configuration does not say of which kind every layer is.
        """
        if not self.kind_of:
            return (self.kinds[0].counted(dimensions),) * dimensions.layers
        kinds = {kind.name: kind for kind in self.kinds}
        names = tuple(_called(self.kind_of, config))
        if len(names) != dimensions.layers or not set(names) <= kinds.keys():
            raise InputError(
                f"config.json: the kinds of its {dimensions.layers} layers are {str(names)[:60]}",
                f"each of them {' or '.join(sorted(kinds))}",
            )
        counted = {name: kinds[name].counted(dimensions) for name in set(names)}
        return tuple(counted[name] for name in names)

    def rows(self, dimensions: Dimensions, linear: str, label: str) -> slice:
        """Return the rows of a slice of a fused linear (``"v"`` of a qkv projection); all rows for an empty label."""
        if not label:
            return slice(None)
        sizes = [dimensions.size(text) for text in self.slices[linear]]
        position = self.slice_labels[linear].index(label)
        return slice(sum(sizes[:position]), sum(sizes[: position + 1]))


# model_type -> module; several types may share one.
MODEL_TYPES: Mapping[str, str] = {
    "gemma2": "quantforge.architectures.gemma2",
    "gemma3": "quantforge.architectures.gemma3",
    "gemma3_text": "quantforge.architectures.gemma3",
    "gpt2": "quantforge.architectures.gpt2",
    "gpt_oss": "quantforge.architectures.gpt_oss",
    "lfm2": "quantforge.architectures.lfm2",
    "llama": "quantforge.architectures.llama",
    "mistral": "quantforge.architectures.mistral",
    "mixtral": "quantforge.architectures.mixtral",
    "opt": "quantforge.architectures.opt",
    "phi3": "quantforge.architectures.phi3",
    "qwen2": "quantforge.architectures.qwen2",
    "qwen3": "quantforge.architectures.qwen3",
    "qwen3_moe": "quantforge.architectures.qwen3_moe",
    "smollm3": "quantforge.architectures.smollm3",
}


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """Return the declarations for a configuration, or None for an unknown ``model_type``."""
    name = MODEL_TYPES.get(str(config.get("model_type", "")))
    if name is None:
        return None
    found: Architecture = import_module(name).ARCHITECTURE
    return found


def _called(path: str, config: Mapping[str, Any]) -> Any:
    """Call the function of the configuration at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)(config)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the text tower: the nested one of a multimodal model, or the whole."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def matches(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether any regular expression matches the whole name."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def required(config: Mapping[str, Any], architecture: Architecture) -> None:
    """Refuse configuration values that the declarations do not cover.

    Raises:
        InputError: naming the key, the value and what is supported.
    """
    for key, value in architecture.requires.items():
        if config.get(key, value) != value:
            raise InputError(
                f"config.json: {key} = {config[key]!r} is not supported for {architecture.model_type}",
                f"supported: {key} = {value!r}; --method rtn works without the architecture's declarations",
            )
