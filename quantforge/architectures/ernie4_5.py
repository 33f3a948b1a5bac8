"""ERNIE 4.5 (dense): a llama that rotates neighbours, with one key for all biases, and a tied head."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.declare import attention, gated_mlp, layer
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.llama_cpp import Family

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="ernie4_5",
    kinds=(layer(llama.NORMS, attention("use_bias"), gated_mlp("use_bias")),),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    },
    graph=DecoderGraph(neighbours=True),
    gguf=Family(
        "ernie4_5", class_name="Ernie4_5ForCausalLM", bias_keys={"use_bias": "attn_q.bias"}
    ),
)
