"""Families with layers of several kinds: our artifacts in stock transformers, and what they cost against the source."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantforge.evaluation.evaluate import evaluate
from quantforge.runtime.load import load
from quantforge.verification.verify import VerificationOptions, verify
from tests.conftest import VOCABULARY, Tiny
from tests.evaluations import options
from tests.runs import quantize, recipe

IDS = torch.arange(48).reshape(1, 48) * 7 % VOCABULARY


def theirs(path: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_convolution_and_attention_layers(tiny: Tiny, tmp_path: Path, method: str) -> None:
    source = tiny("lfm2")
    done = quantize(source, tmp_path / "q", recipe(method, scheme="int8:g32:sym"))
    assert len(done.plan.quantized()) == 2 * (2 + 3) + 2 * (4 + 3)
    with torch.inference_mode():
        ours = load(tmp_path / "q").model(IDS).logits
    assert ours.std() > 0.1
    assert torch.equal(ours, theirs(tmp_path / "q"))
    assert not torch.equal(ours, theirs(source))
    assert verify(tmp_path / "q", VerificationOptions(source)).findings == []
    assert 0 < evaluate(source, [tmp_path / "q"], options()).rows[1]["kl_mean"] < 0.002
