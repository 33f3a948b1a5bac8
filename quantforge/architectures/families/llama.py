"""Llama 1 to 3: RMSNorm, rotary embeddings, grouped-query attention, gated MLP."""

from quantforge.architectures import Architecture
from quantforge.architectures.declare import (
    attention,
    compose_layer,
    gated_mlp,
    norm_parameters,
    outer_parameters,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.llama_cpp import LLAMA_BIASES, SCALINGS_WITH_TABLE, GgufFamily

NORMS = norm_parameters("input_layernorm", "post_attention_layernorm")
ARCHITECTURE = Architecture(
    model_type="llama",
    blocks="model.layers",
    outer_parameters=outer_parameters(),
    kinds=(compose_layer(NORMS, attention("attention_bias"), gated_mlp("mlp_bias")),),
    embedding="model.embed_tokens",
    head="lm_head",
    final_norm="model.norm",
    graph=DecoderGraph(),
    gguf=GgufFamily(
        "llama",
        stores_vocabulary_size=True,
        permutes_qk=True,
        bias_suffixes=LLAMA_BIASES,
        transformers_class="LlamaForCausalLM",
        rope_scalings=SCALINGS_WITH_TABLE,
    ),
)
FAMILIES = {"llama": ARCHITECTURE}
