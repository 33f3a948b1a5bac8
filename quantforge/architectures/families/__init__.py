"""The families of models: one file each, with its generations and mixtures.

A file ends with its ``FAMILIES``: declarations by ``model_type``. To add a family, write its file and add the name to
`FILES`.

In this folder:

    afmoe       AFMoE (Trinity): attention whose output is gated, four norms per layer
    apertus     Apertus: a qwen3 in its attention, and an MLP without gate, of xIELU
    arcee       Arcee (AFM): a llama with an MLP without gate, of squared ReLU
    cohere      Command R, R7B and A: attention and MLP side by side after one LayerNorm without bias
    cwm         CWM: a llama in which three layers of four have a window, with an explicit head size
    deepseek    DeepSeek 2, 3 and 3.2, and Kimi K2: latent attention; dense first layers
    dots1       dots.llm1: a qwen3 with dense first layers, then experts with shared ones beside them
    ernie4_5    ERNIE 4.5: a llama that rotates neighbours, with one key for all biases, and a tied head
    exaone4     EXAONE 4: norms after the halves of a layer as in olmo2, norms over each head of q and k
    falcon_h1   Falcon H1: in every layer attention and a Mamba-2 mixer side by side after one norm, then a gated MLP
    gemma       Gemma 1 to 3: a llama whose norms multiply by 1 + w, with a tied head
    gemma4      Gemma 4: heads of full layers are wider, the last layers read keys and values of earlier ones
    glm         GLM 4 (2024, 2025) and its mixtures, GLM 4.5 to 4.7
    gpt2        GPT-1 and GPT-2: LayerNorm with bias, learned positions, q, k, v in one Conv1D (stored ``[in, out]``)
    gpt_neox    GPT-NeoX and Pythia: q, k, v of one head after another in one matrix
    gpt_oss     GPT-OSS: attention with sinks and biases, and experts that are stored stacked, ``[experts, in, out]``
    granite     Granite 3 and 4: a llama with factors on embeddings, attention, residuals and logits
    helium      Helium: a llama that rotates neighbours, with an explicit head size
    hunyuan     Hunyuan: a llama with an RMSNorm over each head of q and k, after the rotation
    kimi        Kimi Linear, and Kimi K2.5 and later: a deepseek_v3 beside a vision tower (Kimi K2 is a deepseek_v3)
    lfm2        LFM 2: short convolutions in most layers and attention in the others, a gated MLP in all
    llama       Llama 1 to 3: RMSNorm, rotary embeddings, grouped-query attention, gated MLP
    llama4      Llama 4: a llama with experts, stored stacked, in some layers or in all, beside a vision tower
    minimax_m2  MiniMax M2: a mixtral with a correction of the router's scores, and norms over all heads of q, and of k
    mistral     Mistral, Ministral, Mixtral and Mistral Small 3
    nemotron    Nemotron 3 and 4, Minitron: LayerNorms that multiply by 1 + w, and an MLP without gate, of squared ReLU
    nemotron_h  Nemotron H (Nemotron Nano 2 and 3): every layer is one mixer after a norm: Mamba-2, attention
    olmo        OLMo 1 to 3 and OLMoE
    opt         OPT: LayerNorm with bias, learned positions (two rows of padding before the first), ReLU, tied head
    phi         Phi 1 and 2: attention and an MLP without gate side by side after one LayerNorm, biases everywhere
    phi3        Phi 3, 3.5 and 4 (mini): a llama with q, k, v in one matrix and gate, up in another
    phimoe      Phi 3.5 MoE: a mixtral with LayerNorms, biases, and a router of another name
    qwen2       Qwen 1.5 to 2.5: a llama whose q, k and v always have a bias, and o never
    qwen3       Qwen 3: a llama with an RMSNorm over each head of q and k, and an explicit head size
    qwen3_next  Qwen 3 Next and 3.5: gated delta nets in three layers of four, gated attention in the others
    qwen_vl     Qwen 2, 2.5 and 3 VL: a qwen2 or a qwen3 that reads pictures
    seed_oss    Seed-OSS: a llama whose q, k and v have biases, with an explicit head size
    smollm3     SmolLM 3: a llama that skips rotary embeddings in every fourth layer
    stablelm    StableLM: a llama with LayerNorms, rotating a quarter of each head
    starcoder2  StarCoder 2: a llama with LayerNorms and biases, and an MLP without gate
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
    """Return the declarations of every family by ``model_type``, also of those that follow another."""
    found: dict[str, Architecture] = {}
    for file in FILES:
        found |= import_module(f"{__name__}.{file}").FAMILIES
    return found
