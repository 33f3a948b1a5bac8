"""The source given to `verify` is compared with the one that the manifest records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantforge.api.export import export
from quantforge.artifacts import manifest
from quantforge.artifacts.manifest import NAME
from quantforge.verification.findings import Report
from quantforge.verification.verify import verify
from tests.runs import quantize, recipe, run_command


def quick_verify(path: Path, source: Path) -> Report:
    return verify(path, source, forward=False)


def source_messages(report: Report) -> list[str]:
    return [item.detail for item in report.findings if item.check == "source"]


def quantized(source: Path, out: Path, **values: Any) -> Path:
    quantize(source, out, recipe(**{"scheme": "int4:g32:sym", **values}))
    return out


@pytest.fixture
def nearly_equal(tiny, tmp_path):
    """Return a model that differs from another in one value, by too little for any other check."""
    other = tmp_path / "near"
    shutil.copytree(tiny("llama-wide"), other)
    file = other / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] *= 1.01
    save_file(tensors, file, metadata={"format": "pt"})
    return other


def test_another_source_is_an_error_naming_both(tiny, tmp_path, nearly_equal):
    source = tiny("llama-wide")
    out = quantized(source, tmp_path / "q")
    (text,) = source_messages(report := quick_verify(out, nearly_equal))
    assert f"made from {source.name} (SHA-256 " in text
    assert "near has different weights" in text
    assert "name the model it was made from with --source" in text
    assert len(report.findings) == 1
    assert report.failed()
    assert not quick_verify(out, source).findings
    blocks = quantized(source, tmp_path / "q.gguf", scheme=None, format="gguf", type="Q4_0")
    assert source_messages(quick_verify(blocks, nearly_equal))
    assert not quick_verify(blocks, source).findings
    # A result of another run is not what this one was made from.
    assert source_messages(
        quick_verify(out, quantized(source, tmp_path / "q8", scheme="int8:g32:sym"))
    )


def test_a_moved_source_with_another_card_passes(tiny, tmp_path):
    out = quantized(tiny("llama-wide"), tmp_path / "q")
    moved = tmp_path / "elsewhere"
    shutil.copytree(tiny("llama-wide"), moved)
    (moved / "README.md").write_text("# Another card")
    assert not source_messages(quick_verify(out, moved))


def split_weights(source: Path, target: Path) -> Path:
    """Return a copy of a model with its weights in two files."""
    shutil.copytree(source, target)
    (target / "model.safetensors").unlink()
    tensors = load_file(source / "model.safetensors")
    files = {
        name: f"model-{1 + index % 2:05}-of-00002.safetensors" for index, name in enumerate(tensors)
    }
    for file in {*files.values()}:
        shard = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(shard, target / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def test_resharded_source_weights_are_a_warning(tiny, tmp_path, nearly_equal):
    source = tiny("llama-wide")
    out = quantized(source, tmp_path / "q")
    report = quick_verify(out, split_weights(source, tmp_path / "two"))
    (text,) = source_messages(report)
    assert "two has as many bytes of tensors in other files (2, not 1)" in text
    assert not report.failed()
    assert report.failed(strict=True)
    assert not source_messages(
        quick_verify(quantized(tmp_path / "two", tmp_path / "of-two"), tmp_path / "two")
    )
    assert "(1, not 2)" in source_messages(quick_verify(tmp_path / "of-two", source))[0]
    # Of other bytes it is said as before, and values that differ are found by the checks of tensors.
    assert "near has different weights" in source_messages(quick_verify(out, nearly_equal))[0]
    assert (
        f"{tiny('llama').name} has different weights"
        in source_messages(quick_verify(out, tiny("llama")))[0]
    )


def test_a_hub_snapshot_is_recognized_as_the_source(tiny, tmp_path):
    source, out = tiny("llama-wide"), quantized(tiny("llama-wide"), tmp_path / "q")
    repository = tmp_path / "models--org--wide"
    snapshot, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in source.iterdir():
        shutil.copyfile(path, blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert not quick_verify(out, snapshot).findings
    of_hub = quantized(snapshot, tmp_path / "of-hub")
    assert not quick_verify(of_hub, source).findings
    assert (
        "made from org/wide (SHA-256 "
        in source_messages(quick_verify(of_hub, split_weights(source, tmp_path / "two")))[0]
    )
    (blobs / "model.safetensors").write_bytes(b"")
    save_file(
        {name: 2 * value for name, value in load_file(source / "model.safetensors").items()},
        blobs / "model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip
    assert "org/wide has different weights" in source_messages(quick_verify(out, snapshot))[0]


def test_each_source_file_is_digested_once(tiny, tmp_path, monkeypatch):
    source = tiny("llama-wide")
    out, again, file = quantized(source, tmp_path / "q"), tmp_path / "gptq", tmp_path / "q.gguf"
    export(out, out=again, format="gptq", allow_inexact=True)
    export(again, out=file, format="gguf", allow_inexact=True)
    digested: list[Path] = []
    digest = manifest.sha256

    def noted(path: Path, inside: Path | None) -> str:
        digested.append(path)
        return digest(path, inside)

    monkeypatch.setattr(manifest, "sha256", noted)
    assert not source_messages(quick_verify(file, source))
    assert digested.count(source / "model.safetensors") == 1


def test_an_export_accepts_its_parent_and_original_source(tiny, tmp_path, nearly_equal):
    source = tiny("llama-wide")
    out = quantized(source, tmp_path / "q", scheme="int4:g32:sym")
    blocks = tmp_path / "q.gguf"
    export(out, out=blocks, format="gguf")
    assert not source_messages(quick_verify(blocks, source))
    assert not source_messages(quick_verify(blocks, out))
    (text,) = source_messages(quick_verify(blocks, nearly_equal))
    assert "made from q (SHA-256 " in text
    assert f" or {source.name} (SHA-256 " in text


def test_other_checks_are_skipped_for_a_wrong_source(tiny, tmp_path):
    out = quantized(tiny("llama-wide"), tmp_path / "q")
    for other in ("llama", "qwen2"):
        report = quick_verify(out, tiny(other))
        assert [item.check for item in report.findings] == ["source"]
        assert (
            report.skipped["quantization-error"]
            == "the model named with --source is not the recorded one"
        )
        assert "source" not in report.skipped
        assert not report.tensors
    manifest_of_it = out / NAME
    manifest_of_it.unlink()
    assert len(quick_verify(out, tiny("llama")).findings) > 1  # nobody said what it was made from


def test_similar_findings_are_abbreviated_in_text_output(tiny, tmp_path, capsys):
    out = quantized(tiny("llama-wide"), tmp_path / "q")
    document = json.loads((out / NAME).read_text())
    gone = {f"gone-{n:02}": {"bytes": 1, "sha256": "0"} for n in range(25)}
    (out / NAME).write_text(json.dumps(document | {"outputs": document["outputs"] | gone}))
    ended = run_command(capsys, "verify", out, "--no-forward")
    assert ended.code == 5
    assert ended.out.count("error: gone-") == 5
    more = "error: 20 more like these, 25 places in all (manifest; --json lists all); fetch or make it again"
    assert ended.out.endswith(f"\n{more}\n25 errors: failed\n")
    every = json.loads(run_command(capsys, "verify", out, "--no-forward", "--json").out)["findings"]
    assert len(every) == 25


def test_without_manifest_and_source_only_structure_is_verified(tiny, tmp_path, capsys):
    source, out = tiny("llama-wide"), quantized(tiny("llama-wide"), tmp_path / "q")
    options = ("--no-forward", "-q")
    assert run_command(capsys, "verify", out, *options).out.endswith("\nverified\n")
    (out / NAME).unlink()
    alone = run_command(capsys, "verify", out, *options)
    assert (alone.code, alone.out.splitlines()[-1]) == (0, "verified: structure only")
    compared = run_command(capsys, "verify", out, "--source", source, *options)
    assert compared.out.endswith("\nverified\n")
    for more, only in (((), True), (("--source", source), False)):
        ended = run_command(capsys, "verify", out, "--no-forward", "--json", *more)
        assert json.loads(ended.out)["structure_only"] is only


def test_swapped_result_and_source_are_reported_once(tiny, tmp_path):
    source = tiny("llama-wide")
    out = quantized(source, tmp_path / "q")
    report = quick_verify(source, out)
    assert [item.detail for item in report.findings] == [
        f"q was made from {source.name}: are the two swapped? Usage: quantforge verify RESULT --source MODEL"
    ]
    assert (
        report.skipped["quantization-error"]
        == report.skipped["logits"]
        == "result and source are swapped"
    )


def test_the_source_check_is_skipped_without_digests(tiny, tmp_path, nearly_equal):
    out = quantized(tiny("llama-wide"), tmp_path / "q")
    path = out / NAME
    document = json.loads(path.read_text())
    document["source"]["files"] = {}
    path.write_text(json.dumps(document))
    assert (
        quick_verify(out, nearly_equal).skipped["source"]
        == "no manifest records the digests of a source"
    )
    path.unlink()
    assert (
        quick_verify(out, nearly_equal).skipped["source"]
        == "no manifest records the digests of a source"
    )
