"""The bundled mixture of experts is trained: it predicts text that it never saw, and all of its experts are used."""

import json
import lzma
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.test_demo_model import _load_demo_text

ROOT = Path(__file__).resolve().parents[1]
MIXTURE = ROOT / "models" / "demo-moe"
WINDOW = 512
PREFIX_BYTES = 32 * 1024


def test_the_weights_stay_below_eight_megabytes() -> None:
    files = {path.name for path in MIXTURE.iterdir()}
    assert files == {path.name for path in (ROOT / "models" / "demo").iterdir()}
    assert (MIXTURE / "model.safetensors").stat().st_size < 8_000_000
    config = json.loads((MIXTURE / "config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"]) == (8, 2)
    assert config["shared_expert_intermediate_size"] % 128 == 0
    assert config["hidden_size"] % 256 == 0


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        MIXTURE, dtype=torch.float32, local_files_only=True, experts_implementation="eager"
    ).eval()


def test_it_was_trained_and_every_expert_is_used(model: torch.nn.Module) -> None:
    """At least 10 % fewer bits per byte than `xz -9e`, and no expert without its part of the tokens, nor all alike."""
    prefix = _load_demo_text().evaluation_text().encode()[:PREFIX_BYTES]
    xz_bits = 8 * len(lzma.compress(prefix, preset=9 | lzma.PRESET_EXTREME)) / len(prefix)
    tokenizer = AutoTokenizer.from_pretrained(MIXTURE, local_files_only=True)
    tokens = torch.tensor(tokenizer(prefix.decode(errors="ignore"), verbose=False)["input_ids"])
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    with torch.inference_mode():
        found = model(input_ids=windows, output_router_logits=True)
    nats = functional.cross_entropy(
        found.logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten(), reduction="sum"
    )
    paid = sum(len(t) for row in windows for t in tokenizer.convert_ids_to_tokens(row[1:].tolist()))
    assert float(nats) / math.log(2) / paid <= 0.9 * xz_bits
    for logits in found.router_logits:
        chosen = logits.topk(2).indices.flatten().bincount(minlength=8) / windows.numel() / 2
        assert 0.03 < chosen.min() < 0.8 * chosen.max()
