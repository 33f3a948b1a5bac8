"""Zeros in a model, by the whole run: exact in files, known to verify, refused where nothing comes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import api
from quantforge.api.reproduce import reproduce
from quantforge.artifacts import manifest
from quantforge.errors import InputError, QuantForgeError, RefusedError, UsageError
from quantforge.formats.decoded import decode_checkpoint
from quantforge.formats.open_model import open_model
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from scripts.demo_text import calibration_text, evaluation_text
from tests.conftest import Tiny, make_tiny
from tests.runs import (
    CALIBRATION,
    StopError,
    copy_model,
    crash_after,
    file_digests,
    quantize,
    recipe,
)
from tests.thorough import thorough_case

DEMO = Path(__file__).parents[2] / "models/demo-moe"


def zeros(out: Path) -> dict[str, float]:
    """The share of zeros that the manifest states, by tensor."""
    document = manifest.read_manifest(out)
    assert document is not None
    return {item["name"]: item["sparsity"] for item in document["tensors"] if "sparsity" in item}


def weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model."""
    files = sorted(path.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("gpt-oss", "sparsegpt"), ("gpt2", "magnitude"), ("qwen3-moe", "wanda")),
        *(
            thorough_case("llama", "sparsegpt"),
            thorough_case("gpt-oss", "magnitude"),
            thorough_case("gpt2", "wanda"),
        ),
    ],
)
def test_half_of_every_linear_is_gone(tiny: Tiny, tmp_path: Path, family: str, method: str) -> None:
    model, out = tiny(family), tmp_path / "s"
    wanted = recipe(method, format="plain", sparsity="2:4")
    plan = api.plan(str(model), wanted)
    assert any("no engine is faster" in note for note in plan.notes)
    made = quantize(model, out, wanted)
    source, found = (weights(path) for path in (model, out))
    sparse = {tensor.name: tensor for tensor in made.plan.tensors if tensor.sparse}
    assert sparse.keys() == zeros(out).keys() == {t.name for t in plan.tensors if t.sparse}
    assert len(sparse) >= 8
    for name, value in found.items():
        if name not in sparse:
            assert torch.equal(value, source[name]), name
            continue
        rows = value.T if sparse[name].transposed else value
        assert ((rows.reshape(-1, 4) == 0).sum(1) >= 2).all(), name
        stays = value != 0
        assert torch.equal(value[stays], source[name][stays]) is (method != "sparsegpt"), name
    assert verify(out, model).findings == []


def test_one_run_is_like_another(tmp_path: Path) -> None:
    model = make_tiny("qwen3-moe", tmp_path / "m", num_hidden_layers=2)
    wanted = recipe("sparsegpt", format="plain", sparsity="37%", ignore=("*down_proj",))
    quantize(model, tmp_path / "a", wanted, threads=1)
    with pytest.raises(StopError):
        quantize(model, tmp_path / "b", wanted, progress=crash_after("block 0 expert 1"))
    quantize(model, tmp_path / "b", wanted, threads=2, activations="disk")
    assert file_digests(tmp_path / "a") == file_digests(tmp_path / "b")
    assert zeros(tmp_path / "a")
    assert not any("down_proj" in name for name in zeros(tmp_path / "a"))
    assert verify(tmp_path / "a", model).findings == []
    assert reproduce(tmp_path / "a", str(model), Settings()).differing == ()


