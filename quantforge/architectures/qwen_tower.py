"""Towers of Qwen's models that read pictures, as llama.cpp reads them: what 2.5 and 3 have in common.

Two frames of a film make one patch; a picture is both. Four patches become one token. Shares of heads rotate by the row
and the column of a patch, which llama.cpp knows by heart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.projector import TowerConfig, TowerSizes, TowerTensor, Value
from quantforge.errors import InputError

DEPTH_AND_HEADS = ("depth", "num_heads")  # keys of the configuration
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
    vision.require("spatial_merge_size", _MERGED)
    vision.require("temporal_patch_size", _FRAMES)
    vision.require("in_channels", 3)
    return vision


def decoder_width(config: Mapping[str, Any], vision: TowerConfig) -> int:
    """Return the width of the decoder, which is that of the tower's tokens.

    Raises:
        RefusedError: they differ.
    """
    width = TowerConfig(text_config(config), "text_config").size("hidden_size")
    vision.require("out_hidden_size", width, otherwise=3584)
    return width


def qwen_keys(sizes: TowerSizes, image: int, out: int, activation: str) -> dict[str, Value]:
    """Return the keys that both have; the arguments are those of `TowerSizes.keys`, and the key of the activation."""
    keys = sizes.keys(image, 1e-6, out)  # the epsilon of both, in transformers' code
    blocks = keys.pop("vision.block_count")
    keys |= {"vision.spatial_merge_size": _MERGED, activation: True, "vision.block_count": blocks}
    return keys


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
