"""Declarations of the model families: one file per family, with its generations and mixtures of experts.

A file ends with ``FAMILIES``: its declarations by ``model_type``. To add a family, write its file and add the file's
name to `FILES`.

In this folder:

    afmoe       AFMoE (Trinity): gated attention, four norms per layer, dense first layers, shared experts
    apertus     Apertus: the attention of qwen3, and an ungated MLP with xIELU, whose two slopes are learned
    arcee       Arcee (AFM): a llama with an ungated MLP and squared ReLU
    cohere      Command R, R7B and A: parallel attention and MLP after one LayerNorm without bias
    cwm         CWM: a llama with an explicit head size and a sliding window in three of four layers
    deepseek    DeepSeek 2, 3 and 3.2, and Kimi K2: latent attention, dense first layers, then experts
    dots1       dots.llm1: a qwen3 with dense first layers, then experts and shared experts
    ernie4_5    ERNIE 4.5: a llama with interleaved rotary embeddings, one key for all biases, and a tied head
    exaone4     EXAONE 4: norms after attention and MLP as in olmo2, per-head norms of q and k, sliding windows
    falcon_h1   Falcon H1: parallel attention and Mamba-2 mixer after one norm in every layer, then a gated MLP
    gemma       Gemma 1 to 3: a llama whose norms multiply by 1 + w, with a tied head
    gemma4      Gemma 4: wider heads in full-attention layers; the last layers reuse keys and values of earlier ones
    glm         GLM 4 (2024, 2025) and its mixtures, GLM 4.5 to 4.7
    gpt2        GPT-1 and GPT-2: LayerNorms with bias, learned positions, fused q, k, v (``[in, out]``), tied head
    gpt_neox    GPT-NeoX and Pythia: fused q, k, v, interleaved head by head, and a LayerNorm before attention and MLP
    gpt_oss     GPT-OSS: attention with sinks and biases, and stacked experts stored as ``[experts, in, out]``
    granite     Granite 3 and 4: a llama with multipliers on embeddings, attention, residuals and logits
    helium      Helium: a llama with interleaved rotary embeddings and an explicit head size
    hunyuan     Hunyuan: a llama with per-head RMSNorms of q and k, after the rotary embedding
    kimi        Kimi Linear, and Kimi K2.5 and later: a deepseek_v3 with a vision tower
    lfm2        LFM 2: short convolutions in most layers, attention in the others, a gated MLP in all
    llama       Llama 1 to 3: RMSNorm, rotary embeddings, grouped-query attention, gated MLP
    llama4      Llama 4: a llama with stacked experts in some or all layers, and a vision tower
    minimax_m2  MiniMax M2: a mixtral with corrected router scores, and norms over all heads of q and of k
    mistral     Mistral, Ministral, Mixtral and Mistral Small 3
    nemotron    Nemotron 3 and 4, Minitron: LayerNorms that multiply by 1 + w, and an ungated MLP with squared ReLU
    nemotron_h  Nemotron H (Nemotron Nano 2 and 3): one mixer per layer: Mamba-2, attention, an MLP or experts
    olmo        OLMo 1 to 3 and OLMoE: norms without weights, or after attention and MLP
    opt         OPT: LayerNorms with bias, learned positions (after two padding rows), ReLU, tied head
    phi         Phi 1 and 2: parallel attention and ungated MLP after one LayerNorm, with biases everywhere
    phi3        Phi 3, 3.5 and 4 (mini): a llama with fused q, k, v and fused gate and up
    phimoe      Phi 3.5 MoE: a mixtral with LayerNorms and biases, and another name of the router
    qwen2       Qwen 1.5 to 2.5: a llama with biases of q, k and v, but not of the output projection
    qwen3       Qwen 3: a llama with per-head RMSNorms of q and k, and an explicit head size
    qwen3_next  Qwen 3 Next and 3.5: gated delta nets in three of four layers, gated attention in the others
    qwen_vl     Qwen 2, 2.5 and 3 VL: a qwen2 or qwen3 with a vision tower; decoder tensors keep their names
    seed_oss    Seed-OSS: a llama with biases of q, k and v, and an explicit head size
    smollm3     SmolLM 3: a llama without rotary embeddings in every fourth layer
    stablelm    StableLM: a llama with LayerNorms and rotary embeddings of a quarter of each head
    starcoder2  StarCoder 2: a llama with LayerNorms, biases, and an ungated MLP with GELU
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantforge.architectures.architecture import Architecture

# The files that declare families.
FILES = (
    "afmoe", "apertus", "arcee", "cohere", "cwm", "deepseek", "dots1", "ernie4_5", "exaone4", "falcon_h1", "gemma",
    "gemma4", "glm", "gpt2", "gpt_neox", "gpt_oss", "granite", "helium", "hunyuan", "kimi", "lfm2", "llama", "llama4",
    "minimax_m2", "mistral", "nemotron", "nemotron_h", "olmo", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen3",
    "qwen3_next", "qwen_vl", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip


@cache
def declared_families() -> dict[str, Architecture]:
    """Return the declarations of every family by ``model_type``."""
    families: dict[str, Architecture] = {}
    for file in FILES:
        families |= import_module(f"{__name__}.{file}").FAMILIES
    return families
