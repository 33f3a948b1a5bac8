"""Phi 1 and 2: attention and an MLP without gate side by side after one LayerNorm, biases everywhere, the head too."""

from quantforge.architectures import Architecture, Parameter
from quantforge.architectures.declare import (
    ALWAYS,
    attention,
    layer,
    norms,
    outer,
    plain_mlp,
    side_by_side,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.llama_cpp import LLAMA_BIASES, NORM_BIASES, GgufFamily

HEAD_NORMS = tuple(
    Parameter(f"self_attn.{name}_layernorm.{kind}", ("head",), "qk_layernorm")
    for name in ("q", "k")
    for kind in ("weight", "bias")
)
ARCHITECTURE = Architecture(
    model_type="phi",
    blocks="model.layers",
    outer=outer("model.final_layernorm", bias=True, head_bias=ALWAYS),
    kinds=(
        layer(
            norms("input_layernorm", bias=True),
            HEAD_NORMS,
            side_by_side(
                attention(ALWAYS, output="dense"), plain_mlp(ALWAYS, names=("fc1", "fc2"))
            ),
        ),
    ),
    embedding="model.embed_tokens",
    head="lm_head",
    final_norm="model.final_layernorm",
    defaults={"partial_rotary_factor": 0.5, "vocab_size": 51200},
    graph=DecoderGraph(
        output="dense",
        before_mlp="",
        side_by_side=True,
        head_norms=("q_layernorm", "k_layernorm"),
    ),
    gguf=GgufFamily(
        "phi2",
        biases=(*LLAMA_BIASES, *NORM_BIASES, "output.bias"),
        class_name="PhiForCausalLM",
        activations=("gelu_new",),
        heads_fill=True,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
        graph={"qk_layernorm": False, "tie_word_embeddings": False},
        bias_keys={},
    ),
)
FAMILIES = {"phi": ARCHITECTURE}
