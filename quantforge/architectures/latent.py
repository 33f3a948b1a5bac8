"""Multi-head latent attention (MLA): queries, keys and values are computed from narrow latents.

With a norm ``n`` of the block's input ``h``, and a norm for each latent:

    q = W_qb norm_q(W_qa n(h))          or, without a query latent, q = W_q n(h)
    [latent, k_rotary] = W_kva n(h);    per head: [k, v] = W_kvb norm_kv(latent)
    y = W_o attention(q, [k, k_rotary], v)

Scales of the inputs of ``W_qb`` and ``W_kvb`` fold into the inner norms. Every head has its own keys and values, so a
scale of the input of ``W_o`` folds, channel by channel, into the ``v`` rows of ``W_kvb``, which alternate with its
``k`` rows from head to head.

An indexer selects the tokens that are attended to: it reads the block's input and the query latent. The projection that
weighs its heads is as narrow as a router, and is not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.architectures import FoldKind, Parameter, ScaleFold, SharedInput
from quantforge.architectures.architecture import SizeSource
from quantforge.architectures.declare import (
    FOLD_INTO_ATTENTION_NORM,
    Mixer,
    linear_parameters,
    norm_parameters,
)
from quantforge.architectures.layer_kind import latent_state
from quantforge.errors import InputError

MODULE = "self_attn"
Q_PROJ, Q_A_PROJ, Q_B_PROJ, KV_A_PROJ, KV_B_PROJ, OUT_PROJ = (
    f"{MODULE}.{name}"
    for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
)
Q_NORM, KV_NORM = f"{MODULE}.q_a_layernorm", f"{MODULE}.kv_a_layernorm"
INDEX_Q, INDEX_K, INDEX_WEIGHTS = (
    f"{MODULE}.indexer.{name}" for name in ("wq_b", "wk", "weights_proj")
)
INDEXER_SIZES: Mapping[str, tuple[str, ...]] = {
    "index_heads": ("index_n_heads",),
    "index_head": ("index_head_dim",),
}
# Fields of an architecture: which rows of W_kvb are keys and which are values, for every head.
SLICES: Mapping[str, tuple[str, ...]] = {KV_B_PROJ: ("nope", "v_head")}
SLICE_LABELS: Mapping[str, tuple[str, ...]] = {KV_B_PROJ: ("k", "v")}


def latent_attention(bias: str = "", *, query_latent: bool = True, indexer: bool = False) -> Mixer:
    """Declare latent attention.

    Args:
        bias: bias of the projections of the block's input and of the output, see `linear_parameters`.
        query_latent: whether there is a query latent.
        indexer: whether there is an indexer.
    """
    query_width = "heads*nope+heads*rope"
    input_projections: tuple[str, ...] = (Q_A_PROJ if query_latent else Q_PROJ, KV_A_PROJ)
    parameters = [
        *linear_parameters(KV_A_PROJ, "kv_rank+rope", "hidden", bias),
        *norm_parameters(KV_NORM, dimension="kv_rank"),
        *linear_parameters(KV_B_PROJ, "heads*nope+heads*v_head", "kv_rank"),
        *linear_parameters(OUT_PROJ, "hidden", "heads*v_head", bias),
    ]
    inputs = [
        SharedInput((KV_B_PROJ,), KV_B_PROJ, ScaleFold(FoldKind.NORM, KV_NORM)),
        SharedInput((OUT_PROJ,), OUT_PROJ, ScaleFold(FoldKind.ROWS, KV_B_PROJ, "v")),
    ]
    if query_latent:
        parameters += linear_parameters(Q_A_PROJ, "q_rank", "hidden", bias)
        parameters += norm_parameters(Q_NORM, dimension="q_rank")
        parameters += linear_parameters(Q_B_PROJ, query_width, "q_rank")
    else:
        parameters += linear_parameters(Q_PROJ, query_width, "hidden")
    query_latent_readers = (Q_B_PROJ, INDEX_Q) if indexer else (Q_B_PROJ,)
    if query_latent:
        inputs.insert(
            0, SharedInput(query_latent_readers, MODULE, ScaleFold(FoldKind.NORM, Q_NORM))
        )
    if indexer:
        parameters += linear_parameters(INDEX_Q, "index_heads*index_head", "q_rank")
        parameters += linear_parameters(INDEX_K, "index_head", "hidden")
        parameters += norm_parameters(f"{MODULE}.indexer.k_norm", dimension="index_head", bias=True)
        parameters.append(Parameter(f"{INDEX_WEIGHTS}.weight", ("index_heads", "hidden")))
        input_projections = (*input_projections, INDEX_K)
    unquantized_readers = (INDEX_WEIGHTS,) if indexer else ()
    inputs.insert(
        0,
        SharedInput(
            input_projections,
            MODULE,
            FOLD_INTO_ATTENTION_NORM,
            unquantized_readers=unquantized_readers,
        ),
    )
    cache_states = latent_state("kv_rank+rope") + (latent_state("index_head") if indexer else ())
    return Mixer(tuple(parameters), tuple(inputs), states=cache_states)


def query_latent_width(config: Mapping[str, Any]) -> int:
    """Return the width of the query latent; 1 if there is none.

    Raises:
        InputError: the configured value is not a size.
    """
    width = config.get("q_lora_rank")
    if width is None:
        return 1
    if type(width) is not int or width < 1:
        raise InputError(
            f"q_lora_rank = {str(width)[:40]!r}", "a size, or null", subject="config.json"
        )
    return width


SIZES: Mapping[str, SizeSource] = {
    "q_rank": query_latent_width,
    "kv_rank": ("kv_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "v_head": ("v_head_dim",),
}
