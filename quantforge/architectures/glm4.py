"""GLM 4 of 2025: a glm with further norms after attention and after the MLP."""

from dataclasses import replace

from quantforge.architectures import glm, llama
from quantforge.architectures.declare import layer, norms
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.llama_cpp import QKV_BIASES, Family

AFTER = norms("post_self_attn_layernorm", "post_mlp_layernorm")
ARCHITECTURE = replace(
    glm.ARCHITECTURE,
    model_type="glm4",
    kinds=(layer(llama.NORMS, AFTER, *glm.MIXERS),),
    graph=DecoderGraph(
        after_attention="post_self_attn_layernorm",
        after_mlp="post_mlp_layernorm",
        neighbours=True,
    ),
    gguf=Family("glm4", biases=QKV_BIASES, class_name="Glm4ForCausalLM"),
)
