"""The tower of Llama 4 as llama.cpp reads it: a vision transformer, whose neighbours are joined, and one matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.projector import (
    Projector,
    TowerConfig,
    TowerTensor,
    linear,
    norm,
    not_carried,
)

_EPS = 1e-5  # of the tower's norms, in transformers' code, whatever a configuration says
_THETA = 1e4  # llama.cpp knows it by heart
_TOWER, _ADAPTER = "vision_model", "vision_model.vision_adapter.mlp"


def tower(kind: str, config: Mapping[str, Any]) -> Projector:
    """Return tower and projector, of that kind in llama.cpp, for a whole configuration; errors as `TowerConfig`."""
    vision = TowerConfig(config["vision_config"])
    vision.require("hidden_act", "gelu")
    vision.require("num_channels", 3)
    vision.turns(_THETA)
    width, ffn = vision.size("hidden_size", 768), vision.size("intermediate_size", 5632)
    blocks, heads = vision.size("num_hidden_layers", 34), vision.size("num_attention_heads", 16)
    if width % heads or width // heads % 4:
        raise not_carried(f"{heads} heads of {width} columns", "heads of a multiple of 4 columns")
    image, patch = vision.size("image_size", 448), vision.size("patch_size", 14)
    side, merged = image // patch, _merged(vision)
    if image % patch or side % merged:
        raise not_carried(
            f"image_size = {image} of patches of {patch}, {merged} x {merged} of which are joined",
            "whole ones",
        )
    joined = vision.size("projector_input_dim", 4096)
    vision.require_size("projector_output_dim", 4096, joined)
    vision.require_size("vision_output_dim", 7680, joined)
    vision.require_size("intermediate_size", 5632, width * merged**2)
    out = TowerConfig(text_config(config), "text_config").size("hidden_size", 5120)
    return Projector(
        kind,
        {
            "use_gelu": True,
            "vision.image_size": image,
            "vision.patch_size": patch,
            "vision.embedding_length": width,
            "vision.feed_forward_length": ffn,
            "vision.block_count": blocks,
            "vision.attention.head_count": heads,
            "vision.attention.layer_norm_epsilon": _EPS,
            "vision.projection_dim": out,
            "vision.projector.scale_factor": merged,
        },
        (
            _matrix(f"{_TOWER}.patch_embedding.linear", "v.patch_embd", width, 3 * patch**2, wide=True),
            TowerTensor(f"{_TOWER}.class_embedding", ("v.class_embd",), (width,)),
            TowerTensor(
                f"{_TOWER}.positional_embedding_vlm", ("v.position_embd.weight",),
                (side**2 + 1, width), wide=True,
            ),
            *norm(f"{_TOWER}.layernorm_pre", "v.pre_ln", width),
            *norm(f"{_TOWER}.layernorm_post", "v.post_ln", width),
            *(tensor for block in range(blocks) for tensor in _block(block, width, ffn)),
            _matrix(f"{_ADAPTER}.fc1", "mm.model.mlp.1", joined, width * merged**2),
            _matrix(f"{_ADAPTER}.fc2", "mm.model.mlp.2", joined, joined),
            _matrix("multi_modal_projector.linear_1", "mm.model.fc", out, joined),
        ),
        renamed=(("model.", ""),),
        differs="llama.cpp hands on what it makes of a tile of a picture column by column, the model row by row",
    )  # fmt: skip


def _merged(vision: TowerConfig) -> int:
    """Return how many neighbours in a row are joined: what ``pixel_shuffle_ratio`` is one part of."""
    ratio = vision.real("pixel_shuffle_ratio", 0.5)
    merged = round(1 / ratio) if ratio else 0
    if not merged or 1 / merged != ratio:
        raise not_carried(f"pixel_shuffle_ratio = {ratio}", "one part of a whole number")
    return merged


def _block(number: int, width: int, ffn: int) -> Iterator[TowerTensor]:
    """Yield the tensors of one block of the tower."""
    inner, held = f"{_TOWER}.model.layers.{number}", f"v.blk.{number}"
    yield from norm(f"{inner}.input_layernorm", f"{held}.ln1", width)
    yield from norm(f"{inner}.post_attention_layernorm", f"{held}.ln2", width)
    for name, place in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
        yield from linear(f"{inner}.self_attn.{name}_proj", f"{held}.attn_{place}", width, width)
    yield from linear(f"{inner}.mlp.fc1", f"{held}.ffn_up", ffn, width)
    yield from linear(f"{inner}.mlp.fc2", f"{held}.ffn_down", width, ffn)


def _matrix(name: str, held: str, out: int, inner: int, *, wide: bool = False) -> TowerTensor:
    return TowerTensor(f"{name}.weight", (f"{held}.weight",), (out, inner), wide=wide)
