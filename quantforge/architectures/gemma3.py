"""Gemma 3: gemma 2 without soft-capping, with norms over the heads of q and k.

The larger models are multimodal: their text tower lies under a prefix, its configuration under ``text_config`` (with
most keys left at their defaults), and the vision tower with its projector is kept as it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from quantforge.architectures import gemma2, text_config
from quantforge.architectures.declare import layer, norms
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.projector import (
    SWAPPED,
    Projector,
    TowerConfig,
    TowerTensor,
    linear,
    norm,
    not_carried,
)
from quantforge.architectures.tower_names import ALONE, WITHIN_TOWERS

HEAD_NORMS = norms("self_attn.q_norm", "self_attn.k_norm", dimension="head")
ARCHITECTURE = replace(
    gemma2.ARCHITECTURE,
    model_type="gemma3",
    kinds=(layer(gemma2.NORMS, HEAD_NORMS, *gemma2.MIXERS),),
    prefixes=(("", ""), ("language_model.", ""), ("model.language_model.", "model.")),
    unmapped={"gemma3": ALONE, "gemma3_text": WITHIN_TOWERS},
    foreign=(*gemma2.ARCHITECTURE.foreign, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    requires={"use_bidirectional_attention": False},
    defaults={
        **gemma2.ARCHITECTURE.defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    text_config="text_config",
    fused_attention=True,
    windows=WindowRule(width=4096, period=6, period_key="sliding_window_pattern"),
    projector={"gemma3": f"{__name__}.projector"},
)


def projector(config: Mapping[str, Any]) -> Projector:
    """Return SigLIP with the projector of Gemma 3, for a whole configuration; errors as `TowerConfig`."""
    vision = TowerConfig(config["vision_config"])
    vision.require("hidden_act", "gelu_pytorch_tanh")
    width, ffn = vision.size("hidden_size", 1152), vision.size("intermediate_size", 4304)
    if ffn == width:
        raise not_carried(f"intermediate_size = hidden_size = {ffn}", SWAPPED)
    blocks, heads = vision.size("num_hidden_layers", 27), vision.size("num_attention_heads", 16)
    image, patch = vision.size("image_size", 896), vision.size("patch_size", 14)
    out = TowerConfig(text_config(config), "text_config").size("hidden_size", 2304)
    tokens = TowerConfig(config, "").size("mm_tokens_per_image", 256)
    side = image // patch
    pooled = side // isqrt(tokens) if isqrt(tokens) ** 2 == tokens else 0
    if not pooled or pooled * isqrt(tokens) != side:
        raise not_carried(
            f"mm_tokens_per_image = {tokens} of {side} x {side} patches",
            "a square that divides them",
        )
    return Projector(
        "gemma3",
        {
            "use_gelu": True,
            "vision.image_size": image,
            "vision.patch_size": patch,
            "vision.embedding_length": width,
            "vision.feed_forward_length": ffn,
            "vision.block_count": blocks,
            "vision.attention.head_count": heads,
            "vision.attention.layer_norm_epsilon": vision.real("layer_norm_eps", 1e-6),
            "vision.projection_dim": out,
            "vision.projector.scale_factor": pooled,
        },
        (
            TowerTensor(
                "vision_tower.embeddings.patch_embedding.weight", ("v.patch_embd.weight",),
                (width, 3, patch, patch), wide=True,
            ),
            TowerTensor("vision_tower.embeddings.patch_embedding.bias", ("v.patch_embd.bias",), (width,)),
            TowerTensor(
                "vision_tower.embeddings.position_embedding.weight", ("v.position_embd.weight",),
                (side * side, width), wide=True,
            ),
            *(tensor for block in range(blocks) for tensor in _block(block, width, ffn)),
            *norm("vision_tower.post_layernorm", "v.post_ln", width),
            TowerTensor(
                "multi_modal_projector.mm_soft_emb_norm.weight", ("mm.soft_emb_norm.weight",),
                (width,), plus_one=True,
            ),
            TowerTensor(
                "multi_modal_projector.mm_input_projection_weight", ("mm.input_projection.weight",),
                (width, out),
            ),
        ),
        renamed=(("model.", ""), ("vision_tower.vision_model.", "vision_tower.")),
        unread=(r"vision_tower\.head\..*",),
    )  # fmt: skip


def _block(number: int, width: int, ffn: int) -> Iterator[TowerTensor]:
    """Yield the tensors of one block of SigLIP."""
    inner, held = f"vision_tower.encoder.layers.{number}", f"v.blk.{number}"
    yield from norm(f"{inner}.layer_norm1", f"{held}.ln1", width)
    yield from norm(f"{inner}.layer_norm2", f"{held}.ln2", width)
    for name in ("q", "k", "v"):
        yield from linear(f"{inner}.self_attn.{name}_proj", f"{held}.attn_{name}", width, width)
    yield from linear(f"{inner}.self_attn.out_proj", f"{held}.attn_out", width, width)
    yield from linear(f"{inner}.mlp.fc1", f"{held}.ffn_up", ffn, width)
    yield from linear(f"{inner}.mlp.fc2", f"{held}.ffn_down", width, ffn)
