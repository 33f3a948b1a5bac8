"""Artifacts of unsupported kinds are shown and partly checked, but not verified.

GGUF files of families that are written and not read back, and directories of formats that nothing here reads.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.artifacts import manifest
from tests import gguf_models
from tests.gguf_exports import export
from tests.runs import copy_model, run_command


@pytest.fixture(scope="module", params=["qwen2_moe", "olmoe"])
def original_gguf(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return export(gguf_models.make(request.param, directory / "m"), directory / "m.gguf", "Q8_0")


@pytest.fixture
def file(original_gguf, tmp_path):
    """A copy that may be damaged."""
    for path in original_gguf.parent.glob("m.gguf*"):
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path / original_gguf.name


def test_an_unsupported_gguf_file_is_reported_as_not_verified(file, capsys):
    ended = run_command(capsys, "verify", file)
    assert ended.code == 4
    assert "failed" not in ended.out
    assert "not verified: architecture" in ended.out
    assert "manifest" not in ended.err.partition("not checked (architecture")[2].splitlines()[0]
    document = json.loads(run_command(capsys, "verify", file, "--json").out)
    assert (document["ok"], document["findings"]) == (False, [])
    assert "is not read" in document["unsupported"]
    assert "manifest" in document["checked"]
    assert {"unreadable", "quantization-error", "logits"} <= document["skipped"].keys()


@pytest.mark.parametrize("manifest", [True, False])
def test_a_damaged_unsupported_gguf_file_fails(file, manifest, capsys):
    data = bytearray(file.read_bytes())
    if manifest:
        data[-100] ^= 1
        file.write_bytes(data)
    else:
        Path(f"{file}.quantforge.json").unlink()
        assert run_command(capsys, "verify", file).code == 4
        file.write_bytes(data[:-64])
    ended = run_command(capsys, "verify", file)
    assert ended.code == 5
    assert ": failed" in ended.out


def test_inspect_shows_headers_of_an_unsupported_gguf_file(file, capsys):
    document = json.loads(run_command(capsys, "inspect", file, "--json").out)
    assert document["format"] == "gguf (not read)"
    assert document["schemes"]["q8_0"]
    assert document["model_type"] in {"qwen2moe", "olmoe"}
    assert 0 < document["tensor_bytes"] < document["file_bytes"] == file.stat().st_size
    assert document["provenance"]["method"] == "rtn"
    assert 8 < document["bits_per_quantized_weight"] < 9
    stack = next(
        tensor for tensor in document["tensors"] if tensor["name"] == "blk.0.ffn_up_exps.weight"
    )
    assert stack["shape"][0] == 4
    assert (
        "blk.0.ffn_up_exps.weight" in run_command(capsys, "inspect", file, "--tensors", "all").out
    )


@pytest.fixture
def foreign(model, tmp_path):
    """Return a function that makes a model with an unknown quantization method."""

    def make_foreign(method):
        directory = copy_model(model, tmp_path / "foreign")
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method, "bits": 4}
        (directory / "config.json").write_text(json.dumps(config))
        tensors = load_file(directory / "model.safetensors")
        name = next(name for name in tensors if name.endswith("q_proj.weight"))
        tensors[f"{name.removesuffix('weight')}codes"] = tensors.pop(name).view(torch.int16)
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory

    return make_foreign


@pytest.mark.parametrize("method", ["exl3", "aqlm", "mxfp4"])
def test_an_unknown_quantization_format_is_not_verified(foreign, method, capsys):
    directory = foreign(method)
    ended = run_command(capsys, "verify", directory)
    assert ended.code == 4
    assert f"not verified: config.json: no reader for quant_method '{method}'" in ended.out
    assert "its headers are sound" in ended.err
    document = json.loads(run_command(capsys, "verify", directory, "--json").out)
    assert (document["ok"], document["findings"]) == (False, [])
    assert {"unreadable", "quantization-error", "logits"} <= document["skipped"].keys()


def test_an_unknown_format_is_checked_by_manifest_and_headers(foreign, capsys):
    directory = foreign("exl3")
    outputs = {
        file.name: {"bytes": file.stat().st_size, "sha256": manifest.sha256(file, directory)}
        for file in directory.iterdir()
    }
    document = {"schema": manifest.SCHEMA, "outputs": outputs}
    (directory / manifest.NAME).write_text(json.dumps(document))
    assert run_command(capsys, "verify", directory).code == 4
    weights = next(directory.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    ended = run_command(capsys, "verify", directory)
    assert (ended.code, "its SHA-256 is not that of the manifest" in ended.out) == (5, True)
    (directory / manifest.NAME).unlink()
    assert run_command(capsys, "verify", directory).code == 4
    weights.write_bytes(data[:-64])
    assert run_command(capsys, "verify", directory).code == 5


@pytest.mark.parametrize("method", [None, 4, ""])
def test_a_quantization_config_without_a_method_fails(foreign, method, capsys):
    assert run_command(capsys, "verify", foreign(method)).code == 5
