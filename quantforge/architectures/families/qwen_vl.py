"""Qwen 2, 2.5 and 3 VL: a qwen2 or qwen3 with a vision tower; decoder tensors keep their names.

In the towers of these models, two video frames form one patch (for an image, twice the same), four patches are merged
into one token, and parts of each head are rotated by the row and the column of the patch; llama.cpp has these values
fixed. Qwen 3 VL also adds image features to the hidden states of early decoder layers (deepstack).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.declare import QWEN_VISION_TENSORS, multimodal_as_whole
from quantforge.architectures.families import qwen2, qwen3
from quantforge.architectures.layer_windows import NO_WINDOWS, WindowRule
from quantforge.architectures.llama_cpp import QKV_BIASES, GgufFamily, unsupported_epsilon
from quantforge.architectures.projector import (
    CLIP_MEAN,
    CLIP_STD,
    SWAPPED_MLP_HINT,
    KeyValue,
    Projector,
    TowerConfig,
    TowerSizes,
    TowerTensor,
    block_tensors,
    module_tensors,
    unsupported_setting_error,
    weight_tensor,
)
from quantforge.errors import InputError

# Configuration keys of the numbers of blocks and heads
BLOCK_AND_HEAD_COUNT_KEYS = ("depth", "num_heads")
_MERGE_SIZE = 2  # patches per direction that form a token
_FRAMES_PER_PATCH = 2
_NOMINAL_IMAGE_SIZE = 560  # value of a required key; images keep their own size


def qwen2_5_projector(config: Mapping[str, Any]) -> Projector:
    """Return the tower of Qwen 2.5 VL, most of whose blocks use window attention; errors as `TowerConfig`."""
    vision = read_tower_config(config)
    vision.require("hidden_act", "silu")
    vision.require("window_size", 112)
    sizes = vision.sizes(TowerSizes(3584, 3420, 32, 16, 14), BLOCK_AND_HEAD_COUNT_KEYS)
    width, ffn, blocks, _, patch = sizes
    if ffn == width:
        raise unsupported_setting_error(
            f"intermediate_size = hidden_size = {ffn}", SWAPPED_MLP_HINT
        )
    decoder_width, merged_width = check_decoder_width(config, vision), 4 * width
    block = {
        "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    return Projector(
        "qwen2.5vl_merger",
        {
            **common_tower_keys(sizes, _NOMINAL_IMAGE_SIZE, decoder_width, "use_silu"),
            "vision.n_wa_pattern": _window_period(vision, blocks),
        },
        (
            patch_embedding(width, patch),
            *(
                _split_qkv(tensor)
                for tensor in block_tensors("visual.blocks", sizes, block, norm_bias=False)
            ),
            weight_tensor("visual.merger.ln_q", "v.post_ln", (width,)),
            *module_tensors("visual.merger.mlp.0", "mm.0", (merged_width, merged_width)),
            *module_tensors("visual.merger.mlp.2", "mm.2", (decoder_width, merged_width)),
        ),
        mean=CLIP_MEAN,
        std=CLIP_STD,
    )


def _split_qkv(tensor: TowerTensor) -> TowerTensor:
    """Split a fused q, k, v tensor into its three names in the file; return any other tensor unchanged."""
    (gguf_name,) = tensor.gguf_names
    gguf_names = (
        tuple(gguf_name.replace("qkv", letter) for letter in "qkv")
        if "qkv" in gguf_name
        else (gguf_name,)
    )
    return replace(tensor, gguf_names=gguf_names)


def _window_period(vision: TowerConfig, blocks: int) -> int:
    """Return the period of blocks with attention to the whole image: the last of each run has it.

    Raises:
        RefusedError: these blocks are not periodic.
    """
    full_blocks = vision.values.get("fullatt_block_indexes", [7, 15, 23, 31])
    existing_blocks = (
        [block for block in full_blocks if type(block) is int and block < blocks]
        if isinstance(full_blocks, list)
        else []
    )
    period = existing_blocks[0] + 1 if existing_blocks else blocks + 1
    if existing_blocks != list(range(period - 1, blocks, period)):
        raise unsupported_setting_error(
            f"fullatt_block_indexes = {str(full_blocks)[:40]}",
            "the last of every run of so many blocks",
        )
    return period


def read_tower_config(config: Mapping[str, Any]) -> TowerConfig:
    """Return the configuration of the tower.

    Raises:
        RefusedError: it merges patches or frames in another way than llama.cpp.
    """
    vision = TowerConfig(config["vision_config"])
    vision.require("spatial_merge_size", _MERGE_SIZE)
    vision.require("temporal_patch_size", _FRAMES_PER_PATCH)
    vision.require("in_channels", 3)
    return vision


def check_decoder_width(config: Mapping[str, Any], vision: TowerConfig) -> int:
    """Return the width of the decoder, which must equal that of the tower's tokens.

    Raises:
        RefusedError: the widths differ.
    """
    width = TowerConfig(text_config(config), "text_config").size("hidden_size")
    vision.require("out_hidden_size", width, default=3584)
    return width


def common_tower_keys(
    sizes: TowerSizes, image_size: int, projection_dim: int, activation: str
) -> dict[str, KeyValue]:
    """Return the metadata keys of both towers; arguments as `TowerSizes.keys`, and the key of the activation."""
    # Epsilon of both towers, fixed in transformers' code
    keys = sizes.keys(image_size, 1e-6, projection_dim)
    blocks = keys.pop("vision.block_count")
    keys |= {
        "vision.spatial_merge_size": _MERGE_SIZE,
        activation: True,
        "vision.block_count": blocks,
    }
    return keys


def patch_embedding(width: int, patch: int) -> TowerTensor:
    """Return the convolution that embeds patches, split by frame in the file."""
    return TowerTensor(
        "visual.patch_embed.proj.weight",
        ("v.patch_embd.weight", "v.patch_embd.weight.1"),
        (width, 3, _FRAMES_PER_PATCH, patch, patch),
        axis=2,
        float32=True,
    )


def mrope_sections(config: Mapping[str, Any]) -> list[int]:
    """Return how many channel pairs of a decoder head rotate by time, row and column, and a 0 for none.

    Raises:
        InputError: the configuration does not declare them.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    sections = rope.get("mrope_section") if isinstance(rope, Mapping) else None
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or not all(type(count) is int and count >= 0 for count in sections)
    ):
        raise InputError(
            f"mrope_section = {str(sections)[:40]}",
            "three counts in rope_parameters",
            subject="config.json",
        )
    return [*sections, 0]


