"""Logits of families with more than one matrix between final hidden states and logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantforge.evaluation.output_head import OutputHead, checked_head
from quantforge.model.model_parts import base_model, block_list_name
from quantforge.runtime.load import load
from scripts import tiny_families

IDS = torch.arange(12)[None] + 2


def test_layers_before_the_output_layer_use_the_models_code(
    tmp_path: Path,
) -> None:
    model = load(tiny_families.write("modernbert-decoder", tmp_path / "m")).model
    with torch.inference_mode():
        hidden = base_model(model)(IDS).last_hidden_state[0]
        own = model(IDS).logits[0]
        assert not torch.allclose(OutputHead(model).logits(hidden), own, atol=1e-2)
        head = checked_head(model, IDS)
        torch.testing.assert_close(head.logits(hidden), own)
        assert torch.equal(model(IDS).logits[0], own)  # the model itself is as it was
    assert list(head.vocabulary_slices(5)) == [slice(0, head.vocabulary)]


def test_a_single_matrix_head_splits_its_vocabulary() -> None:
    assert checked_head(tiny_families.build("llama").float(), IDS).splits_vocabulary


@pytest.mark.parametrize(
    ("family", "blocks"), [("modernbert-decoder", "model.layers"), ("llama", "model.layers")]
)
def test_an_output_layer_named_decoder_is_not_searched_for_blocks(family: str, blocks: str) -> None:
    assert block_list_name(tiny_families.build(family)) == blocks
