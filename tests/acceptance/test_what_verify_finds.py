"""`verify` passes sound results, and exits with 5 and the location of each defect."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.acceptance.support import RTN, CommandResult, Copy, Make, Model, command, config, tensors
from tests.thorough import mark_others_thorough, thorough_case

MANIFEST = "quantforge.manifest.json"
SCALE = "model.layers.1.mlp.up_proj.weight_scale"
PACKED = "model.layers.0.self_attn.q_proj.weight_packed"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def result(make: Make, copied: Copy) -> Path:
    return copied(make("quantize", "llama", RTN).path)


def run_verify(result: Path, *words: object) -> CommandResult:
    return command("verify", result, words, "--json")


def rewrite(result: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change tensors of a result, and remove its manifest, which would reveal any change."""
    stored = tensors(result)
    change(stored)
    save_file(stored, result / "model.safetensors", {"format": "pt"})
    (result / MANIFEST).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("format_key", "scheme"),
    [
        ("compressed-tensors", "int4:g32:asym"), ("gptq", "int4:g128:sym"), ("gguf", "q4_0"),
        thorough_case("awq", "int4:g128:asym"), thorough_case("bnb", "nf4:g64:sym"),
        thorough_case("fp8", "fp8:128x128"),
        thorough_case("mlx", "int4:g64:min"),
    ],
)  # fmt: skip
def test_sound_results_of_every_format_pass_strict(
    format_key: str, scheme: str, model: Model, make: Make
) -> None:
    words = ("--method rtn --calibration none --format", format_key, "--scheme", scheme)
    path = make("quantize", "llama", words).path
    for beside in ((), ("--source", model("llama"))):
        ended = run_verify(path, beside, "--strict")
        assert (ended.code, ended.document["ok"]) == (0, True), ended.out


def test_a_damaged_file_is_found_by_its_digest(result: Path) -> None:
    weights = result / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    ended = run_verify(result, "--no-forward")
    assert (ended.code, ended.document["ok"]) == (5, False)
    assert any("model.safetensors" in finding["where"] for finding in ended.document["findings"])


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_missing_or_emptied_file_fails_verification(name: str, result: Path) -> None:
    (result / name).unlink()
    assert run_verify(result, "--no-forward").code in {3, 5}
    (result / name).write_text("{}")
    assert run_verify(result, "--no-forward").code in {3, 5}


def test_an_added_file_is_found(result: Path) -> None:
    (result / "modeling_own.py").write_text("print(1)")
    ended = run_verify(result, "--no-forward")
    assert ended.code == 5
    assert any("modeling_own.py" in finding["where"] for finding in ended.document["findings"])


DEFECTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "a scale that is no number": (lambda stored: stored[SCALE].fill_(float("nan")), SCALE),
    "a negative scale": (lambda stored: stored[SCALE].neg_(), "up_proj"),
    "scales of half their size": (lambda stored: stored[SCALE].mul_(0.5), "up_proj"),
    "codes of another tensor": (
        lambda stored: stored.update({PACKED: stored[PACKED.replace(".0.", ".1.")].clone()}), "q_proj"
    ),
    "rows in another order": (lambda stored: stored.update({PACKED: stored[PACKED].flip(0).contiguous()}), "q_proj"),
    "a tensor that is missing": (lambda stored: stored.pop(SCALE), "up_proj"),
}  # fmt: skip


@pytest.mark.parametrize(
    "defect", mark_others_thorough(DEFECTS, "a scale that is no number", "codes of another tensor")
)
def test_a_planted_defect_is_an_error_with_its_location(
    defect: str, model: Model, result: Path
) -> None:
    change, where = DEFECTS[defect]
    rewrite(result, change)
    ended = run_verify(result, "--source", model("llama"))
    assert (ended.code, ended.document["ok"]) == (5, False)
    errors = [finding for finding in ended.document["findings"] if finding["severity"] == "error"]
    assert any(where in finding["where"] for finding in errors), errors