QWEN2_5_VL = replace(
    multimodal_as_whole(qwen2.QWEN2, "qwen2_5_vl", (QWEN_VISION_TENSORS,)),
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
        bias_suffixes=QKV_BIASES,
        heads_fill_width=True,
        config_window_default=4096,
        per_layer_keys={"rope.dimension_sections": mrope_sections},
        unsupported=unsupported_epsilon,  # llama.cpp does not read the epsilon of the file
    ),
    windows=WindowRule(width=4096, needs_use_sliding_window=True, start=("max_window_layers", 80)),
    projector={"qwen2_5_vl": qwen2_5_projector},
)


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None.

    llama.cpp aborts if there are too few layers or channels.
    """
    if config["num_hidden_layers"] <= (deepstack_layers := deepstack_layer_count(config)):
        return f"num_hidden_layers = {config['num_hidden_layers']}", f"more than {deepstack_layers}"
    if config["head_dim"] < 2 * sum(mrope_sections(config)):
        return (
            f"mrope_section = {mrope_sections(config)[:3]}",
            f"half of head_dim, {config['head_dim']}",
        )
    return None


def qwen3_projector(config: Mapping[str, Any]) -> Projector:
    """Return the tower of Qwen 3 VL, with deepstack features; errors as `TowerConfig`."""
    vision = read_tower_config(config)
    vision.require("hidden_act", "gelu_pytorch_tanh")
    sizes = vision.sizes(TowerSizes(1152, 4304, 27, 16, 16), BLOCK_AND_HEAD_COUNT_KEYS)
    width, _, blocks, _, patch = sizes
    positions = vision.size("num_position_embeddings", 2304)
    positions_per_side = isqrt(positions)
    if positions_per_side**2 != positions:
        raise unsupported_setting_error(f"num_position_embeddings = {positions}", "a square")
    deepstack, merged_width, decoder_width = (
        deepstack_blocks(config),
        4 * width,
        check_decoder_width(config, vision),
    )
    block = {
        "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out",
        "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down",
    }  # fmt: skip
    return Projector(
        "qwen3vl_merger",
        {
            **common_tower_keys(sizes, positions_per_side * patch, decoder_width, "use_gelu"),
            "vision.is_deepstack_layers": tuple(block in deepstack for block in range(blocks)),
        },
        (
            patch_embedding(width, patch),
            TowerTensor("visual.patch_embed.proj.bias", ("v.patch_embd.bias",), (width,)),
            weight_tensor("visual.pos_embed", "v.position_embd", (positions, width), float32=True),
            *block_tensors("visual.blocks", sizes, block),
            *module_tensors("visual.merger.norm", "v.post_ln", (width,)),
            *module_tensors("visual.merger.linear_fc1", "mm.0", (merged_width, merged_width)),
            *module_tensors("visual.merger.linear_fc2", "mm.2", (decoder_width, merged_width)),
            *(
                tensor
                for number, layer in enumerate(deepstack)
                for tensor in _deepstack_tensors(number, layer, merged_width, decoder_width)
            ),
        ),
    )


def deepstack_blocks(config: Mapping[str, Any]) -> list[int]:
    """Return the tower blocks whose features are added to the hidden states of early decoder layers.

    Raises:
        RefusedError: they are not listed in ascending order.
    """
    vision = read_tower_config(config)
    indexes = vision.values.get("deepstack_visual_indexes", [8, 16, 24])
    blocks = range(vision.size("depth", 27))
    if not isinstance(indexes, list) or indexes != sorted(
        block for block in blocks if block in indexes
    ):
        raise unsupported_setting_error(
            f"deepstack_visual_indexes = {str(indexes)[:40]}", "blocks of the tower in their order"
        )
    return indexes


def deepstack_layer_count(config: Mapping[str, Any]) -> int:
    """Return the number of decoder layers to which image features are added, 0 for a decoder without tower."""
    return len(deepstack_blocks(config)) if "vision_config" in config else 0


def _deepstack_tensors(
    index: int, block: int, merged_width: int, decoder_width: int
) -> Iterator[TowerTensor]:
    """Yield the tensors of the merger of one deepstack block."""
    module, gguf_module = f"visual.deepstack_merger_list.{index}", f"v.deepstack.{block}"
    yield from module_tensors(f"{module}.norm", f"{gguf_module}.norm", (merged_width,))
    yield from module_tensors(
        f"{module}.linear_fc1", f"{gguf_module}.fc1", (merged_width, merged_width)
    )
    yield from module_tensors(
        f"{module}.linear_fc2", f"{gguf_module}.fc2", (decoder_width, merged_width)
    )


QWEN3_VL = replace(
    multimodal_as_whole(qwen3.QWEN3, "qwen3_vl", (QWEN_VISION_TENSORS,)),
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
        integer_keys={"n_deepstack_layers": deepstack_layer_count},
        per_layer_keys={"rope.dimension_sections": mrope_sections},
        unsupported=unsupported_by_llama_cpp,
    ),
    windows=NO_WINDOWS,
    projector={"qwen3_vl": qwen3_projector},
)


FAMILIES = {"qwen2_5_vl": QWEN2_5_VL, "qwen2_vl": QWEN2_5_VL, "qwen3_vl": QWEN3_VL}
