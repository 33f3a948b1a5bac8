"""OPT: LayerNorms with bias, learned positions (after two padding rows), ReLU, tied head.

ReLU commutes with positive scales, ``relu(x / s) = relu(x) / s``, so a scale of the input of the second MLP matrix
folds into the first. The 350M model, which normalizes after each sub-block and projects its embeddings, is not
supported.
"""

from quantforge.architectures import (
    Architecture,
    FoldKind,
    Parameter,
    ScaleFold,
    SharedInput,
)
from quantforge.architectures.declare import (
    ALWAYS_BIAS,
    Mixer,
    attention,
    compose_layer,
    linear_parameters,
    norm_parameters,
)

ARCHITECTURE = Architecture(
    model_type="opt",
    blocks="model.decoder.layers",
    outer_parameters=(
        Parameter("model.decoder.embed_tokens.weight", ("vocab", "hidden")),
        Parameter("model.decoder.embed_positions.weight", ("positions+2", "hidden")),
        *norm_parameters("model.decoder.final_layer_norm", bias=True),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=(
        compose_layer(
            norm_parameters("self_attn_layer_norm", "final_layer_norm", bias=True),
            attention(
                ALWAYS_BIAS,
                norm=ScaleFold(FoldKind.NORM, "self_attn_layer_norm"),
                output="out_proj",
            ),
            Mixer(
                (
                    *linear_parameters("fc1", "ffn", "hidden", ALWAYS_BIAS),
                    *linear_parameters("fc2", "hidden", "ffn", ALWAYS_BIAS),
                ),
                (
                    SharedInput(("fc1",), "fc1", ScaleFold(FoldKind.NORM, "final_layer_norm")),
                    SharedInput(("fc2",), "fc2", ScaleFold(FoldKind.ROWS, "fc1")),
                ),
                mlp_activations=2,
            ),
        ),
    ),
    embedding="model.decoder.embed_tokens",
    head="lm_head",
    final_norm="model.decoder.final_layer_norm",
    prefixes=(("", ""), ("", "model.")),
    required_values={
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    },
    defaults={"tie_word_embeddings": True},
)
FAMILIES = {"opt": ARCHITECTURE}
