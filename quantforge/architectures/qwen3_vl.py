"""Qwen 3 VL: a qwen3 that reads pictures, whose features are added to the states of early layers too."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import qwen3
from quantforge.architectures.layer_windows import NONE
from quantforge.architectures.llama_cpp import Family
from quantforge.architectures.projector import Projector, TowerTensor, linear, norm, not_carried
from quantforge.architectures.qwen_tower import (
    RENAMED,
    common_keys,
    output_size,
    patches,
    sections,
    side_of,
    tower_of,
)
from quantforge.architectures.tower_names import QWEN_TOWER, within_whole

ARCHITECTURE = replace(
    within_whole(qwen3.ARCHITECTURE, "qwen3_vl", (QWEN_TOWER,)),
    defaults={
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 22016,
        "rope_theta": 5e5,
    },
    gguf=Family(
        "qwen3vl",
        numbers={"n_deepstack_layers": f"{__name__}.deep_count"},
        lists={"rope.dimension_sections": "quantforge.architectures.qwen_tower.sections"},
        obstacle=f"{__name__}.beyond_llama_cpp",
        is_read=False,
    ),
    windows=NONE,
    projector={"qwen3_vl": f"{__name__}.projector"},
)


def beyond_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what llama.cpp does not compute and what it does, or None: it ends where layers or columns are too few."""
    if config["num_hidden_layers"] <= (deep := deep_count(config)):
        return f"num_hidden_layers = {config['num_hidden_layers']}", f"more than {deep}"
    if config["head_dim"] < 2 * sum(sections(config)):
        return f"mrope_section = {sections(config)[:3]}", f"half of head_dim, {config['head_dim']}"
    return None


def projector(config: Mapping[str, Any]) -> Projector:
    """Return the tower of Qwen 3 VL, some of whose blocks add to early states; errors as `TowerConfig`."""
    vision = tower_of(config)
    vision.require("hidden_act", "gelu_pytorch_tanh")
    width, ffn = vision.size("hidden_size", 1152), vision.size("intermediate_size", 4304)
    out, blocks = output_size(config, vision, 3584), vision.size("depth", 27)
    patch, positions = vision.size("patch_size", 16), vision.size("num_position_embeddings", 2304)
    deep = deep_blocks(config)
    merged = 4 * width
    return Projector(
        "qwen3vl_merger",
        {
            **common_keys(vision, side_of(positions) * patch, width, ffn, out),
            "use_gelu": True,
            "vision.block_count": blocks,
            "vision.is_deepstack_layers": tuple(block in deep for block in range(blocks)),
        },
        (
            patches(width, patch),
            TowerTensor("visual.patch_embed.proj.bias", ("v.patch_embd.bias",), (width,)),
            TowerTensor("visual.pos_embed.weight", ("v.position_embd.weight",), (positions, width), wide=True),
            *(tensor for block in range(blocks) for tensor in _block(block, width, ffn)),
            *norm("visual.merger.norm", "v.post_ln", width),
            *linear("visual.merger.linear_fc1", "mm.0", merged, merged),
            *linear("visual.merger.linear_fc2", "mm.2", out, merged),
            *(tensor for number, block in enumerate(deep) for tensor in _deep(number, block, merged, out)),
        ),
        RENAMED,
    )  # fmt: skip


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
    yield from norm(f"{inner}.norm", f"{held}.norm", merged)
    yield from linear(f"{inner}.linear_fc1", f"{held}.fc1", merged, merged)
    yield from linear(f"{inner}.linear_fc2", f"{held}.fc2", out, merged)


def _block(number: int, width: int, ffn: int) -> Iterator[TowerTensor]:
    """Yield the tensors of one block."""
    inner, held = f"visual.blocks.{number}", f"v.blk.{number}"
    yield from norm(f"{inner}.norm1", f"{held}.ln1", width)
    yield from norm(f"{inner}.norm2", f"{held}.ln2", width)
    yield from linear(f"{inner}.attn.qkv", f"{held}.attn_qkv", 3 * width, width)
    yield from linear(f"{inner}.attn.proj", f"{held}.attn_out", width, width)
    yield from linear(f"{inner}.mlp.linear_fc1", f"{held}.ffn_up", ffn, width)
    yield from linear(f"{inner}.mlp.linear_fc2", f"{held}.ffn_down", width, ffn)
