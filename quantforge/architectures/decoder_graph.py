"""Computation graphs of decoder blocks: what QuantForge's own decoder must know besides the tensors.

With the residual stream ``x``, the two halves of a block run one after the other or in parallel:

    x += after(attention(before(x)));   x += after(mlp(before(x)))
    x += after(attention(before(x))) + after(mlp(before_mlp(x)))

A family without such a graph is computed by transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class DecoderGraph:
    """Computation graph of a block, as module names and flags.

    Names are relative to the block (those of projections and head norms to the attention module), "" for none.

    Attributes:
        attention_module: the attention module.
        output_proj: its output projection.
        fused_qkv: the fused query-key-value projection; "" if there are three.
        norm_before_attention, norm_after_attention: norms before and after attention.
        norm_before_mlp, norm_after_mlp: norms before and after the MLP; with ``parallel_mlp``, "" for the first means
            that the MLP reads the norm of attention.
        parallel_mlp: whether both halves read the same ``x``: always, never, or the configuration key that decides.
        head_norms: norms of queries and of keys.
        qk_norms_over_all_heads: whether these norms run over all heads together.
        qk_norms_after_rotation: whether these norms follow the rotary embedding.
        interleaved_rotary: whether neighboring channels are rotated together, instead of the two halves of a head.
        same_window: whether the window in the configuration applies to every layer.
        supports_experts: whether mixtures are supported (computed by transformers' modules with packed experts).
        full_rotary: whether layers with full attention use rotary embeddings: ``always``, ``never``, or ``alone``: only
            if no layer has a window.
    """

    attention_module: str = "self_attn"
    output_proj: str = "o_proj"
    fused_qkv: str = ""
    norm_before_attention: str = "input_layernorm"
    norm_after_attention: str = ""
    norm_before_mlp: str = "post_attention_layernorm"
    norm_after_mlp: str = ""
    parallel_mlp: str | bool = False
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    qk_norms_over_all_heads: bool = False
    qk_norms_after_rotation: bool = False
    interleaved_rotary: bool = False
    same_window: bool = False
    supports_experts: bool = False
    full_rotary: Literal["always", "never", "alone"] = "always"

    def covers(self, parameter: str) -> bool:
        """Return whether the graph uses a parameter, given its name relative to the block."""
        names = (
            *self.head_norms,
            *((self.fused_qkv,) if self.fused_qkv else ("q_proj", "k_proj", "v_proj")),
        )
        attention_parts = {f"{self.attention_module}.{name}" for name in (*names, self.output_proj)}
        norms = {
            self.norm_before_attention,
            self.norm_after_attention,
            self.norm_before_mlp,
            self.norm_after_mlp,
        }
        module = parameter.rpartition(".")[0]
        return (
            module in attention_parts | norms
            or parameter.startswith("mlp.")
            or any(
                module.startswith(f"{self.attention_module}.{name}.") for name in self.head_norms
            )
        )
