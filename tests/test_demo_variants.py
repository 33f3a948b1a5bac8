"""The bundled mixture and hybrid are trained: they predict text that they never saw, with all experts and mixers."""

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
HYBRID = ROOT / "models" / "demo-hybrid"
WINDOW = 512
PREFIX_BYTES = 16 * 1024


@pytest.mark.parametrize("path", [MIXTURE, HYBRID], ids=["moe", "hybrid"])
def test_the_weights_stay_below_eight_megabytes(path: Path) -> None:
    files = {file.name for file in path.iterdir()}
    assert files == {file.name for file in (ROOT / "models" / "demo").iterdir()}
    assert (path / "model.safetensors").stat().st_size < 8_000_000


def test_kinds_of_layers_and_shapes_are_as_the_cards_say() -> None:
    hybrid = json.loads((HYBRID / "config.json").read_text())
    assert (hybrid["layer_types"].count("conv"), hybrid["layer_types"].count("full_attention")) == (
        3,
        2,
    )
    assert hybrid["hidden_size"] % 256 == hybrid["intermediate_size"] % 256 == 0
    config = json.loads((MIXTURE / "config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"]) == (8, 2)
    assert config["shared_expert_intermediate_size"] % 128 == 0
    assert config["hidden_size"] % 256 == 0


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        MIXTURE, dtype=torch.float32, local_files_only=True, experts_implementation="eager"
    ).eval()


def windows_of(path: Path, prefix: bytes) -> tuple[torch.Tensor, int]:
    """Return windows of a model's tokens ``[windows, tokens]``, and how many bytes all but the first ones stand for."""
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    tokens = torch.tensor(tokenizer(prefix.decode(errors="ignore"), verbose=False)["input_ids"])
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    paid = sum(len(t) for row in windows for t in tokenizer.convert_ids_to_tokens(row[1:].tolist()))
    return windows, paid


def bits_of(logits: torch.Tensor, windows: torch.Tensor) -> float:
    """Return the bits of all tokens but the first of each window."""
    nats = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten(), reduction="sum"
    )
    return float(nats) / math.log(2)


@pytest.fixture(scope="module")
def prefix() -> bytes:
    return bytes(_load_demo_text().evaluation_text().encode()[:PREFIX_BYTES])


@pytest.fixture(scope="module")
def xz_bits(prefix: bytes) -> float:
    """The bits per byte of `xz -9e`."""
    return 8 * len(lzma.compress(prefix, preset=9 | lzma.PRESET_EXTREME)) / len(prefix)


def test_it_was_trained_and_every_expert_is_used(
    model: torch.nn.Module, prefix: bytes, xz_bits: float
) -> None:
    """At least 10 % fewer bits per byte than `xz -9e`, and no expert without its part of the tokens, nor all alike."""
    windows, paid = windows_of(MIXTURE, prefix)
    with torch.inference_mode():
        found = model(input_ids=windows, output_router_logits=True)
    assert bits_of(found.logits, windows) / paid <= 0.9 * xz_bits
    for logits in found.router_logits:
        chosen = logits.topk(2).indices.flatten().bincount(minlength=8) / windows.numel() / 2
        assert 0.03 < chosen.min() < 0.8 * chosen.max()


def test_the_hybrid_was_trained_and_every_mixer_is_used(prefix: bytes, xz_bits: float) -> None:
    """At least 10 % fewer bits per byte than `xz -9e`; a layer whose mixer returns nothing costs 1 % of the bits."""
    hybrid = AutoModelForCausalLM.from_pretrained(
        HYBRID, dtype=torch.float32, local_files_only=True
    ).eval()
    windows, paid = windows_of(HYBRID, prefix)
    with torch.inference_mode():
        whole = bits_of(hybrid(input_ids=windows).logits, windows)
        assert whole / paid <= 0.9 * xz_bits
        few = windows[:2]
        base = bits_of(hybrid(input_ids=few).logits, few)
        for layer in hybrid.model.layers:
            last = (layer.self_attn if layer.is_attention_layer else layer.conv).out_proj
            kept = last.weight.clone()
            last.weight.zero_()
            assert bits_of(hybrid(input_ids=few).logits, few) > 1.01 * base
            last.weight.copy_(kept)
