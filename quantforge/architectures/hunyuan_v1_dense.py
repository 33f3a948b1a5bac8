"""Hunyuan (dense): a llama with an RMSNorm over each head of q and k, behind the rotation."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.declare import attention, gated_mlp, layer, norms
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.llama_cpp import Family

HEAD_NORMS = norms("self_attn.query_layernorm", "self_attn.key_layernorm", dimension="head")
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="hunyuan_v1_dense",
    kinds=(layer(llama.NORMS, HEAD_NORMS, attention("attention_bias"), gated_mlp()),),
    defaults={"rms_norm_eps": 1e-5},
    graph=DecoderGraph(head_norms=("query_layernorm", "key_layernorm"), norms_behind=True),
    gguf=Family("hunyuan-dense", class_name="HunYuanDenseV1ForCausalLM"),
)
