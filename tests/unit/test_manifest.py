"""The manifest: every file and every source with its digest, nothing of the place and time."""

from __future__ import annotations

import hashlib
import json

import pytest

from quantforge import manifest
from quantforge.checkpoint.hub import source_name
from quantforge.inspection import inspect
from quantforge.publishing import base_model
from tests.conftest import Tiny
from tests.runs import copied, quantize, recipe


@pytest.fixture(scope="module")
def released(tiny: Tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("released") / "out"
    quantize(tiny("llama-wide"), out, recipe("gptq", rules=()))
    return out, tiny("llama-wide")


def digest(path):
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def test_outputs_and_sources_are_listed_with_their_digests(released):
    out, source = released
    document = manifest.read(out)
    files = {path.name for path in out.iterdir()} - {manifest.NAME}
    assert document["outputs"] == {name: digest(out / name) for name in sorted(files)}
    assert document["source"]["files"].keys() >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    for name, entry in document["source"]["files"].items():
        assert entry == digest(source / name)


def test_it_accounts_for_every_tensor_and_says_what_was_done(released):
    document = manifest.read(released[0])
    actions = [tensor["action"] for tensor in document["tensors"]]
    assert actions.count("quantize") == document["quantized"] == 14
    assert all("error" in t for t in document["tensors"] if t["action"] == "quantize")
    assert document["calibration"]["rows"] == 6
    assert document["event_counts"] == {"calibration-short": 1}
    assert document["method"] == "gptq"
    assert 'method = "gptq"' in document["recipe"]
    assert {"quantforge", "torch", "python"} <= document["versions"].keys()


def test_it_is_the_last_file_and_durable_json(released):
    out, _ = released
    text = (out / manifest.NAME).read_text()
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"schema": "other/1"}'])
def test_what_is_no_manifest_is_none(tmp_path, content):
    (tmp_path / manifest.NAME).write_bytes(content)
    assert manifest.read(tmp_path) is None
    assert manifest.read(tmp_path / "absent") is None


def test_names_of_sources(tmp_path):
    assert source_name(tmp_path / "a" / ".." / "model") == ("model", "")
    snapshot = tmp_path / "models--org--a--b" / "snapshots" / "0123"
    assert source_name(snapshot) == ("org/a--b", "0123")


@pytest.mark.parametrize(
    ("config", "lineage", "name"),
    [
        ({}, {}, "here"),
        ({"_name_or_path": "org/name"}, {}, "org/name"),
        ({"_name_or_path": "/srv/models/x"}, {}, "here"),
        ({"_name_or_path": "x\nlicense: mit"}, {}, "here"),
        ({"_name_or_path": 3}, {"source": {"model": "first"}}, "first"),
        ({}, {"source": "damaged"}, "here"),
    ],
)
def test_the_base_model_of_the_card(config, lineage, name):
    document = {"source": {"model": "here"}, "lineage": lineage}
    assert base_model(document, config) == name


def test_a_model_in_a_format_that_nobody_reads_can_still_be_inspected(tiny, tmp_path):
    source = copied(tiny("llama-wide"), tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "quanto", "weights": "int4"}
    (source / "config.json").write_text(json.dumps(config))
    found = inspect(source)
    assert found.format == "quanto (not read)"
    assert found.schemes == {"BF16": len(found.tensors)}
    assert found.bits_per_weight == 16
    assert found.quantized_weights == 0


def test_inspection_of_a_release_agrees_with_its_manifest(released):
    found = inspect(released[0])
    assert found.format == "compressed-tensors"
    assert found.schemes["int4:g128:sym:bf16"] == 14
    assert found.provenance["method"] == "gptq"
    assert found.bits_per_quantized_weight == pytest.approx(
        manifest.read(released[0])["bits_per_weight"], abs=1e-6
    )
