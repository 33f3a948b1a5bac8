"""StarCoder 2: a llama with LayerNorms, biases, and an ungated MLP with GELU."""

from dataclasses import replace

from quantforge.architectures.declare import (
    LAYER_NORMS,
    attention,
    compose_layer,
    outer_parameters,
    plain_mlp,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import LLAMA_BIASES, NORM_BIASES, GgufFamily

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="starcoder2",
    outer_parameters=outer_parameters(bias=True),
    kinds=(
        compose_layer(
            LAYER_NORMS, attention("use_bias"), plain_mlp("use_bias", names=("c_fc", "c_proj"))
        ),
    ),
    defaults={
        "num_key_value_heads": 2,
        "vocab_size": 49152,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    graph=DecoderGraph(same_window=True),
    gguf=GgufFamily(
        "starcoder2",
        bias_suffixes=(*LLAMA_BIASES, *NORM_BIASES),
        transformers_class="Starcoder2ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        heads_fill_width=True,
        epsilon_keys=("attention.layer_norm_epsilon", "norm_epsilon"),
        required_values={"use_bias": True},
        bias_keys={},
    ),
    windows=WindowRule(every_layer=True, uses_layer_types=False),
)
FAMILIES = {"starcoder2": ARCHITECTURE}
