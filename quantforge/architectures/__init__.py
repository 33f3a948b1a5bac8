"""Architectures as data: one file per ``model_type``, found by its name.

A file declares the tensors of a checkpoint with their shapes in terms of the configuration, which linears read the
same activation, what can absorb a scale of that activation, and what may be absent or dropped. Nothing here runs a
model; planning, checking, folding and streaming are all driven by these declarations. Adding an architecture is one
file and one line in `MODEL_TYPES`.

In this folder:

    afmoe             AFMoE (Trinity): attention whose output is gated, four norms per layer
    apertus           Apertus: a qwen3 in its attention, and an MLP without gate, of xIELU
    arcee             Arcee (AFM): a llama with an MLP without gate, of squared ReLU
    architecture      One family of models as data: everything that the rest of QuantForge knows about it
    cache_kinds       Names of caches: how keys and values are stored, in one word for both, or in a word for each
    cohere            Command R: attention and MLP side by side behind one LayerNorm without bias, neighbours rotated
    cohere2           Command R7B and A: a cohere in which three layers of four have a window
    configuration     What a configuration says beside sizes: how many tokens a model sees, whether its head is tied
    cwm               CWM: a llama in which three layers of four have a window, with an explicit head size
    declare           Parts of which families compose their layers, linears, norms, mixers of tokens and of channels
    decoder_graph     How the blocks of a family compute, as far as declarations of tensors do not say it
    deepseek_v2       DeepSeek 2: latent attention, with a latent for queries in the large model
    deepseek_v3       DeepSeek 3 (and Kimi K2): latent attention; dense first layers
    deepseek_v32      DeepSeek 3.2: a deepseek_v3 whose attention reads the tokens that an indexer chooses
    delta_net         Gated delta nets as parts of layers: a state per head that forgets
    dimensions        The sizes of a model, read from its configuration by every name that a family gives them
    dots1             dots.llm1: a qwen3 with dense first layers, then experts with shared ones beside them
    draft_heads       Draft heads: layers that guess further tokens, beside the decoder in a model's files
    draft_kinds       Kinds of draft heads, told by a configuration
    ernie4_5          ERNIE 4.5 (dense): a llama that rotates neighbours, with one key for all biases, and a tied head
    ernie4_5_moe      ERNIE 4.5 mixtures: a llama with experts in a range of its layers, with or without shared ones
    exaone4           EXAONE 4: norms after the halves of a layer as in olmo2, norms over each head of q and k
    expert_sets       Experts of a checkpoint, checked as sets: as many as there should be, each of the same parts
    falcon_h1         Falcon H1: in every layer attention and a Mamba-2 mixer side by side behind one norm
    gemma             Gemma 1: a llama whose norms multiply by 1 + w, with a tied head
    gemma2            Gemma 2: norms multiply by 1 + w, four of them per block, soft-capped scores and logits, tied head
    gemma3            Gemma 3: gemma 2 without soft-capping, with norms over the heads of q and k
    gemma4            Gemma 4: heads of full layers are wider, the last layers read keys and values of earlier ones
    glm               GLM 4 of 2024: a llama with gate and up in one matrix
    glm4              GLM 4 of 2025: a glm with further norms after attention and after the MLP
    glm4_moe          GLM 4.5 to 4.7: a llama with dense first layers, then experts with shared ones
    glm4_moe_lite     GLM 4.7 Flash: a deepseek_v3 with sizes of its own, whose dense layers may be listed
    gpt2              GPT-2: LayerNorm with bias, learned positions, q, k, v in one Conv1D (stored ``[in, out]``)
    gpt_neox          GPT-NeoX and Pythia: q, k, v of one head after another in one matrix
    gpt_oss           GPT-OSS: attention with sinks and biases, and experts that are stored stacked, ``[experts, in
    granite           Granite 3 and 4 (dense): a llama with factors on embeddings, attention, residuals and logits
    granitemoe        Granite 3 mixtures: a llama with factors of its own, and experts that files hold stacked
    granitemoehybrid  Granite 4 hybrids: Mamba-2 in most layers and attention in the others, then a shared MLP
    granitemoeshared  Granite 3 mixtures with a shared expert, whose gate and up are one matrix
    helium            Helium: a llama that rotates neighbours, with an explicit head size
    hunyuan_v1_dense  Hunyuan (dense): a llama with an RMSNorm over each head of q and k, behind the rotation
    hunyuan_v1_moe    Hunyuan mixtures: a llama with experts and a shared MLP in every layer
    kimi_k25          Kimi K2.5 and later: a deepseek_v3 beside a vision tower
    kimi_linear       Kimi Linear: delta attention in three layers of four, latent attention in the others
    latent            Multi-head latent attention: queries, keys and values made of narrow latents
    layer_kind        Kinds of layers as data: the tensors of one block, which of its linears read the same activation
    layer_windows     Windows: which layers look at the last few tokens alone, as transformers reads a configuration
    lfm2              LFM 2: short convolutions in most layers and attention in the others, a gated MLP in all
    lfm2_moe          LFM 2 mixtures: an lfm2 with dense first layers, then experts in the place of the MLP
    llama             Llama 1 to 3: RMSNorm, rotary embeddings, grouped-query attention, gated MLP
    llama4            Llama 4: a llama with experts, stored stacked, in some layers or in all, beside a vision tower
    llama_cpp         Families as llama.cpp knows them: the name, what its graph takes for granted
    mamba2            Mamba-2 mixers as parts of layers: state spaces with one decay per head
    match             Every tensor of a checkpoint, matched to what its architecture declares: exactly once, or refused
    matched           A checkpoint, understood: every stored tensor with its place in the model
    minimax_m2        MiniMax M2: a mixtral with a correction of the router's scores, and norms over all heads of q
    ministral3        Ministral 3: a mistral whose queries grow with the logarithm of their position
    mistral           Mistral and Ministral: a llama without biases, with a sliding window in all layers or in some
    mistral3          Mistral Small 3.1 and later, and Ministral 3: a mistral or a ministral3 beside a vision tower
    mixtral           Mixtral: a mistral with experts, stored one by one under names of their own, in place of the MLP
    mixtures          Mixtures of experts as parts of layers: routers, experts in every way in which files hold them
    nemotron          Nemotron 3 and 4, Minitron: LayerNorms that multiply by 1 + w, and an MLP without gate
    nemotron_h        Nemotron H (Nemotron Nano 2 and 3): every layer is one mixer behind a norm: Mamba-2, attention
    olmo              OLMo 1: a llama whose norms have no weights, so that nothing absorbs a scale of what they make
    olmo2             OLMo 2: no norms before the halves of a layer but after them, and norms over all of q and all of k
    olmo3             OLMo 3: an olmo2 in which three layers of four see a window
    olmoe             OLMoE: a llama with experts in every layer, and norms over all heads of q, and of k, at once
    openai_gpt        GPT-1: a gpt2 whose norms come after the halves of a layer, on the residual
    opt               OPT: LayerNorm with bias, learned positions (two rows of padding before the first), ReLU
    phi               Phi 1 and 2: attention and an MLP without gate side by side behind one LayerNorm
    phi3              Phi 3, 3.5 and 4 (mini): a llama with q, k, v in one matrix and gate, up in another
    phimoe            Phi 3.5 MoE: a mixtral with LayerNorms, biases, and a router of another name
    projector         Vision towers as llama.cpp reads them from a file of their own: names, shapes and keys
    qwen2             Qwen 2 and 2.5: a llama whose q, k and v always have a bias, and o never
    qwen2_5_vl        Qwen 2 and 2.5 VL: a qwen2 that reads pictures; files name its tensors as those of a decoder alone
    qwen2_moe         Qwen 1.5 and 2 mixtures: a qwen2 with experts and a shared expert, whose output a gate weighs
    qwen3             Qwen 3: a llama with an RMSNorm over each head of q and k, and an explicit head size
    qwen3_5           Qwen 3.5 (dense): gated delta nets in three layers of four, gated attention in the others
    qwen3_5_moe       Qwen 3.5 mixtures: a qwen3_5 with experts and a shared one in every layer
    qwen3_moe         Qwen 3 mixtures: a qwen3 in which most layers have experts, stored one by one, in place of the MLP
    qwen3_next        Qwen 3 Next: gated delta nets in three layers of four, gated attention in the others
    qwen3_vl          Qwen 3 VL: a qwen3 that reads pictures, whose features are added to the states of early layers too
    residual_stream   The residual stream of a model: which tensors read it, and which write into it
    routers           Routers of mixtures of experts, by what they are
    seed_oss          Seed-OSS: a llama whose q, k and v have biases, with an explicit head size
    smollm3           SmolLM 3: a llama that skips rotary embeddings in every fourth layer
    stablelm          StableLM: a llama with LayerNorms, rotating a quarter of each head
    starcoder2        StarCoder 2: a llama with LayerNorms and biases, and an MLP without gate
    towers            Towers: which numbered list of modules in a checkpoint is the decoder's blocks, told by structure
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from quantforge.architectures.architecture import Architecture
from quantforge.architectures.draft_kinds import is_draft
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
    "text_config",
]


# model_type -> module; several types may share one.
MODEL_TYPES: Mapping[str, str] = {
    "afmoe": "quantforge.architectures.afmoe",
    "apertus": "quantforge.architectures.apertus",
    "arcee": "quantforge.architectures.arcee",
    "cohere": "quantforge.architectures.cohere",
    "cohere2": "quantforge.architectures.cohere2",
    "cwm": "quantforge.architectures.cwm",
    "deepseek_v2": "quantforge.architectures.deepseek_v2",
    "deepseek_v3": "quantforge.architectures.deepseek_v3",
    "deepseek_v32": "quantforge.architectures.deepseek_v32",
    "dots1": "quantforge.architectures.dots1",
    "ernie4_5": "quantforge.architectures.ernie4_5",
    "ernie4_5_moe": "quantforge.architectures.ernie4_5_moe",
    "exaone4": "quantforge.architectures.exaone4",
    "falcon_h1": "quantforge.architectures.falcon_h1",
    "gemma": "quantforge.architectures.gemma",
    "gemma2": "quantforge.architectures.gemma2",
    "gemma3": "quantforge.architectures.gemma3",
    "gemma3_text": "quantforge.architectures.gemma3",
    "gemma4": "quantforge.architectures.gemma4",
    "gemma4_text": "quantforge.architectures.gemma4",
    "glm": "quantforge.architectures.glm",
    "glm4": "quantforge.architectures.glm4",
    "glm4_moe": "quantforge.architectures.glm4_moe",
    "glm4_moe_lite": "quantforge.architectures.glm4_moe_lite",
    "gpt2": "quantforge.architectures.gpt2",
    "openai-gpt": "quantforge.architectures.openai_gpt",
    "gpt_neox": "quantforge.architectures.gpt_neox",
    "gpt_oss": "quantforge.architectures.gpt_oss",
    "granite": "quantforge.architectures.granite",
    "granitemoe": "quantforge.architectures.granitemoe",
    "granitemoehybrid": "quantforge.architectures.granitemoehybrid",
    "granitemoeshared": "quantforge.architectures.granitemoeshared",
    "helium": "quantforge.architectures.helium",
    "hunyuan_v1_dense": "quantforge.architectures.hunyuan_v1_dense",
    "hunyuan_v1_moe": "quantforge.architectures.hunyuan_v1_moe",
    "kimi_k2": "quantforge.architectures.deepseek_v3",
    "kimi_k25": "quantforge.architectures.kimi_k25",
    "kimi_linear": "quantforge.architectures.kimi_linear",
    "lfm2": "quantforge.architectures.lfm2",
    "lfm2_moe": "quantforge.architectures.lfm2_moe",
    "llama": "quantforge.architectures.llama",
    "llama4": "quantforge.architectures.llama4",
    "llama4_text": "quantforge.architectures.llama4",
    "minimax_m2": "quantforge.architectures.minimax_m2",
    "ministral": "quantforge.architectures.mistral",
    "ministral3": "quantforge.architectures.ministral3",
    "mistral": "quantforge.architectures.mistral",
    "mistral3": "quantforge.architectures.mistral3",
    "mixtral": "quantforge.architectures.mixtral",
    "nemotron": "quantforge.architectures.nemotron",
    "nemotron_h": "quantforge.architectures.nemotron_h",
    "olmo": "quantforge.architectures.olmo",
    "olmo2": "quantforge.architectures.olmo2",
    "olmo3": "quantforge.architectures.olmo3",
    "olmoe": "quantforge.architectures.olmoe",
    "opt": "quantforge.architectures.opt",
    "phi": "quantforge.architectures.phi",
    "phi3": "quantforge.architectures.phi3",
    "phimoe": "quantforge.architectures.phimoe",
    "qwen2": "quantforge.architectures.qwen2",
    "qwen2_5_vl": "quantforge.architectures.qwen2_5_vl",
    "qwen2_moe": "quantforge.architectures.qwen2_moe",
    "qwen2_vl": "quantforge.architectures.qwen2_5_vl",
    "qwen3": "quantforge.architectures.qwen3",
    "qwen3_5": "quantforge.architectures.qwen3_5",
    "qwen3_5_moe": "quantforge.architectures.qwen3_5_moe",
    "qwen3_5_moe_text": "quantforge.architectures.qwen3_5_moe",
    "qwen3_5_text": "quantforge.architectures.qwen3_5",
    "qwen3_moe": "quantforge.architectures.qwen3_moe",
    "qwen3_next": "quantforge.architectures.qwen3_next",
    "qwen3_vl": "quantforge.architectures.qwen3_vl",
    "seed_oss": "quantforge.architectures.seed_oss",
    "smollm3": "quantforge.architectures.smollm3",
    "stablelm": "quantforge.architectures.stablelm",
    "starcoder2": "quantforge.architectures.starcoder2",
}


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """Return the declarations for a configuration; None for an unknown ``model_type``, and for draft heads."""
    name = MODEL_TYPES.get(str(config.get("model_type", "")))
    if name is None or is_draft(config):
        return None
    found: Architecture = import_module(name).ARCHITECTURE
    return found.decoders.get(str(text_config(config).get("model_type", "")), found)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the text tower: the nested one of a multimodal model, or the whole."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config