def test_a_sound_result_needs_no_manifest(model: Model, result: Path) -> None:
    rewrite(result, lambda stored: None)
    ended = run_verify(result, "--source", model("llama"), "--strict")
    assert (ended.code, ended.document["ok"]) == (0, True), ended.out


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 5.0),
        thorough_case("rms_norm_eps", 0.1),
        thorough_case("num_attention_heads", 2),
    ],
)
def test_a_configuration_that_differs_from_the_source_fails(
    key: str, value: object, model: Model, result: Path
) -> None:
    (result / MANIFEST).unlink()
    settings = config(result)
    settings[key] = value
    if key == "rope_theta":
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": value}
    (result / "config.json").write_text(json.dumps(settings))
    ended = run_verify(result, "--source", model("llama"))
    assert (ended.code, ended.document["ok"]) == (5, False)


def test_a_tokenizer_that_differs_from_the_source_fails(model: Model, result: Path) -> None:
    (result / MANIFEST).unlink()
    file = result / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    ended = run_verify(result, "--source", model("llama"))
    assert ended.code == 5
    assert any("tokenizer" in finding["where"] for finding in ended.document["findings"])


def test_a_contradicting_quantize_config_fails(result: Path) -> None:
    (result / MANIFEST).unlink()
    settings = {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True, "desc_act": False}
    (result / "quantize_config.json").write_text(json.dumps(settings))
    ended = run_verify(result)
    assert ended.code == 5
    assert any("quantize_config.json" in str(finding) for finding in ended.document["findings"])


def test_model_code_is_an_error_with_a_source_else_a_warning(model: Model, result: Path) -> None:
    (result / MANIFEST).unlink()
    (result / "modeling_llama.py").write_text("import os")
    assert run_verify(result, "--source", model("llama")).code == 5
    alone = run_verify(result)
    assert alone.code == 0
    assert run_verify(result, "--strict").code == 5
    assert {finding["severity"] for finding in alone.document["findings"]} == {"warning"}


def test_a_different_source_fails_verification(model: Model, result: Path, copied: Copy) -> None:
    other = copied(model("llama"))
    stored = tensors(other)
    stored[NORM] = stored[NORM] * 2
    save_file(stored, other / "model.safetensors", {"format": "pt"})
    assert run_verify(result, "--source", other).code == 5


def test_a_gguf_key_that_differs_from_the_source_fails(
    model: Model, make: Make, copied: Copy
) -> None:
    path = copied(make("quantize", "llama", "--method rtn --type Q8_0 --calibration none").path)
    Path(f"{path}.quantforge.json").unlink()
    assert run_verify(path, "--source", model("llama")).code == 0
    data = path.read_bytes()
    at = data.index(b"llama.context_length") + len("llama.context_length") + 4
    path.write_bytes(data[:at] + (64).to_bytes(4, "little") + data[at + 4 :])
    ended = run_verify(path, "--source", model("llama"))
    assert ended.code == 5
    assert any("context_length" in str(finding) for finding in ended.document["findings"])


def test_an_engine_that_cannot_load_the_result_fails(
    model: Model, make: Make, result: Path
) -> None:
    assert run_verify(result, "--no-forward --for vllm").code == 0
    assert run_verify(result, "--no-forward --for llama.cpp").code == 5
    assert run_verify(result, "--no-forward --for nothing").code == 2


def test_an_unknown_quantization_method_is_not_verified(result: Path) -> None:
    (result / MANIFEST).unlink()
    settings = config(result)
    settings["quantization_config"] = {"quant_method": "unheard-of", "bits": 4}
    (result / "config.json").write_text(json.dumps(settings))
    assert run_verify(result).code == 4


def test_text_output_ends_with_a_verdict(model: Model, result: Path) -> None:
    sound = command("verify", result, "--source", model("llama"))
    assert sound.code == 0
    assert sound.out.splitlines()[-1].startswith("verified")
    shutil.rmtree(result)
    refused = command("verify", result)
    assert refused.code == 3
    assert result.name in refused.err


def test_a_warning_fails_only_with_strict_option(model: Model, result: Path) -> None:
    """Gains of a norm that do not match the weights that read it: a warning, exit 5 with `--strict`."""
    rewrite(result, lambda stored: stored[NORM][::2].mul_(3))
    ended = run_verify(result, "--source", model("llama"))
    assert (ended.code, ended.document["ok"]) == (0, True)
    warned = [
        finding["where"]
        for finding in ended.document["findings"]
        if finding["severity"] == "warning"
    ]
    assert any("layers.0.input_layernorm" in where or "layers.0" in where for where in warned)
    assert run_verify(result, "--source", model("llama"), "--strict").code == 5
