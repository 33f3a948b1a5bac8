"""Kimi Linear, and Kimi K2.5 and later: a deepseek_v3 with a vision tower.

Kimi K2 is a deepseek_v3. Kimi Linear has delta attention in three of four layers, latent attention in the others, and
experts after a dense first layer. Kimi delta attention is a gated delta net with a decay per channel. With the block's
normalized input ``h``, and a short convolution for each of q, k and v:

    q, k, v = silu(conv(W h));   b = sigmoid(W_b h);   g = -exp(A) softplus(W_fb W_fa h + dt)
    S = diag(exp(g)) S (1 - b k k^T) + b v k^T;   y = W_o (norm(S q) * sigmoid(W_gb W_ga h))

Gates are computed through low-rank pairs of matrices; a scale of the input of the second one folds into the rows of the
first. The convolutions, the decays ``A`` and their offsets are not quantized. Files store three convolutions, the
running model one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quantforge.architectures import FoldKind, Parameter, ScaleFold, SharedInput, latent
from quantforge.architectures.declare import (
    FOLD_INTO_ATTENTION_NORM,
    Mixer,
    gated_mlp,
    linear_parameters,
    multimodal_with_decoder_class,
    norm_parameters,
)
from quantforge.architectures.dimensions import listed_layer_types
from quantforge.architectures.families import deepseek, llama
from quantforge.architectures.layer_kind import convolution_state, recurrent_state
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    kinds_by_mlp_layer_types,
    router_parameters,
    shared_experts,
    single_experts,
)
from quantforge.errors import InputError

KIMI_K25 = multimodal_with_decoder_class(
    deepseek.DEEPSEEK_V3,
    "kimi_k25",
    (r"(model\.)?(vision_tower|mm_projector|multi_modal_projector)\..*",),
    (
        ("language_model.model.blocks.", "model.layers."),  # as transformers 5 writes them
        ("language_model.", ""),
        ("model.language_model.", "model."),
    ),
)


LINEAR, FULL = "linear_attention", "full_attention"
MOE_MODULE = "block_sparse_moe"
ATTENTION_MODULE = "self_attn"
# A module of the running model; files store its tensors under the name of the attention module.
FORGET_GATE = f"{ATTENTION_MODULE}.forget_gate"
JOINED_CONVOLUTIONS = {
    f"{ATTENTION_MODULE}.conv1d.weight": tuple(
        f"{ATTENTION_MODULE}.{name}_conv1d.weight" for name in "qkv"
    )
}
KDA_WIDTH = "kda_heads*kda_head"
_NESTED_SIZES: Mapping[str, tuple[str, int]] = {
    "linear_num_heads": ("num_heads", 32),
    "linear_head_dim": ("head_dim", 128),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
}
SHARED_EXPERTS: tuple[Mixer, ...] = tuple(
    replace(
        part,
        parameters=tuple(
            replace(item, stored=item.name.replace("mlp.", f"{MOE_MODULE}.", 1))
            for item in part.parameters
        ),
    )
    for part in shared_experts("shared*inner")
    if isinstance(part, Mixer)
)
MIXTURE: tuple[Mixer | tuple[Parameter, ...], ...] = (
    router_parameters(
        "mlp.gate",
        stored=f"{MOE_MODULE}.gate.weight",
        correction="mlp.gate.e_score_correction_bias",
        stored_correction=f"{MOE_MODULE}.gate.e_score_correction_bias",
    ),
    *SHARED_EXPERTS,
    single_experts("inner", stored=("w1", "w3", "w2"), stored_module=f"{MOE_MODULE}.experts"),
)


def delta_attention() -> Mixer:
    """Declare Kimi delta attention."""
    q, k, v, out, b, g_a, g_b = (
        f"{ATTENTION_MODULE}.{name}_proj" for name in ("q", "k", "v", "o", "b", "g_a", "g_b")
    )
    f_a, f_b = f"{FORGET_GATE}.f_a_proj", f"{FORGET_GATE}.f_b_proj"
    decay_shapes = {f_a: ("kda_head", "hidden"), f_b: (KDA_WIDTH, "kda_head")}
    return Mixer(
        (
            *(item for name in (q, k, v) for item in linear_parameters(name, KDA_WIDTH, "hidden")),
            *(
                Parameter(f"{ATTENTION_MODULE}.{name}_conv1d.weight", (KDA_WIDTH, "1", "kernel"))
                for name in "qkv"
            ),
            Parameter(f"{FORGET_GATE}.dt_bias", (KDA_WIDTH,), stored=f"{ATTENTION_MODULE}.dt_bias"),
            Parameter(
                f"{FORGET_GATE}.A_log",
                ("1", "1", "kda_heads", "1"),
                stored=f"{ATTENTION_MODULE}.A_log",
            ),
            *(
                Parameter(
                    f"{name}.weight",
                    shape,
                    stored=name.replace(FORGET_GATE, ATTENTION_MODULE) + ".weight",
                )
                for name, shape in decay_shapes.items()
            ),
            *linear_parameters(b, "kda_heads", "hidden"),
            *linear_parameters(g_a, "kda_head", "hidden"),
            *linear_parameters(g_b, KDA_WIDTH, "kda_head"),
            *norm_parameters(f"{ATTENTION_MODULE}.o_norm", dimension="kda_head"),
            *linear_parameters(out, "hidden", KDA_WIDTH),
        ),
        (
            SharedInput((q, k, v, f_a, b, g_a), ATTENTION_MODULE, FOLD_INTO_ATTENTION_NORM),
            SharedInput((f_b,), f_b, ScaleFold(FoldKind.ROWS, f_a)),
            SharedInput((g_b,), g_b, ScaleFold(FoldKind.ROWS, g_a)),
            SharedInput((out,), out),
        ),
        states=(
            *convolution_state(f"3*{KDA_WIDTH}"),
            *recurrent_state("kda_heads", "kda_head*kda_head"),
        ),
    )


ATTENTION_BY_LAYER_TYPE = {
    LINEAR: delta_attention(),
    FULL: latent.latent_attention(query_latent=False),
}


def layer_kind_names(config: Mapping[str, Any]) -> list[str]:
    """Return the name of the kind of every layer; errors as `attention_types` and `kinds_by_mlp_layer_types`."""
    pairs = zip(attention_types(config), kinds_by_mlp_layer_types(config), strict=False)
    return [f"{attention_type}/{mlp_kind}" for attention_type, mlp_kind in pairs]


def attention_types(config: Mapping[str, Any]) -> list[str]:
    """Return the attention type of every layer, from ``layer_types`` or else ``full_attn_layers``.

    If neither is present, every fourth layer after the first has full attention.

    Raises:
        InputError: ``full_attn_layers`` is not a list.
    """
    if (layer_types := listed_layer_types(config)) is not None:
        return layer_types
    layers = range(config["num_hidden_layers"])
    nested = config.get("linear_attn_config")
    full = nested.get("full_attn_layers") if isinstance(nested, Mapping) else None
    if full is None:
        return [FULL if index and index % 4 == 0 else LINEAR for index in layers]
    if not isinstance(full, list):
        raise InputError(
            f"full_attn_layers = {str(full)[:60]}",
            "a list of layers, counted from 1",
            subject="config.json",
        )
    return [FULL if index + 1 in full else LINEAR for index in layers]


def _nested_size(config: Mapping[str, Any], key: str) -> int:
    """Return a size, which published files declare in a nested configuration.

    Raises:
        InputError: it is not a size.
    """
    name, default = _NESTED_SIZES[key]
    nested = config.get("linear_attn_config")
    nested_value = nested.get(name) if isinstance(nested, Mapping) else None
    size = config.get(key, default) if nested_value is None else nested_value
    if type(size) is not int or not 0 < size < 1 << 16:
        raise InputError(f"{key} = {str(size)[:40]!r}", "a size", subject="config.json")
    return size


KIMI_LINEAR = replace(
    deepseek.DEEPSEEK_V3,
    model_type="kimi_linear",
    kinds=tuple(
        kind
        for name, mixer in ATTENTION_BY_LAYER_TYPE.items()
        for kind in dense_or_sparse(
            llama.NORMS, mixer, dense=gated_mlp(), sparse=MIXTURE, prefix=f"{name}/"
        )
    ),
    layer_kind_names=layer_kind_names,
    has_weight_conversion=True,
    joined_tensors=JOINED_CONVOLUTIONS,
    # transformers writes the dense first layer as if it were a mixture.
    prefixes=(("", ""), (f"model.layers.0.{MOE_MODULE}.", "model.layers.0.mlp.")),
    sizes={
        **{key: place for key, place in latent.SIZES.items() if key != "q_rank"},
        "kda_heads": partial(_nested_size, key="linear_num_heads"),
        "kda_head": partial(_nested_size, key="linear_head_dim"),
        "kernel": partial(_nested_size, key="linear_conv_kernel_dim"),
        "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
        "inner": ("moe_intermediate_size",),
        "shared": ("num_shared_experts", "n_shared_experts"),
    },
    required_values={"q_lora_rank": None},
    gguf=None,
    defaults={
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
)


FAMILIES = {"kimi_k25": KIMI_K25, "kimi_linear": KIMI_LINEAR}
