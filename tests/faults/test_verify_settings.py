"""Side files that contradict each other are found with and without a source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quantforge.verification.consistency import check_consistency, find_contradictions
from quantforge.verification.findings import Report
from quantforge.verification.opening import open_artifact
from quantforge.verification.side_files import SideFiles
from quantforge.verification.structure import check_structure
from quantforge.verification.verify import verify
from tests import peers


@pytest.fixture
def model(tmp_path):
    def copied(name: str):
        return shutil.copytree(peers.FIXTURES / name, tmp_path / name)

    return copied


def find_messages(model) -> list[str]:
    """Return the findings as text; warnings begin with a question mark."""
    report = Report(model)
    artifact = open_artifact(report)
    if artifact is not None:
        check_structure(report, artifact, None)
        check_consistency(report, artifact)
    messages = [report.unsupported] if report.unsupported else []
    return messages + [
        f"{'?' * (item.severity == 'warning')}{item.where}: {item.detail}"
        for item in report.findings
    ]


@pytest.mark.parametrize("path", sorted(peers.FIXTURES.glob("*/")), ids=lambda path: path.name)
def test_files_of_other_tools_have_no_contradictions(path):
    assert find_messages(path) == []


def document(directory, name: str, **values: Any) -> None:
    content = json.loads((directory / name).read_text()) if (directory / name).exists() else {}
    (directory / name).write_text(json.dumps({**content, **values}))


# What is said of the vocabulary is a warning (?), since odd models are published so; two descriptions of the
# quantization that differ are an error.
PLANTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an id beyond the vocabulary": ("?config.json", {"eos_token_id": 100}, "100 rows"),
    "an end beyond the vocabulary": (
        "?generation_config.json", {"eos_token_id": [1, 5000]}, "5000"),
    "a token that is none": ("?tokenizer_config.json", {"bos_token": "<nothing>"}, "not a token"),
    "a map that names no token": (
        "?special_tokens_map.json", {"eos_token": "<nothing>"}, "<nothing>"),
    "another vocabulary": ("?vocab.json", {"a": 77777}, "77777"),
    "MLX's key": ("config.json", {"quantization": {"bits": 3, "group_size": 32}}, "quantization.bits = 3"),
    "a second description": ("quantize_config.json", {"bits": 8}, "bits"),
    "a third description": ("quant_config.json", {"w_bit": 8, "quant_method": "gptq"}, "bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_contradicting_side_files_are_found(name, model):
    directory = model("gptqmodel-v1")
    file, values, part = PLANTED[name]
    document(directory, file.removeprefix("?"), **values)
    messages = find_messages(directory)
    assert any(item.startswith(file) and part in item for item in messages), messages
    assert "".join(messages).isprintable()


def contradictions(quantization: Any, **files: Any) -> int:
    """Return the number of contradictions between a quantization config and other files."""
    report = Report(Path("m"))
    contents = {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}
    find_contradictions(report, SideFiles({"quantization_config": quantization}, contents), 0)
    return len(report.findings)


def test_a_second_quantization_config_must_agree():
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    older = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM", "dataset": "x"}
    assert contradictions(config, quant_config=older) == 0
    assert contradictions(config, quant_config={**older, "desc_act": None, "dynamic": None}) == 0
    assert contradictions(config, quant_config={**older, "zero_point": False}) == 1
    assert contradictions({**config, "quant_method": ["x"]}) == 0


def test_a_sparsity_config_is_found():
    assert contradictions({"sparsity_config": {"format": "dense"}}) == 0
    assert contradictions({"sparsity_config": {"format": "sparse-24-bitmask"}}) == 1
    assert contradictions({"sparsity_config": None}) == 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_auto_map_without_a_source_is_a_warning(tmp_path, name):
    model = shutil.copytree(peers.FIXTURES / "llmc-w4a16-gptq", tmp_path / "m")
    document = json.loads((model / name).read_text())
    (model / name).write_text(json.dumps({**document, "auto_map": {"AutoConfig": "x.X"}}))
    report = verify(model, forward=False)
    assert [(item.where, item.severity) for item in report.findings] == [(name, "warning")]
