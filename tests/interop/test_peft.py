"""PEFT puts an adapter on models that transformers loads, and computes what `eval --correction` measures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantforge.runtime.adapter_layers import add_adapter, open_correction
from quantforge.runtime.load import load
from tests.conftest import Tiny
from tests.runs import quantize, recipe
from tests.thorough import thorough_case

peft = pytest.importorskip("peft")
IDS = torch.arange(48)[None] * 7 % 300


@pytest.mark.parametrize(
    ("family", "scheme", "form", "method"),
    [
        thorough_case("llama-wide", "int3:g32:sym", "compressed-tensors", "gptq"),
        thorough_case("llama-wide", "int4:g32:sym", "compressed-tensors", "awq"),
        ("phi3", "int4:g32:sym", "compressed-tensors", "rtn"),
        ("gpt2", "int4:g32:sym", "compressed-tensors", "rtn"),
        thorough_case("llama-wide", "int8:row:sym", "bnb", "rtn"),
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
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=False
    )
    torch.manual_seed(0)
    adapted = peft.get_peft_model(source, config)
    adapted.save_pretrained(tmp_path / "a")
    own = load(base)
    with torch.inference_mode():
        plain = own.model(IDS).logits
        corrected = add_adapter(own, open_correction(tmp_path / "a")).model(IDS).logits
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, device_map="cpu")
    with torch.inference_mode():
        stock(IDS)  # compressed-tensors decodes in the first pass, and PEFT asks for weights
    on_it = peft.PeftModel.from_pretrained(stock, tmp_path / "a").eval()
    with torch.inference_mode():
        found = on_it(IDS).logits
        with on_it.disable_adapter():
            rounding = (on_it(IDS).logits - plain).abs().max()  # of bitsandbytes' own kernels
    assert (corrected - plain).abs().max() > 1e-3
    torch.testing.assert_close(found.float(), corrected, rtol=0, atol=1e-5 + 3 * float(rounding))
