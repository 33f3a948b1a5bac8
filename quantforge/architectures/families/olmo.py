"""OLMo 1 to 3 and OLMoE.

The norms of OLMo 1 have no weights. OLMo 2 has no norms before the halves of a layer but after them, and norms over all
of q and all of k; attention and MLP read the residual stream itself, into which everything writes. So nothing absorbs a
scale of what they read. In OLMo 3 three layers of four see a window, and the others rotate by frequencies of their own.
OLMoE is a llama with experts in every layer, and the norms of OLMo 2 over q and k.
"""

from __future__ import annotations

from dataclasses import replace

from quantforge.architectures import Parameter
from quantforge.architectures.declare import NORMS_OF_ALL, attention, gated_mlp, layer, norms
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.architectures.mixtures import experts_one_by_one, router

MIXERS = (attention("attention_bias", norm=None), gated_mlp(norm=None))

OLMO = replace(
    llama.ARCHITECTURE,
    model_type="olmo",
    outer=(
        Parameter("model.embed_tokens.weight", ("vocab", "hidden")),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=(layer(*MIXERS),),
    requires={"clip_qkv": None},  # clipped values are not linear in v
    gguf=None,
)


NORMS = norms("post_attention_layernorm", "post_feedforward_layernorm")
OLMO2 = replace(
    llama.ARCHITECTURE,
    model_type="olmo2",
    kinds=(layer(NORMS, NORMS_OF_ALL, *MIXERS),),
    defaults={"rms_norm_eps": 1e-5},
    graph=DecoderGraph(
        before_attention="",
        after_attention="post_attention_layernorm",
        before_mlp="",
        after_mlp="post_feedforward_layernorm",
        norms_of_all=True,
    ),
    gguf=GgufFamily(
        "olmo2",
        class_name="Olmo2ForCausalLM",
        heads_fill=True,
        graph={"tie_word_embeddings": False},
    ),
)


OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    defaults={**OLMO2.defaults, "rope_theta": 500_000.0},
    gguf=None,
    windows=WindowRule(width=4096, period=4),
)


OLMOE = replace(
    llama.ARCHITECTURE,
    model_type="olmoe",
    graph=DecoderGraph(norms_of_all=True, experts=True),
    kinds=(
        layer(
            llama.NORMS,
            NORMS_OF_ALL,
            attention("attention_bias"),
            router("mlp.gate"),
            experts_one_by_one("ffn"),
        ),
    ),
    requires={"clip_qkv": None},  # clipped values are not linear in the rows of v
    sizes={"experts": ("num_experts", "num_local_experts")},
    defaults={
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "intermediate_size": 2048,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    gguf=GgufFamily(
        "olmoe",
        experts=True,
        heads_fill=True,
        graph={"norm_topk_prob": False, "clip_qkv": None, "tie_word_embeddings": False},
        equal=(("kv", "q"),),  # its norms are as wide as the model
    ),
)


FAMILIES = {"olmo": OLMO, "olmo2": OLMO2, "olmo3": OLMO3, "olmoe": OLMOE}
