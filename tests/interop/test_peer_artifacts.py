"""Files that other tools made: read as these tools read them, and found healthy.

``fixtures/peers/README.md`` says by whom, how and from what they were made. Beside each artifact lies a record with the
digests of the weights that the tool itself decodes from it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge import api
from quantforge.api.inspect import inspect
from quantforge.evaluation import compare_models as evaluation
from quantforge.formats.decoded import decode_checkpoint
from quantforge.formats.open_model import open_model
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from tests import peers
from tests.evaluations import evaluate_models
from tests.thorough import mark_others_thorough

RECORDS = {path.stem: path for path in sorted(peers.FIXTURES.glob("*.json"))}
TEXT = "the weights of the model are rounded to the nearest point of the grid, row by row; " * 8
KL = {"llmc-mxfp4": 1.0}  # inputs of 4 bits as well
# One artifact of each format.
COMPUTED = (
    "autoround-asym", "bnb-int8", "bnb-nf4-double", "gptqmodel-awq", "gptqmodel-desc-act", "llama.cpp-q4_k_m",
    "llmc-fp8-block", "llmc-mxfp4", "llmc-w4a16-gptq", "llmc-w8a8-smooth", "mlx-4bit",
)  # fmt: skip
# What is computed with decoded weights depends on neither format nor tool. These have an order of columns, inputs that
# are rounded, or are files of GGUF.
FEW = ("gptqmodel-desc-act", "llmc-mxfp4", "llmc-w8a8-smooth", "llama.cpp-q4_k_m")
# Name: a format that holds every number of it.
EXACT = {
    "autoround": "gptq", "bnb-int8": "bnb", "bnb-nf4-double": "bnb", "gptqmodel-v1": "gptq_v2",
    "gptqmodel-v2-asym": "awq", "gptqmodel-3bit-skipped": "gptq_v2", "gptqmodel-awq": "compressed-tensors",
    "llmc-w4a16-gptq": "mlx", "llmc-w4a16-awq-asym": "gptq_v2", "mlx-nvfp4": "compressed-tensors",
}  # fmt: skip


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDS[name].read_text())
    return found


def artifact(name: str) -> Path:
    folder = peers.FIXTURES / name
    return folder if folder.is_dir() else peers.FIXTURES / f"{name}.gguf"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return cache(lambda name: peers.make(name, tmp_path_factory.mktemp(name)))


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Decoded weights by module, float32."""
    checkpoint = decode_checkpoint(open_model(path))
    return {name.removesuffix(".weight"): checkpoint.read(name) for name in checkpoint.computed}


def test_there_are_artifacts_of_every_tool():
    tools = {name.partition("-")[0] for name in RECORDS}
    assert tools >= {"llmc", "gptqmodel", "bnb", "mlx", "autoround", "llama.cpp"}


@pytest.mark.parametrize("name", RECORDS)
def test_weights_are_what_the_tool_decodes_bit_for_bit(name):
    expected = record(name)
    dtype = getattr(torch, expected["dtype"])
    found = {key: peers.digest(value.to(dtype)) for key, value in weights(artifact(name)).items()}
    assert found
    assert {key: expected["decoded"].get(key) for key in found} == found
    assert len(found) >= 6


def test_inspect_tells_what_is_in_it():
    for name in RECORDS:
        found = inspect(artifact(name))
        assert found.quantized_weights > 0, name
        assert 3 < found.bits_per_quantized_weight < 9.5, name


@pytest.mark.parametrize("name", mark_others_thorough(RECORDS, *COMPUTED))
def test_a_healthy_artifact_passes_verify_with_and_without_its_source(name, source):
    model = source(record(name)["source"])
    for given in (None, model):
        assert [str(item) for item in verify(artifact(name), given).findings] == []


@pytest.mark.parametrize("name", mark_others_thorough(COMPUTED, *FEW))
def test_it_is_evaluated_against_its_source(name, source):
    model = source(record(name)["source"])
    options = evaluation.EvaluationOptions(TEXT, "text", windows=2, length=64, speed=False)
    row = evaluate_models(model, [artifact(name)], options).rows[1]
    assert 0 < row["kl_mean"] < KL.get(name, 0.5)


@pytest.mark.parametrize(
    "name",
    mark_others_thorough(
        sorted(EXACT.keys() & RECORDS.keys()),
        *(
            "autoround",
            "bnb-nf4-double",
            "gptqmodel-3bit-skipped",
            "llmc-w4a16-awq-asym",
            "mlx-nvfp4",
        ),
    ),
)
def test_it_moves_to_another_format_without_loss(name, tmp_path):
    recipe = Recipe(
        format=EXACT[name], embedding="keep", calibration=CalibrationOptions(source="none")
    )
    api.export(str(artifact(name)), recipe, tmp_path / "out", Settings())
    before, after = weights(artifact(name)), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    for module, weight in before.items():
        assert torch.equal(weight, after[module]), module


@pytest.mark.parametrize("name", mark_others_thorough(COMPUTED, *FEW, "bnb-nf4-double"))
def test_it_becomes_plain_weights(name, tmp_path):
    recipe = Recipe(format="plain", calibration=CalibrationOptions(source="none"))
    api.export(str(artifact(name)), recipe, tmp_path / "out", Settings(), allow_inexact=True)
    plain = open_model(tmp_path / "out")
    for module, weight in weights(artifact(name)).items():
        found = plain.read(f"{module}.weight")
        assert torch.equal(found, weight.to(found.dtype)), module
