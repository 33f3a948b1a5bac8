"""Qwen 2 and 2.5 VL: a qwen2 that reads pictures; files name its tensors as those of a decoder alone."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import qwen2
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import QKV_BIASES, Family
from quantforge.architectures.projector import (
    SWAPPED,
    Projector,
    TowerConfig,
    TowerTensor,
    linear,
    norm,
    not_carried,
)
from quantforge.architectures.qwen_tower import (
    DEVIATION,
    MEAN,
    RENAMED,
    common_keys,
    output_size,
    patches,
    tower_of,
)
from quantforge.architectures.tower_names import QWEN_TOWER, within_whole

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
        lists={"rope.dimension_sections": "quantforge.architectures.qwen_tower.sections"},
        obstacle="quantforge.architectures.llama_cpp.own_epsilon",  # it does not read that of the file
        is_read=False,
    ),
    windows=WindowRule(width=4096, asked=True, start=("max_window_layers", 80)),
    projector={"qwen2_5_vl": f"{__name__}.projector"},
)
_IMAGE = 560  # of a key that has to be there; pictures keep their own size


def projector(config: Mapping[str, Any]) -> Projector:
    """Return the tower of Qwen 2.5 VL, most of whose blocks look at windows; errors as `TowerConfig`."""
    vision = tower_of(config)
    vision.require("hidden_act", "silu")
    vision.require("window_size", 112)
    width, ffn = vision.size("hidden_size", 3584), vision.size("intermediate_size", 3420)
    if ffn == width:
        raise not_carried(f"intermediate_size = hidden_size = {ffn}", SWAPPED)
    out, blocks = output_size(config, vision, 3584), vision.size("depth", 32)
    merged = 4 * width
    return Projector(
        "qwen2.5vl_merger",
        {
            **common_keys(vision, _IMAGE, width, ffn, out),
            "use_silu": True,
            "vision.block_count": blocks,
            "vision.n_wa_pattern": _period(vision, blocks),
        },
        (
            patches(width, vision.size("patch_size", 14)),
            *(tensor for block in range(blocks) for tensor in _block(block, width, ffn)),
            *norm("visual.merger.ln_q", "v.post_ln", width, bias=False),
            *linear("visual.merger.mlp.0", "mm.0", merged, merged),
            *linear("visual.merger.mlp.2", "mm.2", out, merged),
        ),
        RENAMED,
        mean=MEAN,
        deviation=DEVIATION,
    )


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


def _block(number: int, width: int, ffn: int) -> Iterator[TowerTensor]:
    """Yield the tensors of one block."""
    inner, held = f"visual.blocks.{number}", f"v.blk.{number}"
    yield from norm(f"{inner}.norm1", f"{held}.ln1", width, bias=False)
    yield from norm(f"{inner}.norm2", f"{held}.ln2", width, bias=False)
    for tensor in linear(f"{inner}.attn.qkv", f"{held}.attn_qkv", 3 * width, width):
        yield replace(tensor, held=tuple(tensor.held[0].replace("qkv", one) for one in "qkv"))
    yield from linear(f"{inner}.attn.proj", f"{held}.attn_out", width, width)
    yield from linear(f"{inner}.mlp.gate_proj", f"{held}.ffn_gate", ffn, width)
    yield from linear(f"{inner}.mlp.up_proj", f"{held}.ffn_up", ffn, width)
    yield from linear(f"{inner}.mlp.down_proj", f"{held}.ffn_down", width, ffn)
