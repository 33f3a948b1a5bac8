"""OLMoE: a llama with experts in every layer, and norms over all heads of q, and of k, at once."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.declare import NORMS_OF_ALL, attention, layer
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.llama_cpp import Family
from quantforge.architectures.mixtures import experts_one_by_one, router

ARCHITECTURE = replace(
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
    gguf=Family(
        "olmoe",
        experts=True,
        heads_fill=True,
        graph={"norm_topk_prob": False, "clip_qkv": None, "tie_word_embeddings": False},
        equal=(("kv", "q"),),  # its norms are as wide as the model
    ),
)
