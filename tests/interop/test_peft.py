"""PEFT puts a correction on models that transformers loads, and computes what `eval` measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quantforge import verbs
from quantforge.runtime.load import load
from quantforge.runtime.put_adapter import open_correction, with_low_rank
from quantforge.settings import Settings
from tests.conftest import Tiny
from tests.runs import quantize, recipe
from tests.thorough import further

peft = pytest.importorskip("peft")
IDS = torch.arange(48)[None] * 7 % 300
FEW = {"samples": 6, "length": 24}


@pytest.mark.parametrize(
    ("family", "scheme", "form", "method"),
    [
        ("llama-wide", "int3:g32:sym", "compressed-tensors", "gptq"),
        further("llama-wide", "int4:g32:sym", "compressed-tensors", "awq"),
        ("phi3", "int4:g32:sym", "compressed-tensors", "rtn"),
        ("gpt2", "int4:g32:sym", "compressed-tensors", "rtn"),
        further("llama-wide", "int8:row:sym", "bnb", "rtn"),
        ("llama-wide", "nf4", "bnb", "rtn"),
    ],
)
def test_logits_are_those_of_peft(
    tiny: Tiny, tmp_path: Path, family: str, scheme: str, form: str, method: str
) -> None:
    from transformers import AutoModelForCausalLM

    if form == "bnb":
        pytest.importorskip("bitsandbytes")
        pytest.importorskip("accelerate")
    model, base = tiny(family), tmp_path / "q"
    quantize(model, base, recipe(method, scheme=scheme, format=form))
    made = verbs.correct(model, base, tmp_path / "a", rank=4, **FEW)
    own = load(base)
    with torch.inference_mode():
        plain = own.model(IDS).logits
        corrected = with_low_rank(own, open_correction(made.out, base)).model(IDS).logits
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, device_map="cpu")
    with torch.inference_mode():
        stock(IDS)  # compressed-tensors decodes in the first pass, and PEFT asks for weights
    on_it = peft.PeftModel.from_pretrained(stock, made.out).eval()
    halves = [name for name, _ in on_it.named_parameters() if "lora_A" in name]
    assert len(halves) == made.modules
    with torch.inference_mode():
        found = on_it(IDS).logits
        with on_it.disable_adapter():
            rounding = (on_it(IDS).logits - plain).abs().max()  # of bitsandbytes' own kernels
    assert (corrected - plain).abs().max() > 1e-3
    torch.testing.assert_close(found.float(), corrected, rtol=0, atol=1e-5 + 3 * float(rounding))


def test_a_linear_that_is_not_quantized_stays_as_it_is(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, base = tiny("llama-wide"), tmp_path / "q"
    quantize(model, base, recipe(scheme="int4:g32:sym", ignore=("*layers.0.mlp.down_proj",)))
    made = verbs.correct(model, base, tmp_path / "a", rank=2, settings=Settings(), **FEW)
    named = json.loads((made.out / "adapter_config.json").read_text())["target_modules"]
    assert "model.layers.1.mlp.down_proj" in named
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    stock(IDS)
    on_it = peft.PeftModel.from_pretrained(stock, made.out)
    changed = {name for name, _ in on_it.named_parameters() if "lora_A" in name}
    assert len(changed) == made.modules == len(named)
    assert not any("layers.0.mlp.down_proj" in name for name in changed)
