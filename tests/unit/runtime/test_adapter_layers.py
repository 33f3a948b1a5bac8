"""`eval --correction` measures a PEFT adapter on a quantized model or refuses it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantforge.runtime.load import load
from tests.conftest import Tiny
from tests.runs import fast_recipe, quantize, run_command

RANK = 16
FEW = ("--windows", 2, "--length", 32)


def save_adapter(directory: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    directory.mkdir()
    named = {f"base_model.model.{name}": value.contiguous() for name, value in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    modules = sorted({name.split(".lora_")[0] for name in tensors if ".lora_" in name})
    adapter_config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules}
    (directory / "adapter_config.json").write_text(json.dumps(adapter_config | config))
    return directory


def correction(model: Path, quantized: Path) -> dict[str, Tensor]:
    """Return the products of low rank that are nearest to the rounding errors of all linears."""
    stored = load_file(model / "model.safetensors")
    decoded = dict(load(quantized).model.named_modules())
    tensors = {}
    for name, weight in stored.items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            identity = torch.eye(weight.shape[1])
            error = weight.float() - decoded[module](identity).detach().T
            left, values, right = torch.linalg.svd(error, full_matrices=False)
            tensors[f"{module}.lora_A.weight"] = right[:RANK]
            tensors[f"{module}.lora_B.weight"] = left[:, :RANK] * values[:RANK]
    return tensors


@pytest.fixture
def base(tiny: Tiny, tmp_path: Path) -> tuple[Path, Path]:
    """A source and a quantized form of it."""
    model, out = tiny("llama-wide"), tmp_path / "q"
    quantize(model, out, fast_recipe(scheme="int3:g32:sym"))
    return model, out


def test_eval_includes_the_adapter(
    base: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, quantized = base
    adapter = save_adapter(tmp_path / "a", correction(model, quantized))
    measured = ("eval", model, quantized, *FEW, "--json")
    without = json.loads(run_command(capsys, *measured, "--no-speed").out)["models"][1]
    document = json.loads(run_command(capsys, *measured, "--correction", adapter).out)
    row = document["models"][1]
    assert document["protocol"]["correction"].startswith("a (SHA-256 ")
    assert row["kl_mean"] < 0.9 * without["kl_mean"]
    halves = load_file(adapter / "adapter_model.safetensors")
    size = sum(value.nbytes for value in halves.values())
    assert row["weight_bytes"] == without["weight_bytes"] + size
    assert row["scheme"] == f"{without['scheme']} + rank {RANK}"
    assert row["decode_tokens_per_second"] is None  # no engine was asked


def test_incompatible_adapters_are_refused(
    tiny: Tiny, base: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, quantized = base
    tensors = correction(model, quantized)
    place = save_adapter(tmp_path / "a", tensors)
    module = next(iter(tensors)).split(".lora_")[0]
    lengths = torch.ones(len(tensors[f"{module}.lora_B.weight"]))
    dora = {name: value for name, value in tensors.items() if name.startswith(f"{module}.")}
    dora[f"{module}.lora_magnitude_vector"] = lengths
    more = save_adapter(tmp_path / "dora", dora, use_dora=True)
    damaged = tensors | {f"{module}.lora_A.weight": tensors[f"{module}.lora_A.weight"] * torch.nan}
    damaged_place = save_adapter(tmp_path / "damaged", damaged)
    other = tmp_path / "l"
    quantize(tiny("llama"), other, fast_recipe(scheme="int3:g32:sym"))
    for words, adapter, code, message in (
        ((model, quantized, quantized), place, 2, "of one model, and for no card"),
        ((model,), place, 2, "of one model"),
        ((model, quantized, "--card", quantized), place, 2, "for no card"),
        ((model, quantized), more, 2, "it changes more than products of linears"),
        ((model, quantized), damaged_place, 3, "holds nan"),
        ((tiny("llama"), other), place, 3, "the adapter changes model.layers.0"),
    ):
        refused = run_command(capsys, "eval", *words, *FEW, "--no-speed", "--correction", adapter)
        assert (refused.code, message in refused.err) == (code, True), refused.err
