"""Arcee (AFM): a llama with an MLP without gate, of squared ReLU."""

from dataclasses import replace

from quantforge.architectures.declare import attention, layer, plain_mlp
from quantforge.architectures.families import llama
from quantforge.architectures.llama_cpp import WITH_TABLE, GgufFamily

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="arcee",
    kinds=(layer(llama.NORMS, attention("attention_bias"), plain_mlp("mlp_bias")),),
    defaults={"rms_norm_eps": 1e-5},
    gguf=GgufFamily(
        "arcee",
        interleaved=True,
        class_name="ArceeForCausalLM",
        activations=("relu2",),
        scalings=WITH_TABLE,
    ),
)
FAMILIES = {"arcee": ARCHITECTURE}
