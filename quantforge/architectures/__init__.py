"""Model architectures as data: one file per family, with its generations and mixtures of experts.

A file declares the tensors of a checkpoint, their shapes as expressions in configured sizes, which linears read the
same activation, into which module a scale of that activation can be folded, and which tensors may be missing or
dropped. Nothing here runs a model; planning, checking, folding and streaming all use these declarations. To add an
architecture, write one file in `families`, which ends with ``FAMILIES``, and add its name to `FILES` there.

In this folder:

    architecture     Declarations of one family of models: all that QuantForge knows about it, as data
    configuration    Read and check general configuration values: context length, tied embeddings, multipliers
    declare          Building blocks from which families declare their layers: linears, norms, attention, MLPs
    decoder_graph    Computation graphs of decoder blocks: what QuantForge's own decoder must know besides the tensors
    dimensions       Read and check the sizes of a model from its configuration, under all key names that families use
    draft_heads      Recognize draft heads: layers that predict further tokens
    expert_sets      Check that the experts stored in a checkpoint are complete and consistent
    latent           Multi-head latent attention (MLA): queries, keys and values are computed from narrow latents
    layer_kind       Kinds of layers as data: the tensors of one block, which linears read the same activation
    layer_windows    Sliding windows: which layers use sliding-window attention, as transformers reads a configuration
    llama_cpp        Families in llama.cpp: their names, what its graphs assume, and the metadata keys that it reads
    mamba2           Mamba-2 mixers: state spaces with one decay per head, and a short convolution before them
    match            Match every stored tensor of a checkpoint to a declared tensor of its architecture, exactly once
    mixtures         Mixtures of experts: routers, experts in every stored layout, and shared experts
    projector        Vision towers and projectors as llama.cpp reads them from a separate file: names, shapes and keys
    residual_stream  The residual stream: which tensors read it and which write to it, as far as declarations prove it
    routers          Find routers of mixtures of experts by shape: the only matrix of a module with one row per expert
    towers           Find which numbered list of modules in a checkpoint holds the decoder's blocks, by its structure
    families/        Declarations of the model families: one file per family
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
    ScaleFold,
    SharedInput,
    Stack,
    StackSlice,
)

__all__ = [
    "Architecture",
    "FoldKind",
    "LayerKind",
    "Parameter",
    "ScaleFold",
    "SharedInput",
    "Stack",
    "StackSlice",
    "architecture_of",
    "decoder_family",
    "text_config",
]


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """Return the declarations for a configuration; None for an unknown ``model_type`` and for draft heads."""
    architecture = declared_families().get(str(config.get("model_type", "")))
    if architecture is None or is_draft(config):
        return None
    return architecture.decoders_by_type.get(
        str(text_config(config).get("model_type", "")), architecture
    )


def decoder_family(model_type: str) -> Architecture | None:
    """Return the declarations of a family that QuantForge's own decoder supports; None for any other."""
    architecture = architecture_of({"model_type": model_type})
    return (
        architecture
        if architecture is not None and architecture.graph_if_complete is not None
        else None
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the text decoder: the nested one of a multimodal model, else the whole."""
    nested_config = config.get("text_config")
    return nested_config if isinstance(nested_config, Mapping) else config
