"""OLMo 1 to 3 and OLMoE: norms without weights, or after attention and MLP.

The norms of OLMo 1 have no weights. OLMo 2 has norms after attention and MLP instead of before them, and norms over all
heads of q and of k. Attention and MLP read the residual stream itself, to which every block adds, so no scale of their
input can be folded. In OLMo 3, three of four layers have a sliding window, and the others use other rotary frequencies.
OLMoE is a llama with experts in every layer and the q and k norms of OLMo 2.
"""

from __future__ import annotations

from dataclasses import replace

from quantforge.architectures import Parameter
from quantforge.architectures.declare import (
    WHOLE_QK_NORMS,
    attention,
    compose_layer,
    gated_mlp,
    norm_parameters,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.architectures.mixtures import router_parameters, single_experts

MIXERS = (attention("attention_bias", norm=None), gated_mlp(norm=None))

OLMO = replace(
    llama.ARCHITECTURE,
    model_type="olmo",
    outer_parameters=(
        Parameter("model.embed_tokens.weight", ("vocab", "hidden")),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=(compose_layer(*MIXERS),),
    required_values={"clip_qkv": None},  # clipped values are not linear in v
    gguf=None,
)


NORMS = norm_parameters("post_attention_layernorm", "post_feedforward_layernorm")
OLMO2 = replace(
    llama.ARCHITECTURE,
    model_type="olmo2",
    kinds=(compose_layer(NORMS, WHOLE_QK_NORMS, *MIXERS),),
    defaults={"rms_norm_eps": 1e-5},
    graph=DecoderGraph(
        norm_before_attention="",
        norm_after_attention="post_attention_layernorm",
        norm_before_mlp="",
        norm_after_mlp="post_feedforward_layernorm",
        qk_norms_over_all_heads=True,
    ),
    gguf=GgufFamily(
        "olmo2",
        transformers_class="Olmo2ForCausalLM",
        heads_fill_width=True,
        required_values={"tie_word_embeddings": False},
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
    graph=DecoderGraph(qk_norms_over_all_heads=True, supports_experts=True),
    kinds=(
        compose_layer(
            llama.NORMS,
            WHOLE_QK_NORMS,
            attention("attention_bias"),
            router_parameters("mlp.gate"),
            single_experts("ffn"),
        ),
    ),
    required_values={"clip_qkv": None},  # clipped values are not linear in the rows of v
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
        has_experts=True,
        heads_fill_width=True,
        required_values={"norm_topk_prob": False, "clip_qkv": None, "tie_word_embeddings": False},
        equal_sizes=(("kv", "q"),),  # its norms are as wide as the model
    ),
)


FAMILIES = {"olmo": OLMO, "olmo2": OLMO2, "olmo3": OLMO3, "olmoe": OLMOE}
