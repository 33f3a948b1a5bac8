"""A block as the decoder computes it: its modules, joined where they read the same, and what differs between blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantforge.runtime.joined import Joined, joinable
from quantforge_kernels.attention import Scores

_ONE_WINDOW = frozenset({"mistral", "phi3"})  # the configuration's window holds for every layer


@dataclass(frozen=True, slots=True)
class Layer:
    """One block.

    Attributes:
        block: module of transformers.
        scores: how attention makes scores.
        rotary: key of the frequencies, see `rotary`; None: positions do not matter.
        qkv: the projections to queries, keys and values as one; None where they are not joined.
        gate_up: likewise gate and up.
    """

    block: Any
    scores: Scores
    rotary: str | None
    qkv: Joined | None
    gate_up: Joined | None


def layer_of(inner: Any, config: Any, index: int, join: bool) -> Layer:
    """Return block ``index`` of a decoder of transformers; with ``join``, what reads the same is multiplied as one."""
    block = inner.layers[index]
    attention = block.self_attn
    window = getattr(attention, "sliding_window", None)
    if config.model_type in _ONE_WINDOW:
        window = config.sliding_window
    rotary: str | None = ""
    if hasattr(inner.rotary_emb, "layer_types"):  # frequencies by type of layer
        rotary = config.layer_types[index]
    elif not getattr(attention, "use_rope", True):
        rotary = None
    cap = getattr(config, "attn_logit_softcapping", None) or 0.0
    scores = Scores(float(attention.scaling), float(cap), window or 0)
    qkv = _joined(attention, "q_proj", "k_proj", "v_proj") if join else None
    gate_up = _joined(block.mlp, "gate_proj", "up_proj") if join else None
    return Layer(block, scores, rotary, qkv, gate_up)


def _joined(module: Any, *names: str) -> Joined | None:
    if not hasattr(module, names[0]):  # the family stores them as one already
        return None
    parts = [getattr(module, name) for name in names]
    return Joined(parts) if joinable(parts) else None
