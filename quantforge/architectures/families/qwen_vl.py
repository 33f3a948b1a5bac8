"""Qwen 2, 2.5 and 3 VL: a qwen2 or a qwen3 that reads pictures; files name its tensors as those of a decoder alone.

Towers of these models have in common that two frames of a film make one patch (a picture is both), that four patches
become one token, and that shares of heads rotate by the row and the column of a patch, which llama.cpp knows by heart.
Qwen 3 VL also adds features of pictures to the states of early layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.declare import QWEN_TOWER, within_whole
from quantforge.architectures.families import qwen2, qwen3
from quantforge.architectures.layer_windows import NONE, WindowRule
from quantforge.architectures.llama_cpp import QKV_BIASES, GgufFamily, own_epsilon
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


def qwen2_5_projector(config: Mapping[str, Any]) -> Projector:
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


QWEN2_5_VL = replace(
    within_whole(qwen2.QWEN2, "qwen2_5_vl", (QWEN_TOWER,)),
    defaults={
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 29568,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    gguf=GgufFamily(
        "qwen2vl",
        biases=QKV_BIASES,
        heads_fill=True,
        window=4096,
        lists={"rope.dimension_sections": sections},
        unsupported=own_epsilon,  # it does not read that of the file
    ),
    windows=WindowRule(width=4096, asked=True, start=("max_window_layers", 80)),
    projector={"qwen2_5_vl": qwen2_5_projector},
)


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    It aborts where layers or columns are too few.
    """
    if config["num_hidden_layers"] <= (deep := deep_count(config)):
        return f"num_hidden_layers = {config['num_hidden_layers']}", f"more than {deep}"
    if config["head_dim"] < 2 * sum(sections(config)):
        return f"mrope_section = {sections(config)[:3]}", f"half of head_dim, {config['head_dim']}"
    return None


def qwen3_projector(config: Mapping[str, Any]) -> Projector:
    """Return the tower of Qwen 3 VL, some of whose blocks add to early states; errors as `TowerConfig`."""
    vision = tower_of(config)
    vision.require("hidden_act", "gelu_pytorch_tanh")
    sizes = vision.sizes(TowerSizes(1152, 4304, 27, 16, 16), DEPTH_AND_HEADS)
    width, _, blocks, _, patch = sizes
    positions = vision.size("num_position_embeddings", 2304)
    side = isqrt(positions)
    if side**2 != positions:
        raise not_carried(f"num_position_embeddings = {positions}", "a square")
    deep, merged, out = deep_blocks(config), 4 * width, decoder_width(config, vision)
    block = {
        "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out",
        "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down",
    }  # fmt: skip
    return Projector(
        "qwen3vl_merger",
        {
            **qwen_keys(sizes, side * patch, out, "use_gelu"),
            "vision.is_deepstack_layers": tuple(block in deep for block in range(blocks)),
        },
        (
            patches(width, patch),
            TowerTensor("visual.patch_embed.proj.bias", ("v.patch_embd.bias",), (width,)),
            weight("visual.pos_embed", "v.position_embd", (positions, width), wide=True),
            *stack("visual.blocks", sizes, block),
            *module("visual.merger.norm", "v.post_ln", (width,)),
            *module("visual.merger.linear_fc1", "mm.0", (merged, merged)),
            *module("visual.merger.linear_fc2", "mm.2", (out, merged)),
            *(
                tensor
                for number, of in enumerate(deep)
                for tensor in _deep(number, of, merged, out)
            ),
        ),
    )


def deep_blocks(config: Mapping[str, Any]) -> list[int]:
    """Return the blocks of the tower whose features are added to the states of early layers.

    Raises:
        RefusedError: they do not stand in their order.
    """
    vision = tower_of(config)
    deep = vision.values.get("deepstack_visual_indexes", [8, 16, 24])
    blocks = range(vision.size("depth", 27))
    if not isinstance(deep, list) or deep != sorted(block for block in blocks if block in deep):
        raise not_carried(
            f"deepstack_visual_indexes = {str(deep)[:40]}", "blocks of the tower in their order"
        )
    return deep


def deep_count(config: Mapping[str, Any]) -> int:
    """Return how many early layers of the decoder have features added, 0 of one without its tower."""
    return len(deep_blocks(config)) if "vision_config" in config else 0


def _deep(number: int, block: int, merged: int, out: int) -> Iterator[TowerTensor]:
    """Yield the tensors of the merger of features that one block adds."""
    inner, held = f"visual.deepstack_merger_list.{number}", f"v.deepstack.{block}"
    yield from module(f"{inner}.norm", f"{held}.norm", (merged,))
    yield from module(f"{inner}.linear_fc1", f"{held}.fc1", (merged, merged))
    yield from module(f"{inner}.linear_fc2", f"{held}.fc2", (out, merged))


QWEN3_VL = replace(
    within_whole(qwen3.QWEN3, "qwen3_vl", (QWEN_TOWER,)),
    defaults={
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 22016,
        "rope_theta": 5e5,
    },
    gguf=GgufFamily(
        "qwen3vl",
        numbers={"n_deepstack_layers": deep_count},
        lists={"rope.dimension_sections": sections},
        unsupported=unsupported_by_llama_cpp,
    ),
    windows=NONE,
    projector={"qwen3_vl": qwen3_projector},
)


FAMILIES = {"qwen2_5_vl": QWEN2_5_VL, "qwen2_vl": QWEN2_5_VL, "qwen3_vl": QWEN3_VL}
