"""Towers of Qwen's models that read pictures, as llama.cpp reads them: what 2.5 and 3 have in common.

Two frames of a film make one patch; a picture is both. Four patches become one token. Shares of heads rotate by the row
and the column of a patch, which llama.cpp knows by heart.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.projector import TowerConfig, TowerTensor, Value, not_carried
from quantforge.errors import InputError

RENAMED = (("model.", ""),)
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
_MERGED = 2  # patches in each direction
_FRAMES = 2


def tower_of(config: Mapping[str, Any]) -> TowerConfig:
    """Return the configuration of the tower.

    Raises:
        RefusedError: it joins patches or frames otherwise than llama.cpp does.
    """
    vision = TowerConfig(config["vision_config"])
    for key, computed in (
        ("spatial_merge_size", _MERGED),
        ("temporal_patch_size", _FRAMES),
        ("in_channels", 3),
    ):
        vision.require(key, computed)
    return vision


def output_size(config: Mapping[str, Any], vision: TowerConfig, otherwise: int) -> int:
    """Return the width of the decoder, which is that of the tower's tokens.

    Raises:
        RefusedError: they differ.
    """
    width = vision.size("out_hidden_size", otherwise)
    hidden = TowerConfig(text_config(config), "text_config").size("hidden_size")
    if hidden != width:
        raise not_carried(f"vision_config.out_hidden_size = {width}", f"hidden_size, {hidden}")
    return width


def common_keys(
    vision: TowerConfig, image: int, width: int, ffn: int, out: int
) -> dict[str, Value]:
    """Return the keys that both have.

    Args:
        vision: the configuration.
        image: pixels of the side of a picture.
        width: columns of the tower.
        ffn: columns within its MLP.
        out: columns of the decoder.

    Raises:
        RefusedError: heads do not fill the width, or their halves cannot be shared by rows and columns.
    """
    heads = vision.size("num_heads", 16)
    if width % heads or width // heads % 4:
        raise not_carried(f"{heads} heads of {width} columns", "heads of a multiple of 4 columns")
    return {
        "vision.image_size": image,
        "vision.patch_size": vision.size("patch_size", 14),
        "vision.embedding_length": width,
        "vision.feed_forward_length": ffn,
        "vision.attention.head_count": heads,
        "vision.attention.layer_norm_epsilon": 1e-6,  # of both, in transformers' code
        "vision.projection_dim": out,
        "vision.spatial_merge_size": _MERGED,
    }


def patches(width: int, patch: int) -> TowerTensor:
    """Return the convolution of patches, a part for each frame."""
    return TowerTensor(
        "visual.patch_embed.proj.weight", ("v.patch_embd.weight", "v.patch_embd.weight.1"),
        (width, 3, _FRAMES, patch, patch), axis=2, wide=True,
    )  # fmt: skip


def sections(config: Mapping[str, Any]) -> list[int]:
    """Return how many pairs of columns of a head of a decoder rotate by time, by row, by column and by nothing.

    Raises:
        InputError: the configuration does not say.
    """
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    found = stated.get("mrope_section") if isinstance(stated, Mapping) else None
    if (
        not isinstance(found, list)
        or len(found) != 3
        or not all(type(one) is int and one >= 0 for one in found)
    ):
        raise InputError(
            f"config.json: mrope_section = {str(found)[:40]}", "three counts in rope_parameters"
        )
    return [*found, 0]


def side_of(positions: int) -> int:
    """Return the side of a square of so many positions.

    Raises:
        RefusedError: it is none.
    """
    if isqrt(positions) ** 2 != positions:
        raise not_carried(f"num_position_embeddings = {positions}", "a square")
    return isqrt(positions)
