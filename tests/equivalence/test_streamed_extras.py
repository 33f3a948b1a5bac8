"""Blocks that get more of each token than its hidden state are streamed as transformers runs them, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.architectures.match import ModelLayout
from quantforge.errors import RefusedError, UsageError
from quantforge.files.reader import open_checkpoint
from quantforge.model.stream import ModelStream
from quantforge.quantizers.guidance.backward import backward
from scripts import tiny_families
from tests.conftest import tiny_tokenizer
from tests.equivalence.test_derived import derived
from tests.runs import StopError, crash_after, fast_recipe, file_digests, quantize

# Embeddings of each layer with shared keys and values; tokens that an earlier layer chose; states of a router;
# streams of hidden states; integers among the tensors of a block.
FAMILIES = ["gemma4_text", "glm_moe_dsa", "zaya", "hy_v4"]
MORE: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
}
ROWS = torch.arange(3 * 40).reshape(3, 40) * 7 % 300 + 2


@pytest.fixture(params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    family = request.param
    special = {**tiny_families.SPECIAL, family: MORE.get(family, {})}
    monkeypatch.setattr(tiny_families, "SPECIAL", special)
    return tiny_families.write(family, tmp_path / family)


def whole(path: Path) -> Any:
    kind = tiny_families.class_of(path.name)
    return kind.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)


def streamed(path: Path, model_layout: ModelLayout, **options: Any) -> Tensor:
    with (
        torch.inference_mode(),
        ModelStream(open_checkpoint(path), model_layout, ROWS, **options) as s,
    ):
        for part in s:
            # A block passes its rows more often than it advances: what it returned then has to be forgotten.
            part.observe({}, run_to_end=True)
            part.advance()
        return torch.cat(list(s.logits()))


def test_a_stream_is_the_whole_model(path: Path) -> None:
    model_layout = derived(path)
    assert model_layout.architecture is not None
    assert model_layout.architecture.needs_model_replay
    assert model_layout.architecture.num_streams == (4 if path.name == "hy_v4" else 1)
    model = whole(path)
    with torch.inference_mode():
        expected = torch.cat([model(row[None]).logits for row in ROWS])
    found = streamed(path, model_layout, micro_batch=2)
    if any(
        kind.stacks for kind in model_layout.layers
    ):  # an expert takes the tokens of all rows at once
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(found, expected)
    assert torch.equal(streamed(path, model_layout, micro_batch=3, activations=path), found)


@pytest.mark.thorough
@pytest.mark.parametrize("path", FAMILIES[:1], indirect=True)
def test_a_run_that_was_interrupted_goes_on_to_the_same_bytes(path: Path, tmp_path: Path) -> None:
    """What earlier blocks return is computed anew."""
    tiny_tokenizer().save_pretrained(path)
    wanted = fast_recipe("gptq", scheme="int4:g16:sym")
    quantize(path, tmp_path / "whole", wanted)
    with pytest.raises(StopError):
        quantize(path, tmp_path / "again", wanted, progress=crash_after("block 2"))
    quantize(path, tmp_path / "again", wanted)
    assert file_digests(tmp_path / "again") == file_digests(tmp_path / "whole")


@pytest.mark.parametrize("path", FAMILIES[:1], indirect=True)
def test_ranks_do_not_share_it(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_tokenizer().save_pretrained(path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(UsageError, match="pass on more than hidden states"):
        quantize(path, tmp_path / "out", fast_recipe("gptq", scheme="int4:g16:sym"), join=True)


@pytest.mark.parametrize("path", FAMILIES[:1], indirect=True)
def test_gradients_are_refused_where_they_come_from_more_than_the_next_block(path: Path) -> None:
    with pytest.raises(RefusedError, match="more than the next block"):
        backward(open_checkpoint(path), derived(path), ROWS, lambda _: None)
