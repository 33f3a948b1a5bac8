"""StarCoder 2: a llama with LayerNorms and biases, and an MLP without gate, after whose GELU nothing absorbs."""

from dataclasses import replace

from quantforge.architectures.declare import LAYER_NORMS, attention, layer, outer, plain_mlp
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import LLAMA_BIASES, NORM_BIASES, GgufFamily

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="starcoder2",
    outer=outer(bias=True),
    kinds=(
        layer(LAYER_NORMS, attention("use_bias"), plain_mlp("use_bias", names=("c_fc", "c_proj"))),
    ),
    defaults={
        "num_key_value_heads": 2,
        "vocab_size": 49152,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    graph=DecoderGraph(one_window=True),
    gguf=GgufFamily(
        "starcoder2",
        biases=(*LLAMA_BIASES, *NORM_BIASES),
        class_name="Starcoder2ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        heads_fill=True,
        epsilon=("attention.layer_norm_epsilon", "norm_epsilon"),
        graph={"use_bias": True},
        bias_keys={},
    ),
    windows=WindowRule(every=True, listed=False),
)
FAMILIES = {"starcoder2": ARCHITECTURE}
