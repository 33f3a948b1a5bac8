"""OPT: LayerNorm with bias, learned positions (two rows of padding before the first), ReLU, tied head.

ReLU passes positive factors, ``relu(x / s) = relu(x) / s``: the first MLP matrix absorbs a scale of the second's
input. The 350M model normalises after each sub-block and projects its embeddings; it is not covered.
"""

from quantforge.architectures import (
    Architecture,
    FoldKind,
    Parameter,
    ScaleFold,
    SharedInput,
)
from quantforge.architectures.declare import ALWAYS, Mixer, attention, layer, linear, norms

ARCHITECTURE = Architecture(
    model_type="opt",
    blocks="model.decoder.layers",
    outer=(
        Parameter("model.decoder.embed_tokens.weight", ("vocab", "hidden")),
        Parameter("model.decoder.embed_positions.weight", ("positions+2", "hidden")),
        *norms("model.decoder.final_layer_norm", bias=True),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=(
        layer(
            norms("self_attn_layer_norm", "final_layer_norm", bias=True),
            attention(
                ALWAYS, norm=ScaleFold(FoldKind.NORM, "self_attn_layer_norm"), output="out_proj"
            ),
            Mixer(
                (*linear("fc1", "ffn", "hidden", ALWAYS), *linear("fc2", "hidden", "ffn", ALWAYS)),
                (
                    SharedInput(("fc1",), "fc1", ScaleFold(FoldKind.NORM, "final_layer_norm")),
                    SharedInput(("fc2",), "fc2", ScaleFold(FoldKind.ROWS, "fc1")),
                ),
                inner_copies=2,
            ),
        ),
    ),
    embedding="model.decoder.embed_tokens",
    head="lm_head",
    final_norm="model.decoder.final_layer_norm",
    prefixes=(("", ""), ("", "model.")),
    requires={
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    },
    defaults={"tie_word_embeddings": True},
)
FAMILIES = {"opt": ARCHITECTURE}
