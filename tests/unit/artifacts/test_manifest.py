"""The manifest lists every output and source file with its digest, without paths or times."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.api.inspect import inspect
from quantforge.artifacts import manifest
from quantforge.events import Event
from quantforge.files.hub import source_name
from quantforge.notation import parse
from quantforge.plans import Action, Plan, StoredTensor, TensorPlan
from tests.conftest import Tiny
from tests.runs import copy_model, quantize, recipe


@pytest.fixture(scope="module")
def released(tiny: Tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("released") / "out"
    quantize(tiny("llama-wide"), out, recipe("gptq", rules=()))
    return out, tiny("llama-wide")


def digest(path):
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def test_outputs_and_sources_are_listed_with_their_digests(released):
    out, source = released
    document = manifest.read_manifest(out)
    files = {path.name for path in out.iterdir()} - {manifest.NAME}
    assert document["outputs"] == {name: digest(out / name) for name in sorted(files)}
    assert document["source"]["files"].keys() >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    for name, entry in document["source"]["files"].items():
        assert entry == digest(source / name)


def test_a_manifest_records_tensors_method_recipe_and_versions(released):
    document = manifest.read_manifest(released[0])
    actions = [tensor["action"] for tensor in document["tensors"]]
    assert actions.count("quantize") == document["quantized_tensors"] == 14
    assert all("error" in t for t in document["tensors"] if t["action"] == "quantize")
    assert document["calibration"]["rows"] == 6
    assert document["event_counts"] == {"few-calibration-tokens": 1}
    assert document["method"] == "gptq"
    assert 'method = "gptq"' in document["recipe"]
    assert {"quantforge", "torch", "python"} <= document["versions"].keys()


def test_a_manifest_is_stable_json(released):
    out, _ = released
    text = (out / manifest.NAME).read_text()
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"


PLAN = Plan(
    model="m", model_type="llama", method="rtn", transforms=(), rounder="rtn", format="native",
    tensors=(
        TensorPlan("a", "BF16", (1, 3), Action.QUANTIZE, "scheme", parse("int4:g128:sym:f16"),
                   (StoredTensor("a.packed", "U8", (1,)),)),
        TensorPlan("b", "BF16", (1, 3), Action.KEEP, "ignore", None, (StoredTensor("b", "BF16", (1, 3)),)),
    ),
    shards=(("a.packed", "b"),), output_bytes=100, peak_memory_bytes=100, not_copied=("notes.txt",),
)  # fmt: skip


def test_a_manifest_rounds_figures_and_counts_events():
    events = [
        Event("inexact", "b", "x"),
        Event("dead-channels", "a", "y"),
        Event("inexact", "a", "z"),
    ]
    document = manifest.build_manifest(
        PLAN, "recipe", {"model": "m"}, None, events, {"a": {"error": 1 / 7}}
    )
    versions = document.pop("versions")
    assert set(versions) == {"quantforge", "python", "machine", *manifest.VERSIONED_PACKAGES}
    assert document == {
        "schema": "quantforge.manifest/2", "method": "rtn", "format": "native", "model_type": "llama",
        "recipe": "recipe", "source": {"model": "m"}, "calibration": None, "not_copied": ["notes.txt"],
        "bits_per_weight": 2.666667,
        "tensors": [
            {"name": "a", "action": "quantize", "rule": "scheme", "scheme": "int4:g128:sym:f16", "error": 0.142857},
            {"name": "b", "action": "keep", "rule": "ignore"},
        ],
        "quantized_tensors": 1,
        "events": [
            {"kind": "inexact", "where": "b", "detail": "x"}, {"kind": "dead-channels", "where": "a", "detail": "y"},
            {"kind": "inexact", "where": "a", "detail": "z"},
        ],
        "event_counts": {"dead-channels": 1, "inexact": 2},
    }  # fmt: skip
    assert list(document["event_counts"]) == ["dead-channels", "inexact"]


def test_a_manifest_lists_all_files_except_itself_and_signatures(tmp_path):
    (tmp_path / "templates").mkdir()
    for name in ("templates/é.jinja", "model.safetensors", manifest.NAME, "model.sig"):
        (tmp_path / name).write_bytes(b"x")
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    entry = f'{{\n   "bytes": 1,\n   "sha256": "{digest}"\n  }}'
    assert manifest.finish_manifest({"model": "ü"}, tmp_path).decode() == (
        '{\n "model": "ü",\n "outputs": {\n'
        f'  "model.safetensors": {entry},\n'
        f'  "templates/é.jinja": {entry}\n'
        " }\n}\n"
    )


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"schema": "other/1"}'])
def test_an_invalid_manifest_is_read_as_none(tmp_path, content):
    (tmp_path / manifest.NAME).write_bytes(content)
    assert manifest.read_manifest(tmp_path) is None
    assert manifest.read_manifest(tmp_path / "absent") is None


def test_source_names_come_from_paths_and_hub_snapshots(tmp_path):
    assert source_name(tmp_path / "a" / ".." / "model") == ("model", "")
    snapshot = tmp_path / "models--org--a--b" / "snapshots" / "0123"
    assert source_name(snapshot) == ("org/a--b", "0123")


def test_a_model_in_an_unsupported_format_can_be_inspected(tiny, tmp_path):
    source = copy_model(tiny("llama-wide"), tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "quanto", "weights": "int8"}
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    module = "model.layers.0.mlp.up_proj"
    weight = tensors.pop(f"{module}.weight")
    tensors |= {
        f"{module}.weight._data": weight.to(torch.int8),
        f"{module}.weight._scale": weight[:, :1].clone(),
    }
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    inspection = inspect(source)
    assert inspection.format == "quanto (not read)"
    assert inspection.schemes == {"BF16": len(inspection.tensors) - 1, "I8": 1}
    assert inspection.quantized_weights == 0


def test_inspection_of_a_release_agrees_with_its_manifest(released):
    inspection = inspect(released[0])
    assert inspection.format == "compressed-tensors"
    assert inspection.schemes["int4:g128:sym:bf16"] == 14
    assert inspection.provenance["method"] == "gptq"
    assert inspection.bits_per_quantized_weight == pytest.approx(
        manifest.read_manifest(released[0])["bits_per_weight"], abs=1e-6
    )


def test_a_manifest_without_quantized_tensors_has_null_bits(tiny, tmp_path):
    quantize(tiny("llama-wide"), tmp_path / "m", recipe(format="plain"))
    document = manifest.read_manifest(tmp_path / "m")
    assert document is not None
    assert document["bits_per_weight"] is None
