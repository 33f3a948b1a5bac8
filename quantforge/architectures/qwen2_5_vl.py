"""Qwen 2 and 2.5 VL: a qwen2 that reads pictures; files name its tensors as those of a decoder alone.

Towers of Qwen's models have in common that two frames of a film make one patch (a picture is both), that four patches
become one token, and that shares of heads rotate by the row and the column of a patch, which llama.cpp knows by heart.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import qwen2, text_config
from quantforge.architectures.declare import QWEN_TOWER, within_whole
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import QKV_BIASES, Family, own_epsilon
from quantforge.architectures.projector import (
    CLIP_DEVIATION,
    CLIP_MEAN,
    SWAPPED,
    Projector,
    TowerConfig,
    TowerSizes,
    TowerTensor,
    Value,
    module,
    not_carried,
    stack,
    weight,
)
from quantforge.errors import InputError

DEPTH_AND_HEADS = ("depth", "num_heads")  # keys of the configuration
_MERGED = 2  # patches in each direction
_FRAMES = 2
_IMAGE = 560  # of a key that has to be there; pictures keep their own size


def projector(config: Mapping[str, Any]) -> Projector:
    """Return the tower of Qwen 2.5 VL, most of whose blocks look at windows; errors as `TowerConfig`."""
    vision = tower_of(config)
    vision.require("hidden_act", "silu")
    vision.require("window_size", 112)
    sizes = vision.sizes(TowerSizes(3584, 3420, 32, 16, 14), DEPTH_AND_HEADS)
    width, ffn, blocks, _, patch = sizes
    if ffn == width:
        raise not_carried(f"intermediate_size = hidden_size = {ffn}", SWAPPED)
    out, merged = decoder_width(config, vision), 4 * width
    block = {
        "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    return Projector(
        "qwen2.5vl_merger",
        {
            **qwen_keys(sizes, _IMAGE, out, "use_silu"),
            "vision.n_wa_pattern": _period(vision, blocks),
        },
        (
            patches(width, patch),
            *(_divided(tensor) for tensor in stack("visual.blocks", sizes, block, norm_bias=False)),
            weight("visual.merger.ln_q", "v.post_ln", (width,)),
            *module("visual.merger.mlp.0", "mm.0", (merged, merged)),
            *module("visual.merger.mlp.2", "mm.2", (out, merged)),
        ),
        mean=CLIP_MEAN,
        deviation=CLIP_DEVIATION,
    )


def _divided(tensor: TowerTensor) -> TowerTensor:
    """Return a tensor of q, k and v in three parts, any other as it is."""
    (held,) = tensor.held
    parts = tuple(held.replace("qkv", part) for part in "qkv") if "qkv" in held else (held,)
    return replace(tensor, held=parts)


def _period(vision: TowerConfig, blocks: int) -> int:
    """Return of how many blocks the last looks at the whole picture."""
    whole = vision.values.get("fullatt_block_indexes", [7, 15, 23, 31])
    within = (
        [one for one in whole if type(one) is int and one < blocks]
        if isinstance(whole, list)
        else []
    )
    period = within[0] + 1 if within else blocks + 1
    if within != list(range(period - 1, blocks, period)):
        raise not_carried(
            f"fullatt_block_indexes = {str(whole)[:40]}", "the last of every run of so many blocks"
        )
    return period


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
        "visual.patch_embed.proj.weight",
        ("v.patch_embd.weight", "v.patch_embd.weight.1"),
        (width, 3, _FRAMES, patch, patch),
        axis=2,
        wide=True,
    )


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


ARCHITECTURE = replace(
    within_whole(qwen2.ARCHITECTURE, "qwen2_5_vl", (QWEN_TOWER,)),
    defaults={
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 29568,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    gguf=Family(
        "qwen2vl",
        biases=QKV_BIASES,
        heads_fill=True,
        window=4096,
        lists={"rope.dimension_sections": sections},
        obstacle=own_epsilon,  # it does not read that of the file
    ),
    windows=WindowRule(width=4096, asked=True, start=("max_window_layers", 80)),
    projector={"qwen2_5_vl": projector},
)
