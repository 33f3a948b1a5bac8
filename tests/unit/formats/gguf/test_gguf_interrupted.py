"""GGUF exports with existing files, interruptions and full disks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantforge import api
from quantforge.artifacts import manifest
from quantforge.errors import QuantForgeError, RefusedError, UsageError
from quantforge.recipe import CalibrationOptions, GptqOptions, Recipe
from quantforge.settings import Settings
from tests.gguf_exports import export
from tests.runs import StopError, crash_after, leftovers
from tests.thorough import thorough_case


def test_foreign_files_are_never_overwritten(models, tmp_path):
    model, out = models("llama-tied"), tmp_path / "x.gguf"
    out.write_bytes(b"precious")
    with pytest.raises(RefusedError, match="exists"):
        export(model, out)
    with pytest.raises(RefusedError, match="not a result of quantforge"):
        export(model, out, overwrite=True)
    assert out.read_bytes() == b"precious"
    out.unlink()
    out.mkdir()
    with pytest.raises(RefusedError, match="is no file"):
        export(model, out, overwrite=True)
    out.rmdir()
    out.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="is no file"):
        export(model, out)
    with pytest.raises(UsageError, match="overlaps"):
        export(model, model / "x.gguf")


def test_an_interrupted_gguf_export_leaves_no_file_and_resumes(models, tmp_path):
    model, out = models("llama-tied"), tmp_path / "x.gguf"
    reference = export(model, tmp_path / "y.gguf")
    with pytest.raises(StopError):
        export(model, out, progress=crash_after("block 0"))
    assert not out.exists()
    export(model, out)
    assert out.read_bytes() == reference.read_bytes()
    assert leftovers(out) == {"x.gguf", "x.gguf.quantforge.json", "y.gguf", "y.gguf.quantforge.json"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "method"), [thorough_case("llama", "awq+gptq"), ("gpt2", "gptq"), ("gemma2", "gptq")]
)
def test_a_calibrated_gguf_run_resumes_with_the_same_bytes(name, method, models, tmp_path):
    text = CalibrationOptions(samples=4, length=24)
    values = {"method": method, "calibration": text, "type": "Q4_0", "gptq": GptqOptions(refine=0)}

    def run(out: Path, **settings: object) -> Path:
        api.quantize(str(models(name)), Recipe(format="gguf", **values), out, Settings(**settings))
        return out

    uninterrupted = run(tmp_path / "a.gguf")
    with pytest.raises(StopError):
        run(tmp_path / "b.gguf", progress=crash_after("block 0"))
    assert run(tmp_path / "b.gguf").read_bytes() == uninterrupted.read_bytes()


def test_a_full_disk_keeps_the_earlier_gguf_file(models, tmp_path, monkeypatch):
    model, out = models("llama-tied"), tmp_path / "x.gguf"
    export(model, out)
    before = out.read_bytes()
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, 1, 1, 1, 1, 1, 1, 1, 1)))
    with pytest.raises(QuantForgeError, match="does not fit"):
        export(model, out, "F16", overwrite=True)
    assert out.read_bytes() == before
    assert manifest.read_manifest(out) is not None
