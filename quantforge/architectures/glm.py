"""GLM 4 of 2024: a llama with gate and up in one matrix, rotating every other value of the first half of a head."""

from dataclasses import replace

from quantforge.architectures import llama
from quantforge.architectures.declare import FUSED_LABELS, FUSED_SLICES, attention, fused_mlp, layer
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.llama_cpp import QKV_BIASES, Family

MIXERS = (attention("attention_bias", output_bias=""), fused_mlp())
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="glm",
    kinds=(layer(llama.NORMS, *MIXERS),),
    slices=FUSED_SLICES,
    slice_labels=FUSED_LABELS,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
    graph=DecoderGraph(neighbours=True),
    gguf=Family("chatglm", biases=QKV_BIASES, class_name="GlmForCausalLM", heads_fill=True),
)
