"""Exports are judged in the groups of the original rounding, and less strictly if they were rounded twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.api.export import export
from quantforge.recipe import Rule
from quantforge.verification.findings import Report, Severity
from quantforge.verification.verify import verify
from tests.runs import copy_model, quantize, recipe

OTHER = "model.layers.0.mlp.up_proj.weight"


def quick_verify(path: Path, source: Path) -> Report:
    return verify(path, source, forward=False)


def export_result(source: Path, directory: Path, scheme: str, format_key: str) -> Path:
    """Quantize a source, export the result, and return the path of the export."""
    out = directory / "q"
    quantize(source, out, recipe(scheme=scheme, scales="absmax"))
    file = directory / ("e.gguf" if format_key == "gguf" else "e")
    export(out, out=file, format=format_key)
    return file


@pytest.mark.parametrize(
    ("scheme", "format_key"),
    [("int4:channel:sym", "gguf"), ("int8:tensor:sym", "gguf"), ("int4:channel:sym", "awq")],
)
def test_repeated_scales_are_judged_by_the_original_group(tiny, tmp_path, scheme, format_key):
    source = tiny("llama-wide")
    report = quick_verify(export_result(source, tmp_path, scheme, format_key), source)
    assert report.findings == []
    assert max(row["error_vs_rtn"] for row in report.tensors) < 2


def test_split_groups_are_judged_by_the_original_group(tiny, tmp_path):
    """An outlier ruins half a group, but no more than the original rounding did."""
    source = copy_model(tiny("llama-wide"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors[OTHER][3, 10] *= 100
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    rules = (Rule("down_proj", "int4:g64:sym"),)
    result, out = tmp_path / "q", tmp_path / "e"
    quantize(source, result, recipe(scheme="int4:g128:sym", rules=rules, scales="absmax"))
    export(result, out=out, format="gptq")
    assert quick_verify(result, source).findings == quick_verify(out, source).findings == []


def test_too_much_export_error_is_a_warning(tiny, tmp_path):
    source, other = tiny("llama-wide"), tmp_path / "other"
    file = export_result(source, tmp_path, "int4:g32:sym", "gguf")
    Path(f"{file}.quantforge.json").unlink()
    shutil.copytree(source, other)
    tensors = load_file(other / "model.safetensors")
    value = tensors[OTHER].float()
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    tensors[OTHER] = (value + 0.4 * value.std() * noise).to(tensors[OTHER].dtype)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    report = quick_verify(file, other)
    assert {(item.check, item.severity) for item in report.findings} == {
        ("quantization-error", Severity.WARNING)
    }
    assert not report.failed()
    assert report.failed(strict=True)


def test_decoded_weights_are_one_warning_but_changed_matrices_each_one(tiny, tmp_path):
    source = tiny("llama-wide")
    (report, other) = (
        quick_verify(export_result(source, tmp_path, "int6:g32:sym", "plain"), source),
        tmp_path / "other",
    )
    assert [(item.check, item.severity) for item in report.findings] == [
        ("unquantized-changed", Severity.WARNING)
    ]
    assert "quantized and decoded" in report.findings[0].detail
    shutil.copytree(source, other)
    tensors, decoded = (
        load_file(other / "model.safetensors"),
        load_file(tmp_path / "e" / "model.safetensors"),
    )
    changed = sorted(name for name in tensors if "layers.0.mlp" in name)[:2]
    tensors |= {name: decoded[name] for name in changed}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert sorted(item.where for item in quick_verify(other, source).findings) == changed
