"""Qwen 3 VL: a qwen3 that reads pictures, whose features are added to the states of early layers too."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from quantforge.architectures import qwen3
from quantforge.architectures.declare import QWEN_TOWER, within_whole
from quantforge.architectures.layer_windows import NONE
from quantforge.architectures.llama_cpp import Family
from quantforge.architectures.projector import (
    Projector,
    TowerSizes,
    TowerTensor,
    module,
    not_carried,
    stack,
    weight,
)
from quantforge.architectures.qwen2_5_vl import (
    DEPTH_AND_HEADS,
    decoder_width,
    patches,
    qwen_keys,
    sections,
    tower_of,
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
        numbers={"n_deepstack_layers": deep_count},
        lists={"rope.dimension_sections": sections},
        obstacle=beyond_llama_cpp,
    ),
    windows=NONE,
    projector={"qwen3_vl": projector},
)
