"""Apertus: a qwen3 in its attention, and an MLP without gate, of xIELU, whose two slopes are learned for each layer."""

from dataclasses import replace

from quantforge.architectures import FoldKind, Parameter, ScaleFold
from quantforge.architectures.declare import HEAD_NORMS, attention, layer, norms, plain_mlp
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.families import llama

ACTIVATION = tuple(Parameter(f"mlp.act_fn.{name}", ("1",)) for name in ("alpha_p", "alpha_n"))
# Of the activation function, the same in every model, and stored with each layer.
CONSTANTS = tuple(Parameter(f"mlp.act_fn.{name}", ()) for name in ("beta", "eps"))
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="apertus",
    kinds=(
        layer(
            norms("attention_layernorm", "feedforward_layernorm"),
            HEAD_NORMS,
            ACTIVATION,
            CONSTANTS,
            attention("attention_bias", norm=ScaleFold(FoldKind.NORM, "attention_layernorm")),
            plain_mlp(norm=ScaleFold(FoldKind.NORM, "feedforward_layernorm")),
        ),
    ),
    requires={"hidden_act": "xielu"},
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0},
    graph=DecoderGraph(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
    gguf=None,
)
FAMILIES = {"apertus": ARCHITECTURE}
