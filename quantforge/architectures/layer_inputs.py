"""Vectors that a token has for every layer, as parts of a model: where they come from, and what a layer does with its.

They are made of an embedding of their own and of the first hidden states. A layer multiplies the activation of a gate
by its vector and projects that to the states: of the product no linear of the layer is a factor.
"""

from __future__ import annotations

from quantforge.architectures import Parameter, SharedInput
from quantforge.architectures.declare import Mixer, linear, norms

WIDTH = "hidden_size_per_layer_input"  # 0 where there are none
_GATE, _OUT = "per_layer_input_gate", "per_layer_projection"
LAYER_INPUT = Mixer(
    (
        *linear(_GATE, "each_layer", "hidden"),
        *linear(_OUT, "hidden", "each_layer"),
        *norms("post_per_layer_input_norm"),
    ),
    (SharedInput((_GATE,), _GATE), SharedInput((_OUT,), _OUT)),
)
OUTER = (
    Parameter("model.embed_tokens_per_layer.weight", ("each_vocab", "layers*each_layer")),
    *linear("model.per_layer_model_projection", "layers*each_layer", "hidden"),
    *norms("model.per_layer_projection_norm", dimension="each_layer"),
)
