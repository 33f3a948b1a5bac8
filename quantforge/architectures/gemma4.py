"""Gemma 4: heads of full layers are wider, the last layers read keys and values of earlier ones.

Norms multiply by w, and values are normalised too, without a weight, so that nothing absorbs a scale of what the output
projection reads. In the full layers of some models keys are the values as well (``attention_k_eq_v``). A small vector
of each token for every layer, by which the layer's own gate is multiplied, makes a third half of a block; it comes from
an embedding and from the first states. The mixture of the models that have one stands beside the MLP, and its router
reads what neither of their norms has touched.
"""

from __future__ import annotations

from quantforge.architectures import Absorber, Absorbs, Architecture, Parameter, SharedInput
from quantforge.architectures.declare import Mixer, gated_mlp, layer, linear, norms, only
from quantforge.architectures.gemma4_layers import (
    FULL,
    K_EQ_V,
    MIXTURE,
    PERIOD,
    SHARED,
    SLIDING,
    TURNS,
)
from quantforge.architectures.layer_inputs import LAYER_INPUT, OUTER, WIDTH
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import Family
from quantforge.architectures.mixtures import experts_in_one
from quantforge.architectures.sequence_state import keys_and_values
from quantforge.architectures.shared_keys import COUNT
from quantforge.architectures.tower_names import ALONE, WITHIN_TOWERS

LAYERS = "quantforge.architectures.gemma4_layers"
GRAPH = "quantforge.architectures.gemma4_graph"
NORMS = (
    Parameter("layer_scalar", ("1",)),
    *norms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
)
ROUTER = (
    Parameter("router.scale", ("hidden",)),
    Parameter("router.per_expert_scale", ("experts",)),
    Parameter("router.proj.weight", ("experts", "hidden")),
    *norms(
        "post_feedforward_layernorm_1",
        "post_feedforward_layernorm_2",
        "pre_feedforward_layernorm_2",
    ),
)


def attention(head: str, kv_heads: str, values_when: str = "", *, shared: bool = False) -> Mixer:
    """Declare attention with heads of its own size; ``shared``: it makes no keys and no values.

    Args:
        head: the dimension of a head.
        kv_heads: that counts heads of keys.
        values_when: the key that says whether there is a projection to values.
        shared: whether it reads those of an earlier layer.
    """
    q, k, v, out = (f"self_attn.{name}_proj" for name in ("q", "k", "v", "o"))
    bias, rows = "attention_bias", f"{kv_heads}*{head}"
    own = (
        *linear(k, rows, "hidden", bias),
        *only(values_when, linear(v, rows, "hidden", bias)),
        *norms("self_attn.k_norm", dimension=head),
    )
    return Mixer(
        (
            *linear(q, f"heads*{head}", "hidden", bias),
            *norms("self_attn.q_norm", dimension=head),
            *(() if shared else own),
            *linear(out, "hidden", f"heads*{head}", bias),
        ),
        (
            SharedInput(
                (q,) if shared else (q, k, v),
                "self_attn",
                Absorber(Absorbs.NORM, "input_layernorm"),
            ),
            SharedInput((out,), out),
        ),
        states=() if shared else keys_and_values(kv_heads, head),
    )


BEFORE_MLP = Absorber(Absorbs.NORM, "pre_feedforward_layernorm")
REST = (
    only(MIXTURE, ROUTER),
    only(MIXTURE, experts_in_one("inner", module="experts")),
    only(WIDTH, LAYER_INPUT),
)
TOKENS = {SLIDING: ("head", "kv_heads"), FULL: ("full_head", "full_kv_heads", f"!{K_EQ_V}")}
ARCHITECTURE = Architecture(
    model_type="gemma4_text",
    blocks="model.layers",
    outer=(
        Parameter("model.embed_tokens.weight", ("vocab", "hidden")),
        *only(WIDTH, OUTER),
        *norms("model.norm"),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=tuple(
        layer(
            NORMS,
            attention(*place, shared=bool(word)),
            gated_mlp(norm=BEFORE_MLP, width="shared_ffn" if word else "ffn"),
            *REST,
            name=f"{name}/{word}" if word else name,
        )
        for name, place in TOKENS.items()
        for word in ("", SHARED)
    ),
    kind_of=f"{LAYERS}.kinds",
    sizes={
        "full_head": (f"{LAYERS}.full_head",),
        "full_kv_heads": (f"{LAYERS}.full_kv_heads",),
        "shared_ffn": (f"{LAYERS}.shared_width",),
        "each_layer": (f"{LAYERS}.each_layer",),
        "each_vocab": ("vocab_size_per_layer_input",),
        "experts": (f"{LAYERS}.experts",),
        "inner": (f"{LAYERS}.inner_width",),
    },
    embedding="model.embed_tokens",
    head="lm_head",
    final_norm="model.norm",
    prefixes=(("", ""), ("language_model.", ""), ("model.language_model.", "model.")),
    unmapped={"gemma4": rf"{ALONE}|language_model\.", "gemma4_text": WITHIN_TOWERS},
    # Published files hold what layers without keys and values of their own do not read.
    droppable=(
        r".*rotary_emb\.inv_freq",
        r".*\.self_attn\.[kv]_scale",
        r"(model\.|language_model\.)*layers\.\d+\.self_attn\.([kv]_proj|[kv]_norm)\.(weight|bias)",
    ),
    foreign=(r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*",),
    uncovered=f"{LAYERS}.uncovered",
    defaults={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "vocab_size_per_layer_input": 262144,
        WIDTH: 256,
        COUNT: 0,
        "sliding_window": 512,
        "rope_parameters": TURNS,
    },
    float16=False,
    gguf=Family(
        "gemma4",
        class_name="Gemma4ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        windowed=True,
        divided_head="full_head",
        scalings=("proportional",),
        experts=MIXTURE,
        used="top_k_experts",
        sizes={
            "attention.key_length": "full_head",
            "attention.value_length": "full_head",
            "attention.key_length_swa": "head",
            "attention.value_length_swa": "head",
            "rope.dimension_count_swa": "head",
        },
        numbers={
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": COUNT,
            "embedding_length_per_layer_input": WIDTH,
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        reals={"final_logit_softcapping": f"{GRAPH}.softcap"},
        lists={
            "attention.head_count_kv": f"{GRAPH}.kv_heads",
            "attention.sliding_window_pattern": f"{GRAPH}.slides",
            "feed_forward_length": f"{GRAPH}.widths",
        },
        names={
            "layer_scalar": "layer_output_scale.weight",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            **{
                f"experts.{name}_proj.weight": f"ffn_{name}_exps.weight"
                for name in ("gate", "up", "down")
            },
        },
        obstacle=f"{GRAPH}.obstacle",
        restated="quantforge.architectures.gemma4_keys.restated",
    ),
    text_config="text_config",
    projector={"gemma4": "quantforge.architectures.gemma4_tower.projector"},
    replayed=(WIDTH, COUNT),
    windows=WindowRule(width=512, period=PERIOD, full_last=True),
)