@pytest.fixture(scope="module")
def sparse(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a method to a healthy result of it."""

    @cache
    def make(method: str) -> Path:
        out = tmp_path_factory.mktemp(method) / "s"
        quantize(tiny("llama"), out, recipe(method, format="plain", sparsity="2:4"))
        assert verify(out, tiny("llama")).findings == []
        return out

    return make


@pytest.mark.parametrize(
    ("method", "damage"),
    [
        ("magnitude", lambda value: value.roll(1, 0)),
        ("magnitude", lambda value: value.masked_fill(value == 0, 0.5)),
        ("wanda", lambda value: value * 1.02),
        ("wanda", lambda value: value.index_fill(0, torch.tensor([3]), 0.25)),
        ("sparsegpt", lambda value: value.roll(1, 0)),
        ("sparsegpt", lambda value: torch.cat([value[:1] * 4, value[1:]])),
        ("sparsegpt", lambda value: -value),
        ("sparsegpt", lambda value: torch.where(value == 0, 1e-3, value)),
    ],
)
def test_verify_sees_what_is_damaged(
    tiny: Tiny, sparse: Callable[[str], Path], tmp_path: Path, method: str, damage: Any
) -> None:
    out = copy_model(sparse(method), tmp_path / "s")
    name = next(name for name in zeros(out) if "up_proj" in name)
    values = load_file(out / "model.safetensors")
    values[name] = damage(values[name].float()).to(values[name].dtype).contiguous()
    save_file(values, out / "model.safetensors", {"format": "pt"})
    found = verify(out, tiny("llama"), forward=False).findings
    assert name in {finding.where for finding in found}


@pytest.mark.thorough
def test_plain_rounding_afterwards_keeps_every_zero(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3-moe")
    quantize(model, tmp_path / "s", recipe("sparsegpt", format="plain", sparsity="2:4"))
    masks = {
        name: load_file(tmp_path / "s/model.safetensors")[name] == 0
        for name in zeros(tmp_path / "s")
    }
    for scheme in ("int4:g32:sym", "int3:g32:asym", "fp8_e4m3:row"):
        out = tmp_path / scheme.replace(":", "-")
        quantize(tmp_path / "s", out, recipe("rtn", scheme=scheme))
        plain = decode_checkpoint(open_model(out))
        for name, gone in masks.items():
            value = plain.read(name)
            assert (value[gone] == 0).all(), name
            assert (value[~gone] != 0).float().mean() > 0.5, name
        assert verify(out, tmp_path / "s").findings == []


@pytest.mark.parametrize(
    ("method", "values", "error", "said"),
    [
        ("wanda", {"sparsity": None}, UsageError, "no --sparsity"),
        ("gptq", {}, UsageError, "makes no zeros"),
        ("wanda", {"sparsity": "4:2"}, InputError, "2:4"),
        ("wanda", {"format": "compressed-tensors"}, RefusedError, "36799"),
        ("wanda", {"format": "gguf", "type": "Q4_0"}, RefusedError, "take as much room"),
        ("wanda+rtn", {}, UsageError, "run of their own"),
        ("awq+wanda", {}, UsageError, "run of their own"),
        ("wanda", {"ignore": ("re:.*",)}, InputError, "no linear"),
        ("wanda", {"calibration": replace(CALIBRATION, source="none")}, UsageError, "text"),
    ],
)
def test_what_cannot_be_is_refused(
    tiny: Tiny, method: str, values: dict[str, Any], error: type[QuantForgeError], said: str
) -> None:  # fmt: skip
    def made() -> None:
        wanted = recipe(method, **{"format": "plain", "sparsity": "2:4", **values})
        api.plan(str(tiny("llama")), wanted)

    with pytest.raises(error) as refused:
        made()
    assert said in f"{refused.value.message} {refused.value.hint}"


def test_columns_that_do_not_fit_stay_as_an_event(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "s"
    made = quantize(tiny("qwen2-moe"), out, recipe("wanda", format="plain", sparsity="1:3"))
    missed = {event.where for event in made.events if event.kind == "substitution"}
    sparse = {tensor.name: tensor for tensor in made.plan.tensors if tensor.sparse}
    assert missed
    assert sparse.keys() == zeros(out).keys()
    assert sparse.keys().isdisjoint(missed)
    assert all(
        tensor.matrix[1] % 3 == 0 for tensor in sparse.values()
    )  # those of the shared experts


@pytest.mark.thorough
def test_on_a_trained_model_what_makes_up_for_zeros_pays(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(calibration_text())
    (tmp_path / "other.txt").write_text(evaluation_text())
    calibration = replace(CALIBRATION, source=str(tmp_path / "text.txt"), samples=12, length=256)
    results = []
    for method in ("magnitude", "wanda", "sparsegpt"):
        results.append(tmp_path / method)
        wanted = recipe(method, format="plain", sparsity="2:4", calibration=calibration)
        quantize(DEMO, results[-1], wanted)
    measured = api.evaluate(
        DEMO, results, text=str(tmp_path / "other.txt"), windows=4, length=256, speed=False
    )
    magnitude, wanda, sparsegpt = (float(row["kl_mean"]) for row in measured.rows[1:])
    print(json.dumps([magnitude, wanda, sparsegpt]))
    assert 0.01 < sparsegpt < 0.85 * wanda
    assert wanda < 0.98 * magnitude
