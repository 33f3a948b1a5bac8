"""Architectures as data: one file for each family, with its generations and mixtures.

A file declares the tensors of a checkpoint with their shapes in terms of the configuration, which linears read the
same activation, what can absorb a scale of that activation, and what may be absent or dropped. Nothing here runs a
model; planning, checking, folding and streaming are all driven by these declarations. Adding an architecture is one
file, which ends with its ``FAMILIES`` by ``model_type``, and its name in `FILES`.

In this folder:

    architecture     One family of models as data: everything that the rest of QuantForge knows about it
    configuration    What a configuration says beside sizes: how many tokens a model sees, whether its head is tied
    declare          Parts of which families compose their layers, linears, norms, mixers of tokens and of channels
    decoder_graph    How the blocks of a family compute, as far as declarations of tensors do not say it
    dimensions       The sizes of a model, read from its configuration by every name that a family gives them
    draft_heads      Draft heads: layers that guess further tokens, beside the decoder in a model's files
    expert_sets      Experts of a checkpoint, checked as sets: as many as there should be, each of the same parts
    latent           Multi-head latent attention: queries, keys and values made of narrow latents
    layer_kind       Kinds of layers as data: the tensors of one block, which of its linears read the same activation
    layer_windows    Windows: which layers look at the last few tokens alone, as transformers reads a configuration
    llama_cpp        Families as llama.cpp knows them: the name, what its graph takes for granted
    mamba2           Mamba-2 mixers as parts of layers: state spaces with one decay per head, read through a convolution
    match            Every tensor of a checkpoint, matched to what its architecture declares: exactly once, or refused
    mixtures         Mixtures of experts as parts of layers: routers, experts in every way in which files hold them
    projector        Vision towers as llama.cpp reads them from a file of their own: names, shapes and keys
    residual_stream  The residual stream of a model: which tensors read it, and which write into it
    routers          Routers of mixtures of experts, by what they are
    towers           Towers: which numbered list of modules in a checkpoint is the decoder's blocks, told by structure
    families/        The families of models: one file each, with its generations and mixtures
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.architectures.architecture import Architecture
from quantforge.architectures.draft_heads import is_draft
from quantforge.architectures.families import declared_families
from quantforge.architectures.layer_kind import (
    FoldKind,
    LayerKind,
    Parameter,
    Place,
    ScaleFold,
    SharedInput,
    Stack,
)

__all__ = [
    "Architecture",
    "FoldKind",
    "LayerKind",
    "Parameter",
    "Place",
    "ScaleFold",
    "SharedInput",
    "Stack",
    "architecture_of",
    "decoder_family",
    "text_config",
]


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """Return the declarations for a configuration; None for an unknown ``model_type``, and for draft heads."""
    found = declared_families().get(str(config.get("model_type", "")))
    if found is None or is_draft(config):
        return None
    return found.decoders.get(str(text_config(config).get("model_type", "")), found)


def decoder_family(model_type: str) -> Architecture | None:
    """Return the declarations of a family whose blocks our own decoder computes; None for any other."""
    found = architecture_of({"model_type": model_type})
    return found if found is not None and found.own_graph is not None else None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the text tower: the nested one of a multimodal model, or the whole."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config
