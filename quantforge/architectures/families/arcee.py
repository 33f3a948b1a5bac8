"""Arcee (AFM): a llama with an ungated MLP and squared ReLU."""

from dataclasses import replace

from quantforge.architectures.declare import attention, compose_layer, plain_mlp
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import SCALINGS_WITH_TABLE, GgufFamily

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="arcee",
    kinds=(compose_layer(llama.NORMS, attention("attention_bias"), plain_mlp("mlp_bias")),),
    defaults={"rms_norm_eps": 1e-5},
    gguf=GgufFamily(
        "arcee",
        permutes_qk=True,
        transformers_class="ArceeForCausalLM",
        activations=("relu2",),
        rope_scalings=SCALINGS_WITH_TABLE,
    ),
)
FAMILIES = {"arcee": ARCHITECTURE}
