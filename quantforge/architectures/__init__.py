"""Architectures as data: one file per ``model_type``, found by its name.

A file declares the tensors of a checkpoint with their shapes in terms of the configuration, which linears read the
same activation, what can absorb a scale of that activation, and what may be absent or dropped. Nothing here runs a
model; planning, checking, folding and streaming are all driven by these declarations. Adding an architecture is one
file and one line in `MODEL_TYPES`.

In this folder:

    declare     Shorthand for the declarations: a linear with its bias, and the shared inputs of a gated decoder block
    dimensions  The sizes of a model, read from its configuration by every name that a family gives them, and checked
    gemma2      Gemma 2: norms multiply by 1 + w, four of them per block, soft-capped scores and logits, tied head
    gemma3      Gemma 3: gemma 2 without soft-capping, with norms over the heads of q and k
    generic     Matching without declarations: what is taken for a linear layer in a family that nobody described
    gpt2        GPT-2: LayerNorm with bias, learned positions, q, k, v in one Conv1D (stored ``[in, out]``), tied head
    llama       Llama 1 to 3: RMSNorm, rotary embeddings, grouped-query attention, gated MLP
    match       Every tensor of a checkpoint, matched to what its architecture declares: exactly once, or refused
    matched     A checkpoint, understood: every stored tensor with its place in the model
    mistral     Mistral: a llama without biases, with a sliding window
    opt         OPT: LayerNorm with bias, learned positions (two rows of padding before the first), ReLU, tied head
    phi3        Phi 3, 3.5 and 4 (mini): a llama with q, k, v in one matrix and gate, up in another
    qwen2       Qwen 2 and 2.5: a llama whose q, k and v always have a bias, and o never
    qwen3       Qwen 3: a llama with an RMSNorm over each head of q and k, and an explicit head size
    routers     Routers of mixtures of experts, by what they are: the one matrix of a module with a row for every expert
    smollm3     SmolLM 3: a llama that skips rotary embeddings in every fourth layer
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import Any

from quantforge.errors import InputError


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor: its name (inside a block: relative to it) and its shape in named dimensions.

    A dimension is a name of `Dimensions` (``hidden``, ``ffn``, ``q``, ``kv``, ``qkv``, ``gate_up``, ``vocab``,
    ``positions``, ``head``), a sum such as ``positions+2``, or a number. ``when`` names a configuration key that must
    be true for the tensor to exist (``!key``: must be false).
    """

    name: str
    shape: tuple[str, ...]
    when: str = ""


class Absorbs(StrEnum):
    """Ways in which the producer of an activation takes a per-channel factor into itself."""

    NORM = "norm"  # weight (and bias, if any) divided by the factor
    NORM_PLUS_ONE = "norm+1"  # gemma: y = (1 + w) x
    ROWS = "rows"  # output rows (and their bias) of a linear, or of a slice of it, divided by the factor


@dataclass(frozen=True, slots=True)
class Absorber:
    """The module that produces an activation, relative to the block; ``rows`` names a slice of a fused linear."""

    kind: Absorbs
    module: str
    rows: str = ""  # "v" or "up" in a fused projection; "" is the whole of it


@dataclass(frozen=True, slots=True)
class SharedInput:
    """The linears of a block that read the same activation.

    Attributes:
        linears: names relative to the block; they always get one scheme, because engines load them as one matrix.
        within: the sub-block whose output tells whether a transform helped (relative to the block).
        absorber: what can absorb a scale, or None (an activation function that is not linear lies between).
        heads: the activation is the concatenation of attention heads, and the absorber's rows are key/value heads:
            a factor is constant over the query heads that share a key/value head.
    """

    linears: tuple[str, ...]
    within: str
    absorber: Absorber | None = None
    heads: bool = False

    @property
    def key(self) -> str:
        """Return the name of the shared input: that of its first linear."""
        return self.linears[0]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything that the rest of QuantForge knows about one family of models.

    Attributes:
        model_type: the key in ``config.json``.
        blocks: name of the list of decoder blocks, e.g. ``model.layers``.
        outer: tensors outside of the blocks.
        block: tensors of one block, names relative to it. Every ``*.weight`` of two dimensions that belongs to a
            linear of ``inputs`` can be quantized.
        inputs: the shared inputs of a block, in the order in which the block computes them.
        embedding: module name of the token embedding; ``head`` of the output projection; ``final_norm`` the norm.
        prefixes: prefixes under which checkpoints store the canonical names; each is (stored, canonical).
        droppable: regular expressions (full match on the stored name) of tensors that are left out on purpose.
        optional: regular expressions of declared canonical names that may be absent.
        foreign: regular expressions (full match on the stored name) of tensors of another tower, kept as they are.
        unclipped: linears whose weights are never clipped by a search (queries and keys); ``module:label`` is a
            slice of a fused projection.
        requires: configuration values that the declarations rely on; anything else is refused.
        slices: rows of fused projections, e.g. ``{"self_attn.qkv_proj": ("q", "kv", "kv")}`` with their labels in
            ``slice_labels`` (``("q", "k", "v")``).
        transposed: linears are stored ``[in_features, out_features]`` (gpt2's Conv1D).
        defaults: configuration values of the family where ``config.json`` leaves a key out.
        float16: whether engines may compute the family in float16 (gemma overflows).
        text_config: key of the nested configuration of the text tower in multimodal checkpoints.
        inner_copies: inner activations of the MLP that are alive together: gate, up and their product, of a gated one.
        fused_attention: whether scores have a fused kernel; soft-capped ones have none and are held twice.
    """

    model_type: str
    blocks: str
    outer: tuple[Parameter, ...]
    block: tuple[Parameter, ...]
    inputs: tuple[SharedInput, ...]
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
    inner_copies: int = 3
    fused_attention: bool = True

    @property
    def linears(self) -> tuple[str, ...]:
        """Return all linears of a block, in computing order."""
        return tuple(name for shared in self.inputs for name in shared.linears)


# model_type -> module; several types may share one.
MODEL_TYPES: Mapping[str, str] = {
    "gemma2": "quantforge.architectures.gemma2",
    "gemma3": "quantforge.architectures.gemma3",
    "gemma3_text": "quantforge.architectures.gemma3",
    "gpt2": "quantforge.architectures.gpt2",
    "llama": "quantforge.architectures.llama",
    "mistral": "quantforge.architectures.mistral",
    "opt": "quantforge.architectures.opt",
    "phi3": "quantforge.architectures.phi3",
    "qwen2": "quantforge.architectures.qwen2",
    "qwen3": "quantforge.architectures.qwen3",
    "smollm3": "quantforge.architectures.smollm3",
}


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """Return the declarations for a configuration, or None for an unknown ``model_type``."""
    name = MODEL_TYPES.get(str(config.get("model_type", "")))
    if name is None:
        return None
    found: Architecture = import_module(name).ARCHITECTURE
    return found


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
