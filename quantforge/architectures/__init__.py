"""Architectures as data: one file for each family, with its generations and mixtures.

A file declares the tensors of a checkpoint with their shapes in terms of the configuration, which linears read the
same activation, what can absorb a scale of that activation, and what may be absent or dropped. Nothing here runs a
model; planning, checking, folding and streaming are all driven by these declarations. Adding an architecture is one
file, which ends with its ``FAMILIES`` by ``model_type``, and its name in `FILES`.

In this folder:

    afmoe            AFMoE (Trinity): attention whose output is gated, four norms per layer
    apertus          Apertus: a qwen3 in its attention, and an MLP without gate, of xIELU
    arcee            Arcee (AFM): a llama with an MLP without gate, of squared ReLU
    architecture     One family of models as data: everything that the rest of QuantForge knows about it
    cohere           Command R, R7B and A: attention and MLP side by side after one LayerNorm without bias
    configuration    What a configuration says beside sizes: how many tokens a model sees, whether its head is tied
    cwm              CWM: a llama in which three layers of four have a window, with an explicit head size
    declare          Parts of which families compose their layers, linears, norms, mixers of tokens and of channels
    decoder_graph    How the blocks of a family compute, as far as declarations of tensors do not say it
    deepseek         DeepSeek 2, 3 and 3.2, and Kimi K2: latent attention; dense first layers
    dimensions       The sizes of a model, read from its configuration by every name that a family gives them
    dots1            dots.llm1: a qwen3 with dense first layers, then experts with shared ones beside them
    draft_heads      Draft heads: layers that guess further tokens, beside the decoder in a model's files
    ernie4_5         ERNIE 4.5: a llama that rotates neighbours, with one key for all biases, and a tied head
    exaone4          EXAONE 4: norms after the halves of a layer as in olmo2, norms over each head of q and k
    expert_sets      Experts of a checkpoint, checked as sets: as many as there should be, each of the same parts
    falcon_h1        Falcon H1: in every layer attention and a Mamba-2 mixer side by side after one norm
    gemma            Gemma 1 to 3: a llama whose norms multiply by 1 + w, with a tied head
    gemma4           Gemma 4: heads of full layers are wider, the last layers read keys and values of earlier ones
    glm              GLM 4 (2024, 2025) and its mixtures, GLM 4.5 to 4.7
    gpt2             GPT-1 and GPT-2: LayerNorm with bias, learned positions, q, k, v in one Conv1D (stored ``[in
    gpt_neox         GPT-NeoX and Pythia: q, k, v of one head after another in one matrix
    gpt_oss          GPT-OSS: attention with sinks and biases, and experts that are stored stacked, ``[experts, in
    granite          Granite 3 and 4: a llama with factors on embeddings, attention, residuals and logits
    helium           Helium: a llama that rotates neighbours, with an explicit head size
    hunyuan          Hunyuan: a llama with an RMSNorm over each head of q and k, after the rotation
    kimi             Kimi Linear, and Kimi K2.5 and later
    latent           Multi-head latent attention: queries, keys and values made of narrow latents
    layer_kind       Kinds of layers as data: the tensors of one block, which of its linears read the same activation
    layer_windows    Windows: which layers look at the last few tokens alone, as transformers reads a configuration
    lfm2             LFM 2: short convolutions in most layers and attention in the others, a gated MLP in all
    llama            Llama 1 to 3: RMSNorm, rotary embeddings, grouped-query attention, gated MLP
    llama4           Llama 4: a llama with experts, stored stacked, in some layers or in all, beside a vision tower
    llama_cpp        Families as llama.cpp knows them: the name, what its graph takes for granted
    mamba2           Mamba-2 mixers as parts of layers: state spaces with one decay per head, read through a convolution
    match            Every tensor of a checkpoint, matched to what its architecture declares: exactly once, or refused
    minimax_m2       MiniMax M2: a mixtral with a correction of the router's scores, and norms over all heads of q
    mistral          Mistral, Ministral, Mixtral and Mistral Small 3
    mixtures         Mixtures of experts as parts of layers: routers, experts in every way in which files hold them
    nemotron         Nemotron 3 and 4, Minitron: LayerNorms that multiply by 1 + w, and an MLP without gate
    nemotron_h       Nemotron H (Nemotron Nano 2 and 3): every layer is one mixer after a norm: Mamba-2, attention
    olmo             OLMo 1 to 3 and OLMoE
    opt              OPT: LayerNorm with bias, learned positions (two rows of padding before the first), ReLU, tied head
    phi              Phi 1 and 2: attention and an MLP without gate side by side after one LayerNorm, biases everywhere
    phi3             Phi 3, 3.5 and 4 (mini): a llama with q, k, v in one matrix and gate, up in another
    phimoe           Phi 3.5 MoE: a mixtral with LayerNorms, biases, and a router of another name
    projector        Vision towers as llama.cpp reads them from a file of their own: names, shapes and keys
    qwen2            Qwen 1.5 to 2.5: a llama whose q, k and v always have a bias, and o never
    qwen3            Qwen 3: a llama with an RMSNorm over each head of q and k, and an explicit head size
    qwen3_next       Qwen 3 Next and 3.5: gated delta nets in three layers of four, gated attention in the others
    qwen_vl          Qwen 2, 2.5 and 3 VL: a qwen2 or a qwen3 that reads pictures
    residual_stream  The residual stream of a model: which tensors read it, and which write into it
    routers          Routers of mixtures of experts, by what they are
    seed_oss         Seed-OSS: a llama whose q, k and v have biases, with an explicit head size
    smollm3          SmolLM 3: a llama that skips rotary embeddings in every fourth layer
    stablelm         StableLM: a llama with LayerNorms, rotating a quarter of each head
    starcoder2       StarCoder 2: a llama with LayerNorms and biases, and an MLP without gate
    towers           Towers: which numbered list of modules in a checkpoint is the decoder's blocks, told by structure
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from quantforge.architectures.architecture import Architecture
from quantforge.architectures.draft_heads import is_draft
from quantforge.architectures.layer_kind import (
    Absorber,
    Absorbs,
    LayerKind,
    Parameter,
    Place,
    SharedInput,
    Stack,
)

__all__ = [
    "FILES",
    "Absorber",
    "Absorbs",
    "Architecture",
    "LayerKind",
    "Parameter",
    "Place",
    "SharedInput",
    "Stack",
    "architecture_of",
    "decoder_family",
    "families",
    "text_config",
]


# The files that declare families.
FILES = (
    "afmoe", "apertus", "arcee", "cohere", "cwm", "deepseek", "dots1", "ernie4_5", "exaone4", "falcon_h1", "gemma",
    "gemma4", "glm", "gpt2", "gpt_neox", "gpt_oss", "granite", "helium", "hunyuan", "kimi", "lfm2", "llama", "llama4",
    "minimax_m2", "mistral", "nemotron", "nemotron_h", "olmo", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen3",
    "qwen3_next", "qwen_vl", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip


@cache
def families() -> dict[str, Architecture]:
    """Return the declarations of every family by ``model_type``, also of those that follow another."""
    found: dict[str, Architecture] = {}
    for file in FILES:
        found |= import_module(f"{__name__}.{file}").FAMILIES
    return found


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """Return the declarations for a configuration; None for an unknown ``model_type``, and for draft heads."""
    found = families().get(str(config.get("model_type", "")))
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
