"""The source that is named against the one that the manifest records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantforge.results.manifest import NAME
from quantforge.verbs.export import export
from quantforge.verification.findings import Report
from quantforge.verification.verify import VerificationOptions, verify
from tests.runs import quantize, recipe


def look(path: Path, source: Path) -> Report:
    return verify(path, VerificationOptions(source, forward=False))


def sources(report: Report) -> list[str]:
    return [item.detail for item in report.findings if item.check == "source"]


def made(source: Path, out: Path, **values: Any) -> Path:
    quantize(source, out, recipe(**{"scheme": "int4:g32:sym", **values}))
    return out


@pytest.fixture
def near(tiny, tmp_path):
    """Return a model that differs from another in one value, by too little for any other check."""
    other = tmp_path / "near"
    shutil.copytree(tiny("llama-wide"), other)
    file = other / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] *= 1.01
    save_file(tensors, file, metadata={"format": "pt"})
    return other


def test_another_source_is_an_error_that_names_both(tiny, tmp_path, near):
    source = tiny("llama-wide")
    out = made(source, tmp_path / "q")
    (text,) = sources(report := look(out, near))
    assert f"made from {source.name} (SHA-256 " in text
    assert "the weights of near are others" in text
    assert len(report.findings) == 1
    assert report.failed()
    assert not look(out, source).findings
    blocks = made(source, tmp_path / "q.gguf", scheme=None, format="gguf", type="Q4_0")
    assert sources(look(blocks, near))
    assert not look(blocks, source).findings
    # A result of another run is not what this one was made from.
    assert sources(look(out, made(source, tmp_path / "q8", scheme="int8:g32:sym")))


def test_what_is_beside_the_weights_and_the_name_do_not_matter(tiny, tmp_path):
    out = made(tiny("llama-wide"), tmp_path / "q")
    moved = tmp_path / "elsewhere"
    shutil.copytree(tiny("llama-wide"), moved)
    (moved / "README.md").write_text("# Another card")
    assert not sources(look(out, moved))


def test_an_export_has_what_it_was_made_from_and_the_origin(tiny, tmp_path, near):
    source = tiny("llama-wide")
    out = made(source, tmp_path / "q", scheme="int4:g32:sym")
    blocks = tmp_path / "q.gguf"
    export(out, out=blocks, format="gguf")
    assert not sources(look(blocks, source))
    assert not sources(look(blocks, out))
    (text,) = sources(look(blocks, near))
    assert "made from q (SHA-256 " in text
    assert f" or {source.name} (SHA-256 " in text


def test_a_source_that_was_made_from_the_artifact_is_said_once(tiny, tmp_path):
    source = tiny("llama-wide")
    out = made(source, tmp_path / "q")
    report = look(source, out)
    assert [item.detail for item in report.findings] == [
        f"q was made from {source.name}: swapped? quantforge verify RESULT --source MODEL"
    ]
    assert report.skipped["noise"] == report.skipped["logits"] == "result and source are swapped"


def test_without_digests_the_check_is_skipped(tiny, tmp_path, near):
    out = made(tiny("llama-wide"), tmp_path / "q")
    place = out / NAME
    document = json.loads(place.read_text())
    document["source"]["files"] = {}
    place.write_text(json.dumps(document))
    assert look(out, near).skipped["source"] == "no manifest records the digests of a source"
    place.unlink()
    assert look(out, near).skipped["source"] == "no manifest records the digests of a source"
