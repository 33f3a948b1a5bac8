"""Defects in headers or configuration are errors; what only some loaders read wrongly is a warning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.artifacts.manifest import NAME
from quantforge.verification.findings import Report, Severity
from quantforge.verification.verify import verify
from tests.runs import quantize, recipe, run_command

K = "model.layers.0.self_attn.k_proj"
ERROR, WARNING = Severity.ERROR, Severity.WARNING


def quick_verify(path: Path, engine: str | None = None) -> Report:
    return verify(path, engine=engine, forward=False)


def findings_of(report: Report) -> list[tuple[str, str, Severity]]:
    return [(item.check, item.where, item.severity) for item in report.findings]


def edit_quantization(directory: Path, **values: Any) -> Path:
    """Change keys of the quantization that a configuration declares."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= values
    file.write_text(json.dumps(config))
    return directory


def quantized(source: Path, out: Path, **values: Any) -> Path:
    quantize(source, out, recipe(**{"scheme": "int4:g32:sym", **values}))
    (out / NAME).unlink()
    return out


def ignore_list(directory: Path) -> list[str]:
    config = json.loads((directory / "config.json").read_text())
    return list(config["quantization_config"]["ignore"])


def test_mixed_qkv_schemes_are_an_error_only_for_fusing_engines(tiny, tmp_path):
    plain = quantized(tiny("llama-wide"), tmp_path / "q")
    tensors = load_file(plain / "model.safetensors")
    source = load_file(tiny("llama-wide") / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if not name.startswith(f"{K}.")}
    tensors[f"{K}.weight"] = source[f"{K}.weight"]
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    edit_quantization(plain, ignore=[*ignore_list(plain), K])
    for engine, severity in ((None, WARNING), ("transformers", WARNING), ("vllm", ERROR)):
        (item,) = (
            finding
            for finding in quick_verify(plain, engine).findings
            if finding.check == "fused-layers"
        )
        assert item.severity is severity
        assert "k_proj not quantized" in item.detail


def test_different_qkv_global_scales_fail_only_for_fusing_engines(tiny, tmp_path):
    out = quantized(tiny("llama-wide"), tmp_path / "q", scheme="nvfp4")
    assert quick_verify(out, "vllm").findings == []
    tensors = load_file(out / "model.safetensors")
    tensors[f"{K}.weight_global_scale"] *= 2
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for engine, severity in ((None, WARNING), ("transformers", WARNING), ("vllm", ERROR)):
        (item,) = (
            finding
            for finding in quick_verify(out, engine).findings
            if finding.check == "fused-layers"
        )
        assert item.severity is severity
        assert "need one weight_global_scale: k_proj" in item.detail


def test_ignoring_a_packed_layer_is_an_error(tiny, tmp_path):
    out = quantized(tiny("llama-wide"), tmp_path / "q")
    assert findings_of(quick_verify(edit_quantization(out, ignore=[*ignore_list(out), K]))) == [
        ("ignore-list", K, ERROR)
    ]


def test_an_ignore_list_read_differently_is_a_warning(tiny, tmp_path):
    """GPTQModel obeys ``dynamic``, optimum only ``modules_in_block_to_quantize``."""
    out = quantized(tiny("llama-wide"), tmp_path / "q", format="gptq", ignore=("*down_proj",))
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    edit_quantization(out, modules_in_block_to_quantize=[names])
    down = "model.layers.0.mlp.down_proj"
    assert ("ignore-list", down, WARNING) in findings_of(quick_verify(out))


def test_a_tied_head_that_is_not_excluded_is_a_warning(tiny, tmp_path):
    out = quantized(tiny("llama-tied"), tmp_path / "q")
    assert "lm_head" in ignore_list(out)
    report = verify(edit_quantization(out, ignore=[]), tiny("llama-tied"))
    assert findings_of(report) == [("ignore-list", "lm_head", WARNING)]
    assert "logits" not in report.skipped  # a warning does not keep the model from being run
    assert report.skipped["gguf-keys"] == "only a GGUF file has them"


@pytest.mark.parametrize("scales", [True, False])
def test_a_model_with_only_a_quantized_cache_passes(scales, tiny, tmp_path):
    """llm-compressor writes such models: 16-bit weights, no groups, and scales of keys and values."""
    out = quantized(tiny("llama-wide"), tmp_path / "q", scheme="FP8_DYNAMIC", kv_cache="fp8")
    model = shutil.copytree(tiny("llama-wide"), tmp_path / "cache")
    shutil.copy(out / "config.json", model / "config.json")
    edit_quantization(model, config_groups={}, ignore=[])
    stored = {
        name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()
    }
    cache = {name: value for name, value in stored.items() if name.endswith(("k_scale", "v_scale"))}
    assert cache
    tensors = load_file(model / "model.safetensors")
    if scales:
        tensors |= {name: value.to(torch.float32) for name, value in cache.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    checks = {item.check for item in quick_verify(model).findings}
    assert checks == (set() if scales else {"nothing-quantized"})


def test_the_threads_option_reaches_torch(tiny, capsys, monkeypatch):
    numbers = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    assert run_command(capsys, "verify", tiny("llama"), "--threads", "1", "--no-forward").code == 0
    assert numbers[0] == 1


def remove_tensors(directory: Path, *names: str) -> Path:
    """Remove tensors from a model."""
    file = directory / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if name not in names}
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def names_of(directory: Path) -> list[str]:
    return sorted(load_file(directory / "model.safetensors"))


@pytest.mark.parametrize("source", [True, False])
def test_a_missing_vision_tensor_is_an_error(source, tiny, tmp_path):
    model = tiny("gemma3-multimodal")
    out = quantized(model, tmp_path / "q")
    lost = next(n for n in names_of(out) if "vision_tower" in n and n.endswith("q_proj.weight"))
    original = model if source else None
    assert verify(out, original, forward=False).findings == []
    (item,) = verify(remove_tensors(out, lost), original, forward=False).findings
    assert (item.check, item.severity) == ("incomplete", ERROR)
    assert item.where.removeprefix("model.") == lost.removeprefix("model.")
    projector = [name for name in names_of(out) if "multi_modal" in name]
    findings = verify(remove_tensors(out, *projector), original, forward=False).findings
    assert {item.severity for item in findings} == {ERROR, WARNING}
    if source:  # without its whole tower and projector, it is a model of text
        tower = [name for name in names_of(out) if "vision" in name]
        assert verify(remove_tensors(out, *tower), original, forward=False).findings == []
