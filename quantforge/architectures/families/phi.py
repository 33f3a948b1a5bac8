"""Phi 1 and 2: parallel attention and ungated MLP after one LayerNorm, with biases everywhere."""

from quantforge.architectures import Architecture, Parameter
from quantforge.architectures.declare import (
    ALWAYS_BIAS,
    attention,
    compose_layer,
    norm_parameters,
    outer_parameters,
    parallel_attention_mlp,
    plain_mlp,
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
    outer_parameters=outer_parameters("model.final_layernorm", bias=True, head_bias=ALWAYS_BIAS),
    kinds=(
        compose_layer(
            norm_parameters("input_layernorm", bias=True),
            HEAD_NORMS,
            parallel_attention_mlp(
                attention(ALWAYS_BIAS, output="dense"), plain_mlp(ALWAYS_BIAS, names=("fc1", "fc2"))
            ),
        ),
    ),
    embedding="model.embed_tokens",
    head="lm_head",
    final_norm="model.final_layernorm",
    defaults={"partial_rotary_factor": 0.5, "vocab_size": 51200},
    graph=DecoderGraph(
        output_proj="dense",
        norm_before_mlp="",
        parallel_mlp=True,
        head_norms=("q_layernorm", "k_layernorm"),
    ),
    gguf=GgufFamily(
        "phi2",
        bias_suffixes=(*LLAMA_BIASES, *NORM_BIASES, "output.bias"),
        transformers_class="PhiForCausalLM",
        activations=("gelu_new",),
        heads_fill_width=True,
        epsilon_keys=("attention.layer_norm_epsilon", "layer_norm_eps"),
        required_values={"qk_layernorm": False, "tie_word_embeddings": False},
        bias_keys={},
    ),
)
FAMILIES = {"phi": ARCHITECTURE}
