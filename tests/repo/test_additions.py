"""What is added from outside, through the public tables alone, goes all the way: plan, quantize, verify, eval."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantforge import api
from quantforge.architectures.families import declared_families
from quantforge.errors import UsageError
from quantforge.formats import FORMATS
from quantforge.grids import GRIDS
from quantforge.model.statistics import Statistic
from quantforge.quantizers import METHODS, Method, MethodKind, MethodMemory
from quantforge.recipe import NO_DATA, CalibrationOptions
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from tests.conftest import SIZES, Tiny, randomize, tiny_tokenizer
from tests.evaluations import evaluate_models, options
from tests.runs import copy_model, quantize, recipe
from tests.toys import halving, squares
from tests.toys import hyperclovax as hyperclovax_family

ONE_BLOCK = {**SIZES, "num_hidden_layers": 1}


def test_a_method(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = frozenset({Statistic.PEAKS})
    toy = Method(
        "tests.toys.halving", MethodKind.ROUNDER, needs, MethodMemory(matrices=3.0, compiler=1)
    )
    monkeypatch.setitem(METHODS, "halving", toy)
    model = tiny("llama-wide")
    wanted = recipe("halving", scheme="int8:g32:sym", scales="absmax")
    plan = api.plan(str(model), wanted)
    assert (plan.rounder, plan.needs) == ("halving", (Statistic.PEAKS,))
    assert plan.peak_memory_bytes > 0
    halving.SEEN.clear()
    done = quantize(model, tmp_path / "q", wanted)
    assert done.plan.method == "halving"
    assert len(halving.SEEN) == 8  # shared inputs of two blocks
    assert all(halving.SEEN)
    assert verify(tmp_path / "q", model).findings == []
    rows = evaluate_models(model, [tmp_path / "q"], options()).rows
    assert 0 < rows[1]["kl_mean"] < 0.01
    for text in ("awq+halving", "halving+rtn"):
        if text.startswith("awq"):
            quantize(model, tmp_path / "a", recipe(text, scheme="int8:g32:sym", scales="absmax"))
        else:
            with pytest.raises(UsageError, match="transforms come first"):
                api.plan(str(model), recipe(text))


@pytest.mark.parametrize(
    ("scheme", "scales"), [("int8:g32:sym", "absmax"), ("fp8:tensor", "search")]
)
def test_a_method_that_needs_no_data(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, scales: str
) -> None:
    """It rounds every matrix itself, in strips or whole, and runs without calibration as rtn does."""
    toy = Method("tests.toys.halving", MethodKind.ROUNDER, frozenset(), MethodMemory(matrices=3.0))
    monkeypatch.setitem(METHODS, "halving", toy)
    model, halving_recipe = (
        tiny("llama-wide"),
        replace(
            recipe("halving", scheme=scheme, scales=scales),
            calibration=CalibrationOptions(source=NO_DATA),
        ),
    )
    assert api.plan(str(model), halving_recipe).needs == ()
    halving.SEEN.clear()
    quantize(model, tmp_path / "q", halving_recipe)
    assert len(halving.SEEN) >= 8  # joint matrices of two blocks
    quantize(model, tmp_path / "rtn", replace(halving_recipe, method="rtn"))
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "q" / file).read_bytes() == (tmp_path / "rtn" / file).read_bytes()


@pytest.fixture(scope="module")
def hyperclovax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import HyperCLOVAXConfig, HyperCLOVAXForCausalLM

    place = tmp_path_factory.mktemp("hyperclovax")
    multipliers = {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
    }
    model = HyperCLOVAXForCausalLM(
        HyperCLOVAXConfig(**ONE_BLOCK, **multipliers, use_post_norm=False)
    )
    randomize(model)
    model.to(torch.bfloat16).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def test_a_family(hyperclovax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = recipe("awq+gptq", scheme="int8:g32:sym")
    derived = api.plan(str(hyperclovax), wanted)
    assert any("hyperclovax as derived from" in note for note in derived.notes)
    monkeypatch.setitem(declared_families(), "hyperclovax", hyperclovax_family.ARCHITECTURE)
    plan = api.plan(str(hyperclovax), wanted)
    assert any("as declared for hyperclovax" in note for note in plan.notes)
    assert plan.tensors == derived.tensors
    assert len(plan.quantized()) == 7
    quantize(hyperclovax, tmp_path / "q", wanted)
    assert verify(tmp_path / "q", hyperclovax).findings == []
    rows = evaluate_models(hyperclovax, [tmp_path / "q"], options()).rows
    assert 0 < rows[1]["kl_mean"] < 0.01


def test_a_format(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "bytes-by-row", "tests.toys.bytes_by_row")
    model = tiny("llama-wide")
    wanted = recipe("gptq", scheme=None, bits=8, format="bytes-by-row")
    plan = api.plan(str(model), wanted)
    assert len(plan.quantized()) == 14
    assert [verdict.loads for verdict in plan.engines] == [True, False]
    quantize(model, tmp_path / "q", wanted)
    assert "| toy | yes |" in (tmp_path / "q/README.md").read_text()
    report = verify(tmp_path / "q", model)
    assert (report.format, report.findings) == ("bytes-by-row", [])
    lying = copy_model(tmp_path / "q", tmp_path / "lying")
    config = (lying / "config.json").read_text()
    (lying / "config.json").write_text(config.replace('"left_out": []', '"left_out": ["up_proj"]'))
    found = verify(lying, engine="other", forward=False).findings
    assert {"ignore-list", "engine"} <= {item.check for item in found}
    rows = evaluate_models(model, [tmp_path / "q"], options()).rows
    assert 0 < rows[1]["kl_mean"] < 0.01
    other = recipe(format="compressed-tensors")
    api.export(str(tmp_path / "q"), other, tmp_path / "ct", Settings(), allow_inexact=True)
    back = api.export(
        str(tmp_path / "ct"), replace(other, format="bytes-by-row"), tmp_path / "b", Settings()
    )
    assert back.layers == 14


def test_a_grid(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRIDS, "squares4", squares.RECORD)
    monkeypatch.setitem(FORMATS, "bytes-by-row", "tests.toys.bytes_by_row")
    model = tiny("llama-wide")
    for method in ("rtn", "gptq", "awq+gptq"):
        wanted = recipe(method, scheme="squares4", format="bytes-by-row", scales="absmax")
        assert str(api.plan(str(model), wanted).quantized()[0].scheme) == "squares4:g32:sym:f32"
        quantize(model, tmp_path / method, wanted)
        assert verify(tmp_path / method, model).findings == []
    places = [tmp_path / method for method in ("rtn", "gptq")]
    plain, compensated = evaluate_models(model, places, options()).rows[1:]
    assert 0 < plain["kl_mean"] < 0.2
    assert 0 < compensated["kl_mean"] < 0.2
