"""Apertus: the attention of qwen3, and an ungated MLP with xIELU, whose two slopes are learned."""

from dataclasses import replace

from quantforge.architectures import FoldKind, Parameter, ScaleFold
from quantforge.architectures.declare import (
    HEAD_NORMS,
    attention,
    compose_layer,
    norm_parameters,
    plain_mlp,
)
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama

ACTIVATION_SLOPES = tuple(
    Parameter(f"mlp.act_fn.{name}", ("1",)) for name in ("alpha_p", "alpha_n")
)
# Constants of the activation function, the same in every model but stored with each layer.
ACTIVATION_CONSTANTS = tuple(Parameter(f"mlp.act_fn.{name}", ()) for name in ("beta", "eps"))
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="apertus",
    kinds=(
        compose_layer(
            norm_parameters("attention_layernorm", "feedforward_layernorm"),
            HEAD_NORMS,
            ACTIVATION_SLOPES,
            ACTIVATION_CONSTANTS,
            attention("attention_bias", norm=ScaleFold(FoldKind.NORM, "attention_layernorm")),
            plain_mlp(norm=ScaleFold(FoldKind.NORM, "feedforward_layernorm")),
        ),
    ),
    required_values={"hidden_act": "xielu"},
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0},
    graph=DecoderGraph(
        norm_before_attention="attention_layernorm", norm_before_mlp="feedforward_layernorm"
    ),
    gguf=None,
)
FAMILIES = {"apertus": ARCHITECTURE}
