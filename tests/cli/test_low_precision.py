"""Quantized inputs from the command line: planned, measured, written, verified, evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quantforge.files.reader import open_checkpoint
from tests.conftest import Tiny
from tests.runs import CALIBRATION_ARGUMENTS, run_command
from tests.thorough import thorough_case

EVAL = ("--windows", "2", "--length", "32", "--no-speed")


@pytest.fixture
def model(tiny: Tiny) -> Path:
    return tiny("llama-wide")


def test_every_observer_of_static_inputs_goes_all_the_way(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--scheme", "W8A8_STATIC", "--scales", "absmax", *CALIBRATION_ARGUMENTS)
    planned = run_command(capsys, "plan", model, *options, "--activation-range", "mse", "--json")
    document = json.loads(planned.out)
    schemes = {tensor["scheme"] for tensor in document["tensors"] if tensor["scheme"]}
    assert schemes == {"int8:row:sym:bf16+int8:tensor:static"}
    scales, outputs = {}, []
    for observer in ("absmax", "percentile", "mse"):
        out = tmp_path / observer
        done = run_command(
            capsys, "quantize", model, *options, "--activation-range", observer, "-o", out, "--json"
        )
        assert done.code == 0, done.err
        assert json.loads(done.out)["output_bytes"] == document["output_bytes"]
        checkpoint = open_checkpoint(out)
        names = [name for name in checkpoint.entries if name.endswith(".input_scale")]
        scales[observer] = torch.cat([checkpoint.read(name) for name in names])
        assert run_command(capsys, "verify", out, "--source", model).code == 0
        outputs.append(out)
    assert bool((scales["percentile"] < scales["absmax"]).all())
    assert bool((scales["mse"] <= scales["absmax"]).all())
    assert bool((scales["mse"] < scales["absmax"]).any())
    result = run_command(capsys, "eval", model, *outputs, *EVAL, "--json")
    rows = json.loads(result.out)["models"]
    assert [row["scheme"] for row in rows[1:]] == ["int8:row:sym:bf16+int8:tensor:static"] * 3
    assert all(0 < row["kl_mean"] < 1 for row in rows[1:])
    assert len({row["kl_mean"] for row in rows[1:]}) == 3


def test_an_observer_that_does_not_exist_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command(
        capsys, "plan", model, "--scheme", "W8A8_STATIC", "--activation-range", "percentil"
    )
    assert result.code == 2
    assert "percentile" in result.err


def test_outlier_columns_are_kept_reported_and_computed_with(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, bare = tmp_path / "kept", tmp_path / "bare"
    scheme = "int8:row:sym+int8:token:dynamic:6"
    options = ("--format", "bnb", "--scales", "absmax", *CALIBRATION_ARGUMENTS)
    refused = run_command(
        capsys, "plan", model, "--scheme", "LLM_INT8", *options, "--calibration", "none"
    )
    assert refused.code == 4
    assert "outlier columns" in refused.err
    planned = json.loads(
        run_command(capsys, "plan", model, "--scheme", "LLM_INT8", *options, "--json").out
    )
    for path, text in ((out, "LLM_INT8"), (bare, scheme)):
        done = run_command(
            capsys, "quantize", model, "--scheme", text, *options, "-o", path, "--json"
        )
        assert done.code == 0, done.err
    checkpoint = open_checkpoint(out)
    kept = [name for name in checkpoint.entries if name.endswith(".outlier_columns")]
    assert kept
    assert not any("outlier" in name for name in open_checkpoint(bare).entries)
    assert sum(path.stat().st_size for path in out.glob("*.safetensors")) == planned["output_bytes"]
    tensors = json.loads((out / "quantforge.manifest.json").read_text())["tensors"]
    counted = [found.get("unquantized_columns", 0) for found in tensors]
    columns = torch.stack([checkpoint.read(name) for name in kept])
    assert sum(counted) == int((columns >= 0).sum()) > 0
    assert run_command(capsys, "verify", out, "--source", model).code == 0
    result = run_command(capsys, "eval", model, out, bare, *EVAL, "--json")
    _, ours, theirs = json.loads(result.out)["models"]
    assert ours["scheme"] == f"{scheme.replace('sym', 'sym:f32')}:32"
    assert ours["bits_per_weight"] == pytest.approx(planned["bits_per_weight"])
    assert 0 < ours["kl_mean"] < theirs["kl_mean"]


@pytest.mark.parametrize(("kind", "shape"), [("fp8", (1,)), thorough_case("fp8_head", (2, 1, 1))])
def test_scales_of_the_cache_are_measured_written_and_used(
    kind: str,
    shape: tuple[int, ...],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, bare, moved = tmp_path / kind, tmp_path / "bare", tmp_path / "moved"
    options = ("--bits", "8", "--method", "smooth", *CALIBRATION_ARGUMENTS)
    planned = json.loads(
        run_command(capsys, "plan", model, *options, "--kv-cache", kind, "--json").out
    )
    measured = [item for item in planned["tensors"] if item["action"] == "measure"]
    blocks = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    assert len(measured) == 2 * blocks
    for path, extra in ((out, ("--kv-cache", kind)), (bare, ())):
        done = run_command(capsys, "quantize", model, *options, *extra, "-o", path)
        assert done.code == 0, done.err
    checkpoint = open_checkpoint(out)
    for item in measured:
        scale = checkpoint.read(item["name"])
        assert tuple(scale.shape) == shape
        assert torch.equal(scale, scale.half().float())
    stated = checkpoint.config["quantization_config"]["kv_cache_scheme"]
    assert stated["strategy"] == {"fp8": "tensor", "fp8_head": "attn_head"}[kind]
    assert run_command(capsys, "verify", out, "--source", model).code == 0
    result = run_command(capsys, "eval", model, out, bare, *EVAL, "--json")
    source, rounded, plain = json.loads(result.out)["models"]
    assert (source["kv_cache"], rounded["kv_cache"], plain["kv_cache"]) == ("none", kind, "none")
    assert plain["kl_mean"] < rounded["kl_mean"] < plain["kl_mean"] + 0.05
    done = run_command(capsys, "export", out, "--format", "gptq", "--allow-inexact", "-o", moved)
    assert done.code == 0, done.err
    assert "kv-scales-dropped" in done.err
    assert not any("k_scale" in name for name in open_checkpoint(moved).entries)
    refused = run_command(
        capsys,
        "export",
        out,
        "--format",
        "gguf",
        "--allow-inexact",
        "--strict",
        "-o",
        tmp_path / "x.gguf",
    )
    assert refused.code == 4
    assert "kv-scales-dropped" in refused.err


def test_a_cache_cannot_be_measured_without_text_or_stored_anywhere(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("plan", model, "--kv-cache", "fp8")
    for extra, words in (
        (("--scales", "absmax", "--calibration", "none"), "has to be measured"),
        (("--format", "gptq"), "no place"),
    ):
        result = run_command(capsys, *asked, *extra)
        assert result.code == 4
        assert words.replace("has", "have") in result.err
