"""Mistral Small 3.1 and later, and Ministral 3: a mistral or a ministral3 beside a vision tower."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import ministral3, mistral, text_config
from quantforge.architectures.projector import (
    Projector,
    TokenRow,
    TowerConfig,
    TowerTensor,
    norm,
    not_carried,
)
from quantforge.architectures.qwen_tower import DEVIATION, MEAN
from quantforge.architectures.tower_names import beside_towers

_MISTRAL, _MINISTRAL = (
    replace(
        beside_towers(
            text.ARCHITECTURE,
            "mistral3",
            (r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
            (("language_model.", ""), ("model.language_model.", "model.")),
        ),
        graph=None,
        projector={"mistral3": f"{__name__}.projector"},
    )
    for text in (mistral, ministral3)
)
ARCHITECTURE = replace(
    _MINISTRAL, decoders=dict.fromkeys((mistral.ARCHITECTURE.model_type, ""), _MISTRAL)
)
_EPS = 1e-5  # of the tower's norms, in transformers' code; llama.cpp has one for the projector, too
_THETA = 1e4  # llama.cpp knows it by heart
_ACTIVATIONS = {"silu": "use_silu", "gelu": "use_gelu"}


def projector(config: Mapping[str, Any]) -> Projector:
    """Return Pixtral's tower with the projector of Mistral 3, for a whole configuration; errors as `TowerConfig`.

    Rows of a picture's tokens end with the embedding of a token of the decoder, which llama.cpp wants beside the tower.
    """
    whole, vision = TowerConfig(config, ""), TowerConfig(config["vision_config"])
    words = text_config(config)
    text = TowerConfig({"rms_norm_eps": 1e-6, **words}, "text_config")
    activation = vision.values.get("hidden_act", "gelu")
    _check(whole, vision, text, activation)
    width, ffn = vision.size("hidden_size", 1024), vision.size("intermediate_size", 4096)
    blocks, heads = vision.size("num_hidden_layers", 24), vision.size("num_attention_heads", 16)
    if width % heads or width // heads % 4:
        raise not_carried(f"{heads} heads of {width} columns", "heads of a multiple of 4 columns")
    vision.require("head_dim", width // heads)
    image, patch = vision.size("image_size", 1540), vision.size("patch_size", 14)
    merged, out = whole.size("spatial_merge_size", 2), text.size("hidden_size", 5120)
    joined = width * merged**2
    biased = config.get("multimodal_projector_bias", False) is True
    return Projector(
        "pixtral",
        {
            _ACTIVATIONS[activation]: True,
            "vision.image_size": image,
            "vision.patch_size": patch,
            "vision.embedding_length": width,
            "vision.feed_forward_length": ffn,
            "vision.block_count": blocks,
            "vision.attention.head_count": heads,
            "vision.attention.layer_norm_epsilon": _EPS,
            "vision.projection_dim": out,
            "vision.spatial_merge_size": merged,
        },
        (
            TowerTensor(
                "vision_tower.patch_conv.weight", ("v.patch_embd.weight",), (width, 3, patch, patch), wide=True
            ),
            *norm("vision_tower.ln_pre", "v.pre_ln", width, bias=False),
            *(tensor for block in range(blocks) for tensor in _block(block, width, ffn, heads)),
            *norm("multi_modal_projector.norm", "mm.input_norm", width, bias=False),
            _matrix("multi_modal_projector.patch_merger.merging_layer", "mm.patch_merger", width, joined),
            *_projected("multi_modal_projector.linear_1", "mm.1", out, width, biased=biased),
            *_projected("multi_modal_projector.linear_2", "mm.2", out, out, biased=biased),
        ),
        renamed=(("model.", ""),),
        row=TokenRow("[IMG_BREAK]", "v.token_embd.img_break", out),
        mean=MEAN,
        deviation=DEVIATION,
    )  # fmt: skip


def _check(whole: TowerConfig, vision: TowerConfig, text: TowerConfig, activation: object) -> None:
    """Refuse what llama.cpp computes in one way alone."""
    vision.require("model_type", "pixtral")
    vision.require("num_channels", 3)
    whole.require("projector_hidden_act", "gelu")
    whole.require("vision_feature_layer", -1)
    text.require("rms_norm_eps", _EPS)
    if activation not in _ACTIVATIONS:
        raise not_carried(f"vision_config.hidden_act = {str(activation)[:40]}", "silu or gelu")
    vision.turns(_THETA)


def _block(number: int, width: int, ffn: int, heads: int) -> Iterator[TowerTensor]:
    """Yield the tensors of one block of the tower."""
    inner, held = f"vision_tower.transformer.layers.{number}", f"v.blk.{number}"
    yield from norm(f"{inner}.attention_norm", f"{held}.ln1", width, bias=False)
    yield from norm(f"{inner}.ffn_norm", f"{held}.ln2", width, bias=False)
    for name, turned in (("q", heads), ("k", heads), ("v", 0)):
        yield _matrix(f"{inner}.attention.{name}_proj", f"{held}.attn_{name}", width, width, turned)
    yield _matrix(f"{inner}.attention.o_proj", f"{held}.attn_out", width, width)
    for name, out, columns in (("gate", ffn, width), ("up", ffn, width), ("down", width, ffn)):
        yield _matrix(f"{inner}.feed_forward.{name}_proj", f"{held}.ffn_{name}", out, columns)


def _matrix(name: str, held: str, out: int, inner: int, heads: int = 0) -> TowerTensor:
    return TowerTensor(f"{name}.weight", (f"{held}.weight",), (out, inner), heads=heads)


def _projected(
    name: str, held: str, out: int, inner: int, *, biased: bool
) -> Iterator[TowerTensor]:
    yield _matrix(name, held, out, inner)
    if biased:
        yield TowerTensor(f"{name}.bias", (f"{held}.bias",), (out,))
