"""OLMo 2: no norms before the halves of a layer but after them, and norms over all of q and all of k.

Attention and MLP read the residual stream itself, into which everything writes: nothing absorbs a scale of that.
"""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.declare import NORMS_OF_ALL, attention, gated_mlp, layer, norms
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.llama_cpp import Family

NORMS = norms("post_attention_layernorm", "post_feedforward_layernorm")
MIXERS = (attention("attention_bias", norm=None), gated_mlp(norm=None))
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="olmo2",
    kinds=(
        layer(
            NORMS,
            NORMS_OF_ALL,
            *MIXERS,
        ),
    ),
    defaults={"rms_norm_eps": 1e-5},
    graph=DecoderGraph(
        before_attention="",
        after_attention="post_attention_layernorm",
        before_mlp="",
        after_mlp="post_feedforward_layernorm",
        norms_of_all=True,
    ),
    gguf=Family(
        "olmo2",
        class_name="Olmo2ForCausalLM",
        heads_fill=True,
        graph={"tie_word_embeddings": False},
    ),
)
