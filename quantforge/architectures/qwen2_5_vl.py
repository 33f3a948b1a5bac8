"""Qwen 2 and 2.5 VL: a qwen2 that reads pictures; files name its tensors as those of a decoder alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import qwen2
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import QKV_BIASES, Family
from quantforge.architectures.projector import (
    SWAPPED,
    Projector,
    TowerConfig,
    TowerSizes,
    TowerTensor,
    module,
    not_carried,
    stack,
    weight,
)
from quantforge.architectures.qwen_tower import (
    DEPTH_AND_HEADS,
    DEVIATION,
    MEAN,
    decoder_width,
    patches,
    qwen_keys,
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
        mean=MEAN,
        deviation=DEVIATION,
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
