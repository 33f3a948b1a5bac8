"""The tower of Gemma 4 that reads pictures, as llama.cpp does: pooled patches of any number, linears that may clip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.layer_inputs import WIDTH
from quantforge.architectures.projector import (
    Projector,
    TowerConfig,
    TowerTensor,
    norm,
    not_carried,
)

_THETA = 100.0  # llama.cpp knows it by heart
_USUAL = 16  # pooled patches of a side of a picture: 256 tokens
_CAUSAL = (1536, 2560)  # widths of decoders whose picture tokens llama.cpp does not let look ahead
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_TOWER, _PATCHES = "vision_tower", "vision_tower.patch_embedder"


def projector(config: Mapping[str, Any]) -> Projector:
    """Return the tower of pictures with its projector, for a whole configuration; errors as `TowerConfig`."""
    vision = TowerConfig(config["vision_config"])
    vision.require("hidden_activation", "gelu_pytorch_tanh")
    vision.turns(_THETA)
    width, ffn = vision.size("hidden_size", 768), vision.size("intermediate_size", 3072)
    blocks, heads = vision.size("num_hidden_layers", 16), vision.size("num_attention_heads", 12)
    if width % heads or width // heads % 4:
        raise not_carried(f"{heads} heads of {width} columns", "heads of a multiple of 4 columns")
    vision.require_size("head_dim", 64, width // heads)
    vision.require_size("num_key_value_heads", 12, heads)
    patch, pooled = vision.size("patch_size", 16), vision.size("pooling_kernel_size", 3)
    places = vision.size("position_embedding_size", 10240)
    clips = vision.values.get("use_clipped_linears", False) is True
    out = _decoder_width(text_config(config))
    return Projector(
        "gemma4v",
        {
            "use_gelu": True,
            "vision.image_size": patch * pooled * _USUAL,
            "vision.patch_size": patch,
            "vision.embedding_length": width,
            "vision.feed_forward_length": ffn,
            "vision.block_count": blocks,
            "vision.attention.head_count": heads,
            "vision.attention.layer_norm_epsilon": vision.real("rms_norm_eps", 1e-6),
            "vision.projection_dim": out,
            "vision.projector.scale_factor": pooled,
        },
        (
            TowerTensor(
                f"{_PATCHES}.input_proj.weight", ("v.patch_embd.weight",), (width, 3 * patch**2),
                wide=True, pixels=patch,
            ),
            TowerTensor(
                f"{_PATCHES}.position_embedding_table", ("v.position_embd.weight",), (2, places, width), wide=True
            ),
            *(tensor for block in range(blocks) for tensor in _block(block, (width, ffn, width // heads), clips=clips)),
            *_standard(vision, width),
            TowerTensor(
                "embed_vision.embedding_projection.weight", ("mm.input_projection.weight",), (out, width)
            ),
        ),
        renamed=(("model.", ""),),
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


def _standard(vision: TowerConfig, width: int) -> Iterator[TowerTensor]:
    """Yield what pooled patches are shifted and multiplied by, where they are."""
    if vision.values.get("standardize", False) is True:
        for name in ("std_bias", "std_scale"):
            yield TowerTensor(f"{_TOWER}.{name}", (f"v.{name}",), (width,))


def _block(number: int, sizes: tuple[int, int, int], *, clips: bool) -> Iterator[TowerTensor]:
    """Yield the tensors of one block of the tower, of so many columns, in its MLP, and in a head."""
    inner, held = f"{_TOWER}.encoder.layers.{number}", f"v.blk.{number}"
    width, ffn, head = sizes
    for name, place in (
        ("input_layernorm", "ln1"),
        ("post_attention_layernorm", "attn_post_norm"),
        ("pre_feedforward_layernorm", "ln2"),
        ("post_feedforward_layernorm", "ffn_post_norm"),
    ):
        yield from norm(f"{inner}.{name}", f"{held}.{place}", width, bias=False)
    for name in ("q_norm", "k_norm"):
        yield from norm(f"{inner}.self_attn.{name}", f"{held}.attn_{name}", head, bias=False)
    for name, place in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
        yield from _linear(
            f"{inner}.self_attn.{name}_proj", f"{held}.attn_{place}", (width, width), clips=clips
        )
    for name, shape in (("gate", (ffn, width)), ("up", (ffn, width)), ("down", (width, ffn))):
        yield from _linear(f"{inner}.mlp.{name}_proj", f"{held}.ffn_{name}", shape, clips=clips)


def _linear(name: str, held: str, shape: tuple[int, int], *, clips: bool) -> Iterator[TowerTensor]:
    """Yield the weight of a linear and, where it clips, its four bounds."""
    yield TowerTensor(f"{name}.linear.weight", (f"{held}.weight",), shape)
    for bound in _BOUNDS if clips else ():
        yield TowerTensor(f"{name}.{bound}", (f"{held}.{bound}",), ())
