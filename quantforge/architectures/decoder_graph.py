"""How the blocks of a family compute, as far as declarations of tensors do not say it: what the own decoder needs.

With residuals ``x``, the halves of a block one after the other, or side by side:

    x += after(attention(before(x)));   x += after(mlp(before(x)))
    x += after(attention(before(x))) + after(mlp(before_mlp(x)))

A family without such a record is computed by transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class DecoderGraph:
    """Names of modules relative to a block (of projections and norms of heads: to the attention), "" for none.

    Attributes:
        attention, output: the attention, and its output projection.
        fused: the projection to queries, keys and values in one; "" where there are three.
        before_attention, after_attention: norms before and after attention.
        before_mlp, after_mlp: likewise of the MLP; side by side, "" is the norm of attention.
        side_by_side: whether both halves read the same ``x``: always, never, or the configuration key that says so.
        head_norms: norms of queries and of keys.
        norms_of_all: they are over all heads together.
        norms_after_rotation: they come after the rotation.
        neighbours: neighbouring values are rotated together, instead of the halves of a head.
        one_window: the window of the configuration holds for every layer.
        experts: mixtures are computed by the modules of transformers, in which experts stay packed; without it,
            families that have mixtures are not computed.
        full_rotary: whether layers that see everything rotate: ``always``, ``never``, or ``alone``, where no layer has
            a window.
    """

    attention: str = "self_attn"
    output: str = "o_proj"
    fused: str = ""
    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    side_by_side: str | bool = False
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    norms_of_all: bool = False
    norms_after_rotation: bool = False
    neighbours: bool = False
    one_window: bool = False
    experts: bool = False
    full_rotary: Literal["always", "never", "alone"] = "always"

    def knows(self, parameter: str) -> bool:
        """Return whether the graph uses a parameter, given its name relative to the block."""
        names = (
            *self.head_norms,
            *((self.fused,) if self.fused else ("q_proj", "k_proj", "v_proj")),
        )
        inner = {f"{self.attention}.{name}" for name in (*names, self.output)}
        norms = {self.before_attention, self.after_attention, self.before_mlp, self.after_mlp}
        owner = parameter.rpartition(".")[0]
        return (
            owner in inner | norms
            or parameter.startswith("mlp.")
            or any(owner.startswith(f"{self.attention}.{name}.") for name in self.head_norms)
        )
