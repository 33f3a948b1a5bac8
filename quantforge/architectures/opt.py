"""OPT: LayerNorm with bias, learned positions (two rows of padding before the first), ReLU, tied head.

ReLU passes positive factors, ``relu(x / s) = relu(x) / s``: the first MLP matrix absorbs a scale of the second's
input. The 350M model normalises after each sub-block and projects its embeddings; it is not covered.
"""

from quantforge.architectures import (
    Absorber,
    Absorbs,
    Architecture,
    LayerKind,
    Parameter,
    SharedInput,
)
from quantforge.architectures.declare import ALWAYS, linear, norms
from quantforge.architectures.layer_kind import keys_and_values

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
        LayerKind(
            parameters=(
                *norms("self_attn_layer_norm", "final_layer_norm", bias=True),
                *linear("self_attn.q_proj", "q", "hidden", ALWAYS),
                *linear("self_attn.k_proj", "kv", "hidden", ALWAYS),
                *linear("self_attn.v_proj", "kv", "hidden", ALWAYS),
                *linear("self_attn.out_proj", "hidden", "q", ALWAYS),
                *linear("fc1", "ffn", "hidden", ALWAYS),
                *linear("fc2", "hidden", "ffn", ALWAYS),
            ),
            inputs=(
                SharedInput(
                    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                    "self_attn",
                    Absorber(Absorbs.NORM, "self_attn_layer_norm"),
                ),
                SharedInput(
                    ("self_attn.out_proj",),
                    "self_attn.out_proj",
                    Absorber(Absorbs.ROWS, "self_attn.v_proj"),
                    heads=True,
                ),
                SharedInput(("fc1",), "fc1", Absorber(Absorbs.NORM, "final_layer_norm")),
                SharedInput(("fc2",), "fc2", Absorber(Absorbs.ROWS, "fc1")),
            ),
            inner_copies=2,
            states=keys_and_values(),
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
