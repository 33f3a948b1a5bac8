"""Rows with images reach the blocks as transformers' whole model hands them over, and leave the last one alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.model.model_parts import block_list_name
from quantforge.model.stream import ModelStream
from tests.conftest import make_tiny
from tests.equivalence.test_stream import opened, whole_model

IMAGE, START = 310, 311
IDS = {"image_token_id": IMAGE}
QWEN = {**IDS, "vision_start_token_id": START}
# Features of an image are seen both ways; positions have three axes; features are added to early blocks, too; a state
# is carried on.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3-multimodal": {**IDS, "image_token_index": IMAGE},
    "qwen2.5-vl": QWEN,
    "qwen3-vl": QWEN,
    "qwen3.5-multimodal": QWEN,
}


class Rows:
    """Three rows, the first of text alone, with what a processor would make of the images of the others."""

    def __init__(self, family: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, 300, (3, 40), generator=generator)
        self.ids[1:, 4], self.ids[1:, 5:9] = START, IMAGE
        self.gemma = family.startswith("gemma3")
        shape = (1, 3, 32, 32) if self.gemma else (16, 3 * 2 * 8 * 8)
        self.pixels = torch.rand(3, *shape, generator=generator)

    def images(self, row: int) -> Mapping[str, Tensor]:
        """Return what the whole model takes beside the ids."""
        kinds = (self.ids[row : row + 1] == IMAGE).int()
        given = {"token_type_ids" if self.gemma else "mm_token_type_ids": kinds}
        if row:
            given["pixel_values"] = self.pixels[row]
        if row and not self.gemma:
            given["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        return given


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_with_images_is_the_whole_model(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path, **FAMILIES[family])
    rows, whole = Rows(family), whole_model(path)
    blocks = whole.get_submodule(block_list_name(whole))
    first: list[Tensor] = []
    last: list[Tensor] = []

    def reaches(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first.append(args[0] if args else kwargs["hidden_states"])

    blocks[0].register_forward_pre_hook(reaches, with_kwargs=True)
    blocks[-1].register_forward_hook(
        lambda _, __, out: last.append(out if isinstance(out, Tensor) else out[0])
    )
    expected = [
        whole(input_ids=rows.ids[row : row + 1], **rows.images(row)).logits for row in range(3)
    ]
    blind = whole(input_ids=rows.ids[1:2]).logits
    assert (blind - expected[1]).abs().max() > 0.1
    checkpoint, model_layout = opened(path)
    for options in ({"micro_batch": 2}, {"micro_batch": 3, "activations": tmp_path}):
        with ModelStream(checkpoint, model_layout, rows, **options) as stream:
            for part in stream:
                for batch in stream._micro_batches(part.index):
                    for row in batch.split_into_rows() if part.index == 0 else ():
                        reached = row.inputs.call_for(row.start, row.states)
                        assert torch.equal(reached.states, first[row.start])
                # A row passes more often than it advances.
                part.observe({}, run_to_end=True)
                part.advance()
            assert torch.equal(stream._states.read(1, 3), torch.cat(last[1:3]))
            assert torch.equal(torch.cat(list(stream.logits())), torch.cat(expected))


def test_images_that_do_not_fit_their_tokens_are_refused_with_the_row(tmp_path: Path) -> None:
    path = make_tiny("qwen2.5-vl", tmp_path, **QWEN)
    rows = Rows("qwen2.5-vl")
    rows.ids[2, 5] = 7
    checkpoint, model_layout = opened(path)
    with (
        ModelStream(checkpoint, model_layout, rows) as stream,
        pytest.raises(
            InputError, match=r"calibration row 2: transformers cannot run it .* tokens: 3"
        ),
    ):
        stream.embed()
