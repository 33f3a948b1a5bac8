"""Multi-head latent attention: queries, keys and values made of narrow latents, each after a norm of its own.

With a norm ``n`` of the block's input ``h``:

    q = W_qb norm_q(W_qa n(h))          or, without a latent for queries, q = W_q n(h)
    [latent, k_rotary] = W_kva n(h);    per head: [k, v] = W_kvb norm_kv(latent)
    y = W_o attention(q, [k, k_rotary], v)

The inner norms absorb for ``W_qb`` and ``W_kvb``. Every head has keys and values of its own, so that the ``v`` rows
of ``W_kvb``, which alternate with its ``k`` rows from head to head, absorb channel by channel for ``W_o``.

An indexer chooses the tokens that are attended to: it reads the block's input and the latent of the queries. What
weighs its heads is as narrow as a router, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.architectures import FoldKind, Parameter, ScaleFold, SharedInput
from quantforge.architectures.architecture import SizePlace
from quantforge.architectures.declare import BEFORE_ATTENTION, Mixer, linear, norms
from quantforge.architectures.layer_kind import latent
from quantforge.errors import InputError

HERE = "self_attn"
Q, Q_A, Q_B, KV_A, KV_B, OUT = (
    f"{HERE}.{name}"
    for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
)
Q_NORM, KV_NORM = f"{HERE}.q_a_layernorm", f"{HERE}.kv_a_layernorm"
INDEX_Q, INDEX_K, INDEX_WEIGHTS = (
    f"{HERE}.indexer.{name}" for name in ("wq_b", "wk", "weights_proj")
)
INDEXER_SIZES: Mapping[str, tuple[str, ...]] = {
    "index_heads": ("index_n_heads",),
    "index_head": ("index_head_dim",),
}
# Fields of an architecture: which rows of W_kvb are keys and which are values, in every head.
SLICES: Mapping[str, tuple[str, ...]] = {KV_B: ("nope", "v_head")}
SLICE_LABELS: Mapping[str, tuple[str, ...]] = {KV_B: ("k", "v")}


def latent_attention(bias: str = "", *, queries: bool = True, indexer: bool = False) -> Mixer:
    """Declare latent attention.

    Args:
        bias: of the projections of the block's input and of the output, see `linear`.
        queries: whether queries are made of a latent.
        indexer: whether there is an indexer.
    """
    wide = "heads*nope+heads*rope"
    first: tuple[str, ...] = (Q_A if queries else Q, KV_A)
    parameters = [
        *linear(KV_A, "kv_rank+rope", "hidden", bias),
        *norms(KV_NORM, dimension="kv_rank"),
        *linear(KV_B, "heads*nope+heads*v_head", "kv_rank"),
        *linear(OUT, "hidden", "heads*v_head", bias),
    ]
    inputs = [
        SharedInput((KV_B,), KV_B, ScaleFold(FoldKind.NORM, KV_NORM)),
        SharedInput((OUT,), OUT, ScaleFold(FoldKind.ROWS, KV_B, "v")),
    ]
    if queries:
        parameters += linear(Q_A, "q_rank", "hidden", bias)
        parameters += norms(Q_NORM, dimension="q_rank")
        parameters += linear(Q_B, wide, "q_rank")
    else:
        parameters += linear(Q, wide, "hidden")
    made = (Q_B, INDEX_Q) if indexer else (Q_B,)
    if queries:
        inputs.insert(0, SharedInput(made, HERE, ScaleFold(FoldKind.NORM, Q_NORM)))
    if indexer:
        parameters += linear(INDEX_Q, "index_heads*index_head", "q_rank")
        parameters += linear(INDEX_K, "index_head", "hidden")
        parameters += norms(f"{HERE}.indexer.k_norm", dimension="index_head", bias=True)
        parameters.append(Parameter(f"{INDEX_WEIGHTS}.weight", ("index_heads", "hidden")))
        first = (*first, INDEX_K)
    also = (INDEX_WEIGHTS,) if indexer else ()
    inputs.insert(0, SharedInput(first, HERE, BEFORE_ATTENTION, also=also))
    states = latent("kv_rank+rope") + (latent("index_head") if indexer else ())
    return Mixer(tuple(parameters), tuple(inputs), states=states)


def query_rank(config: Mapping[str, Any]) -> int:
    """Return the width of the latent of queries; 1 where there is none.

    Raises:
        InputError: it is no size.
    """
    rank = config.get("q_lora_rank")
    if rank is None:
        return 1
    if type(rank) is not int or rank < 1:
        raise InputError(f"config.json: q_lora_rank = {str(rank)[:40]!r}", "a size, or null")
    return rank


SIZES: Mapping[str, SizePlace] = {
    "q_rank": query_rank,
    "kv_rank": ("kv_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "v_head": ("v_head_dim",),
}
