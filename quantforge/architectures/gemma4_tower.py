"""The tower of Gemma 4 that reads pictures, as llama.cpp does: pooled patches of any number, linears that may clip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.layer_inputs import WIDTH
from quantforge.architectures.projector import (
    Projector,
    TowerConfig,
    TowerSizes,
    TowerTensor,
    stack,
    weight,
)

_THETA = 100.0  # llama.cpp has it built in
_USUAL = 16  # pooled patches of a side of a picture: 256 tokens
_CAUSAL = (1536, 2560)  # widths of decoders whose picture tokens llama.cpp does not let look ahead
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_TOWER, _PATCHES = "vision_tower", "vision_tower.patch_embedder"


def projector(config: Mapping[str, Any]) -> Projector:
    """Return the tower of pictures with its projector, for a whole configuration; errors as `TowerConfig`."""
    vision = TowerConfig(config["vision_config"])
    vision.require("hidden_activation", "gelu_pytorch_tanh")
    vision.require_theta(_THETA)
    sizes = vision.sizes(TowerSizes(768, 3072, 16, 12, 16))
    width, _, _, heads, patch = sizes
    vision.require("head_dim", width // heads, otherwise=64)
    vision.require("num_key_value_heads", heads, otherwise=12)
    pooled = vision.size("pooling_kernel_size", 3)
    places = vision.size("position_embedding_size", 10240)
    clips = vision.values.get("use_clipped_linears", False) is True
    scaled = vision.values.get("standardize", False) is True  # of pooled patches
    out = _decoder_width(text_config(config))
    return Projector(
        "gemma4v",
        {
            "use_gelu": True,
            **sizes.keys(patch * pooled * _USUAL, vision.real("rms_norm_eps", 1e-6), out),
            "vision.projector.scale_factor": pooled,
        },
        (
            weight(f"{_PATCHES}.input_proj", "v.patch_embd", (width, 3 * patch**2), wide=True, pixels=patch),
            TowerTensor(
                f"{_PATCHES}.position_embedding_table", ("v.position_embd.weight",), (2, places, width), wide=True
            ),
            *_blocks(sizes, clips=clips),
            *(
                TowerTensor(f"{_TOWER}.{name}", (f"v.{name}",), (width,))
                for name in ("std_bias", "std_scale")
                if scaled
            ),
            weight("embed_vision.embedding_projection", "mm.input_projection", (out, width)),
        ),
        mean=(0.0, 0.0, 0.0),
        deviation=(1.0, 1.0, 1.0),
        normalizes=False,
        left_out=(r"(audio_tower|embed_audio)\..*",),
    )  # fmt: skip


def _decoder_width(words: Mapping[str, Any]) -> int:
    """Return the width of the decoder, in which llama.cpp takes two things for granted."""
    text = TowerConfig(words, "text_config")
    width = text.size("hidden_size", 2304)
    text.require(
        "use_bidirectional_attention", None if width in _CAUSAL else "vision", otherwise=None
    )
    if words.get(WIDTH, 256):  # the vector of this token stands for those of a picture
        text.require("pad_token_id", 0)
    return width


def _blocks(sizes: TowerSizes, *, clips: bool) -> Iterator[TowerTensor]:
    """Yield the tensors of all blocks; where linears clip, their four bounds after each weight."""
    block = {
        "input_layernorm": "ln1", "post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "ffn_post_norm", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj.linear": "attn_q", "self_attn.k_proj.linear": "attn_k",
        "self_attn.v_proj.linear": "attn_v", "self_attn.o_proj.linear": "attn_out", "mlp.gate_proj.linear": "ffn_gate",
        "mlp.up_proj.linear": "ffn_up", "mlp.down_proj.linear": "ffn_down",
    }  # fmt: skip
    layers = f"{_TOWER}.encoder.layers"
    for tensor in stack(layers, sizes, block, norm_bias=False, bias=False):
        yield tensor
        name, linear, _ = tensor.name.partition(".linear.")
        for bound in _BOUNDS if clips and linear else ():
            held = tensor.held[0].removesuffix("weight") + bound
            yield TowerTensor(f"{name}.{bound}", (held,), ())
