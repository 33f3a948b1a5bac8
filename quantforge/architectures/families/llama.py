"""Llama 1 to 3: RMSNorm, rotary embeddings, grouped-query attention, gated MLP."""

from quantforge.architectures import Architecture
from quantforge.architectures.declare import attention, gated_mlp, layer, norms, outer
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.llama_cpp import LLAMA_BIASES, WITH_TABLE, GgufFamily

NORMS = norms("input_layernorm", "post_attention_layernorm")
ARCHITECTURE = Architecture(
    model_type="llama",
    blocks="model.layers",
    outer=outer(),
    kinds=(layer(NORMS, attention("attention_bias"), gated_mlp("mlp_bias")),),
    embedding="model.embed_tokens",
    head="lm_head",
    final_norm="model.norm",
    graph=DecoderGraph(),
    gguf=GgufFamily(
        "llama",
        counts_vocabulary=True,
        interleaved=True,
        biases=LLAMA_BIASES,
        class_name="LlamaForCausalLM",
        scalings=WITH_TABLE,
    ),
)
FAMILIES = {"llama": ARCHITECTURE}
