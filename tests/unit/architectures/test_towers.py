"""Roles of tensors in undeclared families: decoder blocks, other towers, norms and convolutions."""

from __future__ import annotations

from typing import Any

import pytest

from quantforge.architectures.match import Role, match_tensors
from quantforge.plans import StoredTensor

H = 64
BLOCK = {"self_attn.q_proj": (H, H), "mlp.up_proj": (2 * H, H), "mlp.down_proj": (H, 2 * H)}


def roles_and_blocks(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[Role, int]]:
    stored = [StoredTensor(name, "BF16", shape) for name, shape in shapes.items()]
    model_layout = match_tensors({"model_type": "novel"} | config, stored)
    return {tensor.header.name: (tensor.role, tensor.block) for tensor in model_layout.tensors}


def block_shapes(prefix: str, count: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{i}.{name}.weight": shape for i in range(count) for name, shape in BLOCK.items()}  # fmt: skip


@pytest.mark.parametrize(
    "tower", ["model.sam.blocks", "model.encoder.layers", "model.tokens.layer"]
)
@pytest.mark.parametrize("depth", [{"depth": 6}, {"image": {"num_hidden_layers": 6}}])
def test_the_block_list_of_configured_length_is_the_decoder(
    tower: str, depth: dict[str, Any]
) -> None:
    """Also if another tower is larger; tensors next to its block list belong to that tower."""
    config = {"text_config": {"num_hidden_layers": 2}, "seen_config": depth}
    beside = tower.rpartition(".")[0] + ".embed.pos_embed.weight"
    shapes = block_shapes("model.lm.layers", 2) | block_shapes(tower, 6)
    shapes |= {beside: (4, H), "model.lm.embed_tokens.weight": (8, H)}
    shapes |= {"model.deepstack_merger_list.0.fc.weight": (H, H)}
    assigned = roles_and_blocks(config, shapes)
    linear = {name for name, (role, _) in assigned.items() if role is Role.LINEAR}
    assert linear == set(block_shapes("model.lm.layers", 2))
    assert all(assigned[name] == (Role.OTHER, -1) for name in [*block_shapes(tower, 6), beside])
    assert assigned["model.lm.embed_tokens.weight"] == (Role.EMBEDDING, -1)


def test_all_block_lists_of_a_text_model_are_decoder_blocks() -> None:
    """A list of single matrices is not a block list."""
    shapes = (
        block_shapes("model.layers", 2)
        | block_shapes("draft.layers", 1)
        | {"model.altup.0.weight": (H, H)}
    )
    shapes |= block_shapes("mtp.layers", 1)
    assigned = roles_and_blocks({"num_hidden_layers": 2, "ffn_config": {"size": 3}}, shapes)
    linear = {name for name, (role, _) in assigned.items() if role is Role.LINEAR}
    assert linear == set(block_shapes("model.layers", 2) | block_shapes("draft.layers", 1))
    assert all(assigned[name] == (Role.FOREIGN, -1) for name in block_shapes("mtp.layers", 1))
    assert assigned["model.altup.0.weight"] == (Role.OTHER, -1)


def test_linears_inside_norm_modules_are_linears() -> None:
    shapes = {f"l.{i}.{name}.weight": (H, H) for i in range(2) for name in (
        "norm_attn_norm.attn.Wqkv", "post_attention_layernorm.W_down", "q_norm", "indexer.weights_proj",
        "indexer.wk", "attn_norm.up")}  # fmt: skip
    shapes |= {"l.0.norm_attn_norm.norm_1.weight": (H,), "l.0.short_conv.weight": (H, 4)}
    shapes |= {"model.unembed.weight": (8, H), "model.embed_proj.weight": (H, H)}
    assigned = roles_and_blocks({"num_hidden_layers": 2}, shapes)
    linear = {name for name, (role, _) in assigned.items() if role is Role.LINEAR and "l.0" in name}
    assert linear == {
        f"l.0.{name}.weight"
        for name in (
            "norm_attn_norm.attn.Wqkv",
            "post_attention_layernorm.W_down",
            "indexer.wk",
            "attn_norm.up",
        )
    }
    assert assigned["model.unembed.weight"] == (Role.HEAD, -1)
    assert assigned["model.embed_proj.weight"] == (Role.OTHER, -1)
