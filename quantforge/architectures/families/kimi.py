"""Kimi Linear, and Kimi K2.5 and later: a deepseek_v3 beside a vision tower (Kimi K2 is a deepseek_v3).

Kimi Linear has delta attention in three layers of four, latent attention in the others, experts after a dense layer.
Kimi delta attention is a gated delta net that forgets channel by channel. With the block's input ``h`` after its norm,
each of q, k and v after a convolution over a few tokens of its own:

    q, k, v = silu(conv(W h));   b = sigmoid(W_b h);   g = -exp(A) softplus(W_fb W_fa h + dt)
    S = diag(exp(g)) S (1 - b k k^T) + b v k^T;   y = W_o (norm(S q) * sigmoid(W_gb W_ga h))

Gates are made through narrow matrices, whose rows absorb for the second ones. The convolutions, the decays ``A`` and
their offsets stay as they are. Files hold three convolutions, the running model one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quantforge.architectures import FoldKind, Parameter, ScaleFold, SharedInput, latent
from quantforge.architectures.declare import (
    BEFORE_ATTENTION,
    Mixer,
    beside_towers,
    gated_mlp,
    linear,
    norms,
)
from quantforge.architectures.dimensions import layer_types
from quantforge.architectures.families import deepseek, llama
from quantforge.architectures.layer_kind import convolution, recurrent
from quantforge.architectures.mixtures import (
    dense_or_sparse,
    experts_one_by_one,
    listed,
    router,
    shared_experts,
)
from quantforge.errors import InputError

KIMI_K25 = beside_towers(
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
STORED = "block_sparse_moe"
HERE = "self_attn"
# Of the running model; files name its tensors as those of the attention.
GATE = f"{HERE}.forget_gate"
JOINED = {f"{HERE}.conv1d.weight": tuple(f"{HERE}.{name}_conv1d.weight" for name in "qkv")}
WIDTH = "kda_heads*kda_head"
_NESTED: Mapping[str, tuple[str, int]] = {
    "linear_num_heads": ("num_heads", 32),
    "linear_head_dim": ("head_dim", 128),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
}
SHARED: tuple[Mixer, ...] = tuple(
    replace(
        part,
        parameters=tuple(
            replace(item, stored=item.name.replace("mlp.", f"{STORED}.", 1))
            for item in part.parameters
        ),
    )
    for part in shared_experts("shared*inner")
    if isinstance(part, Mixer)
)
MIXTURE: tuple[Mixer | tuple[Parameter, ...], ...] = (
    router(
        "mlp.gate",
        stored=f"{STORED}.gate.weight",
        correction="mlp.gate.e_score_correction_bias",
        stored_correction=f"{STORED}.gate.e_score_correction_bias",
    ),
    *SHARED,
    experts_one_by_one("inner", stored=("w1", "w3", "w2"), stored_module=f"{STORED}.experts"),
)


def delta_attention() -> Mixer:
    """Declare Kimi delta attention."""
    q, k, v, out, b, g_a, g_b = (
        f"{HERE}.{name}_proj" for name in ("q", "k", "v", "o", "b", "g_a", "g_b")
    )
    f_a, f_b = f"{GATE}.f_a_proj", f"{GATE}.f_b_proj"
    narrow = {f_a: ("kda_head", "hidden"), f_b: (WIDTH, "kda_head")}
    return Mixer(
        (
            *(item for name in (q, k, v) for item in linear(name, WIDTH, "hidden")),
            *(Parameter(f"{HERE}.{name}_conv1d.weight", (WIDTH, "1", "kernel")) for name in "qkv"),
            Parameter(f"{GATE}.dt_bias", (WIDTH,), stored=f"{HERE}.dt_bias"),
            Parameter(f"{GATE}.A_log", ("1", "1", "kda_heads", "1"), stored=f"{HERE}.A_log"),
            *(
                Parameter(f"{name}.weight", shape, stored=name.replace(GATE, HERE) + ".weight")
                for name, shape in narrow.items()
            ),
            *linear(b, "kda_heads", "hidden"),
            *linear(g_a, "kda_head", "hidden"),
            *linear(g_b, WIDTH, "kda_head"),
            *norms(f"{HERE}.o_norm", dimension="kda_head"),
            *linear(out, "hidden", WIDTH),
        ),
        (
            SharedInput((q, k, v, f_a, b, g_a), HERE, BEFORE_ATTENTION),
            SharedInput((f_b,), f_b, ScaleFold(FoldKind.ROWS, f_a)),
            SharedInput((g_b,), g_b, ScaleFold(FoldKind.ROWS, g_a)),
            SharedInput((out,), out),
        ),
        states=(*convolution(f"3*{WIDTH}"), *recurrent("kda_heads", "kda_head*kda_head")),
    )


TOKENS = {LINEAR: delta_attention(), FULL: latent.latent_attention(queries=False)}


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer; errors as `mixers` and `listed`."""
    pairs = zip(mixers(config), listed(config), strict=False)
    return [f"{tokens}/{channels}" for tokens, channels in pairs]


def mixers(config: Mapping[str, Any]) -> list[str]:
    """Return the attention of every layer: as ``layer_types`` lists them, else full where ``full_attn_layers`` says so.

    Without either, it is full in every fourth layer after the first.

    Raises:
        InputError: ``full_attn_layers`` is no list.
    """
    if (listed := layer_types(config)) is not None:
        return listed
    layers = range(config["num_hidden_layers"])
    nested = config.get("linear_attn_config")
    full = nested.get("full_attn_layers") if isinstance(nested, Mapping) else None
    if full is None:
        return [FULL if index and index % 4 == 0 else LINEAR for index in layers]
    if not isinstance(full, list):
        raise InputError(
            f"config.json: full_attn_layers = {str(full)[:60]}", "a list of layers, counted from 1"
        )
    return [FULL if index + 1 in full else LINEAR for index in layers]


def _stated(config: Mapping[str, Any], key: str) -> int:
    """Return a size, which published files state in a configuration of its own.

    Raises:
        InputError: it is none.
    """
    name, otherwise = _NESTED[key]
    nested = config.get("linear_attn_config")
    own = nested.get(name) if isinstance(nested, Mapping) else None
    size = config.get(key, otherwise) if own is None else own
    if type(size) is not int or not 0 < size < 1 << 16:
        raise InputError(f"config.json: {key} = {str(size)[:40]!r}", "a size")
    return size


KIMI_LINEAR = replace(
    deepseek.DEEPSEEK_V3,
    model_type="kimi_linear",
    kinds=tuple(
        kind
        for name, mixer in TOKENS.items()
        for kind in dense_or_sparse(
            llama.NORMS, mixer, dense=gated_mlp(), sparse=MIXTURE, prefix=f"{name}/"
        )
    ),
    kind_of=kinds,
    converted=True,
    joined=JOINED,
    # transformers writes the dense first layer as if it were a mixture.
    prefixes=(("", ""), (f"model.layers.0.{STORED}.", "model.layers.0.mlp.")),
    sizes={
        **{key: place for key, place in latent.SIZES.items() if key != "q_rank"},
        "kda_heads": partial(_stated, key="linear_num_heads"),
        "kda_head": partial(_stated, key="linear_head_dim"),
        "kernel": partial(_stated, key="linear_conv_kernel_dim"),
        "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
        "inner": ("moe_intermediate_size",),
        "shared": ("num_shared_experts", "n_shared_experts"),
    },
    requires={"q_lora_rank": None},
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
