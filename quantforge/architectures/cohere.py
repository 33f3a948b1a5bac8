"""Command R: attention and MLP side by side behind one LayerNorm without bias, neighbours rotated, logits scaled."""

from dataclasses import replace

from quantforge.architectures import Parameter, llama
from quantforge.architectures.declare import attention, gated_mlp, layer, norms, side_by_side
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.llama_cpp import Family

BOTH = side_by_side(attention("attention_bias"), gated_mlp())
HEAD_NORMS = (
    Parameter("self_attn.q_norm.weight", ("heads", "head"), "use_qk_norm"),
    Parameter("self_attn.k_norm.weight", ("kv_heads", "head"), "use_qk_norm"),
)
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="cohere",
    centred_norms=True,
    kinds=(layer(norms("input_layernorm"), HEAD_NORMS, BOTH),),
    defaults={
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
        "rope_theta": 500_000.0,
        "vocab_size": 256000,
    },
    graph=DecoderGraph(before_mlp="", side_by_side=True, neighbours=True),
    gguf=Family(
        "command-r",
        head=False,
        class_name="CohereForCausalLM",
        heads_fill=True,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
        reals={"logit_scale": "logit_scale"},
        graph={"use_qk_norm": False},
    ),
)
