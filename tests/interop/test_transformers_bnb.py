"""Stock transformers with bitsandbytes loads our LLM.int8(), whose columns in 16 bits it passes over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantforge.files.reader import open_checkpoint
from quantforge.formats import detect_format
from tests.conftest import Tiny
from tests.runs import quantize, recipe

pytest.importorskip("bitsandbytes")
pytest.importorskip("accelerate")  # transformers loads nothing of bitsandbytes without it


def test_tensors_of_our_own_are_passed_over(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(tiny("llama-wide"), out, recipe(scheme="LLM_INT8", format="bnb", scales="absmax"))
    model, said = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.bfloat16, device_map="cpu", output_loading_info=True
    )
    assert not said["missing_keys"]
    assert not said["mismatched_keys"]
    assert all("outlier" in name for name in said["unexpected_keys"])
    checkpoint = open_checkpoint(out)
    headers = checkpoint.stored_tensors()
    form = detect_format(checkpoint.config)
    for layout in form.find_layouts(checkpoint.config, headers):
        weight = model.get_submodule(layout.module).weight
        stored = form.unpack(layout, {name: checkpoint.read(name) for name in layout.tensor_names})
        assert torch.equal(weight.data.cpu(), stored.codes)
        scb = weight.SCB if weight.SCB is not None else model.get_submodule(layout.module).state.SCB
        torch.testing.assert_close(scb.float().cpu() / 127, stored.parameters["scales"][:, 0])
    with torch.inference_mode():
        logits = model(torch.arange(12)[None]).logits
    assert bool(logits.isfinite().all())
