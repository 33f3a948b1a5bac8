"""Tuning into GGUF files and 4-bit floats changes only scales, norms and codes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge import plan
from quantforge.execution import run_tuning as tuning
from quantforge.formats.gguf import find_layouts, unpack
from quantforge.formats.open_model import open_model
from quantforge.grids import GGML_BLOCKS
from quantforge.packers.tensor import QuantizedTensor
from quantforge.planning.effort import DEFAULT_RECIPE, EFFORT_SETTINGS
from quantforge.quantizers import tuning as tuning_bounds
from quantforge.quantizers.tuning import tuned_matrix
from quantforge.quantizers.tuning.tuning_stream import TuningResult, TuningStream
from quantforge.recipe import CalibrationOptions, GptqOptions
from quantforge.verification.verify import verify
from tests import gguf_models
from tests.conftest import Tiny
from tests.runs import CALIBRATION, StopError, fast_recipe, file_digests, quantize
from tests.thorough import mark_others_thorough, thorough_case

ROWS = replace(CALIBRATION, samples=16, length=24)
TYPES = ["Q2_K", "Q3_K_M", "Q5_K_M", "Q5_1", "IQ4_XS"]


def tuned(kind: str, **choices: Any) -> Any:
    return fast_recipe("gptq", **{"type": kind, "tune": 2, "calibration": ROWS, **choices})


@pytest.fixture
def better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every epoch pass for better than the last, and codes go as far as they can in a few steps."""
    monkeypatch.setattr(tuning_bounds, "MAX_CODE_RATE", 1.0)

    def falls(of: Any, blocks: Any, *_: Any) -> float:  # from the same figure on in every run
        figures = of.__dict__.setdefault("figures", {})
        key = "all" if isinstance(blocks, list) else blocks.decoder_block.index
        return float(next(figures.setdefault(key, itertools.count(100, -1))))

    monkeypatch.setattr(TuningStream, "_divergence", falls)
    monkeypatch.setattr(TuningStream, "_error", falls)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose rows blocks of 256 fill, and whose rows of q and k a file reorders."""
    directory = tmp_path_factory.mktemp("wide") / "m"
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    return gguf_models.make("llama-tied", directory, torch.bfloat16, **sizes)


def modules(path: Path) -> dict[str, QuantizedTensor]:
    opened = open_model(path)
    stored = {name: entry.to_stored_tensor() for name, entry in opened.entries.items()}
    result = find_layouts(opened.config, stored)
    return {
        item.module: unpack(item, {item.tensor_names[0]: opened.read(item.tensor_names[0])})
        for item in result
    }


@pytest.mark.usefixtures("better")
@pytest.mark.parametrize("kind", mark_others_thorough(TYPES, "Q3_K_M", "Q5_1", "Q5_K_M"))
def test_tuning_changes_only_scales_and_codes_of_blocks(
    wide: Path, tmp_path: Path, kind: str
) -> None:
    for name, epochs in (("plain", 0), ("tuned", 2)):
        quantize(wide, tmp_path / f"{name}.gguf", tuned(kind, tune=epochs))
    plain, other = modules(tmp_path / "plain.gguf"), modules(tmp_path / "tuned.gguf")
    moved, recoded, single = set(), set(), set()
    for module, before in plain.items():
        after = other[module]
        inside = ".layers." in module
        for key, value in before.parameters.items():
            if torch.equal(value, after.parameters[key]):
                continue
            moved.add(key)
            assert inside
            if not value.is_floating_point():  # integers of groups, under a scale of their block
                assert int((after.parameters[key].int() - value.int()).abs().max()) == 1
                continue
            ratios = after.parameters[key].float() / value.float()
            ratios = ratios[value.float().abs() > 1e-5]  # others are few steps of float16
            assert not len(ratios) or 0.49 < float(ratios.min()) <= float(ratios.max()) < 1.51
        block, most = GGML_BLOCKS[before.scheme.grid], 0
        if block.weights_per_code == 1 and inside:
            single.add(before.scheme.grid)
            most = 1
        steps = (after.codes.int() - before.codes.int()).abs()
        assert int(steps.max()) <= most
        recoded |= {before.scheme.grid} if steps.any() else set()
    assert recoded == single
    blocks = (item for module, item in other.items() if ".layers." in module)
    assert moved == set().union(*(block.parameters for block in blocks))


@pytest.mark.parametrize("kind", ["Q2_K", thorough_case("IQ3_XXS")])  # points of a lattice stay
def test_tuned_gguf_has_lower_divergence_and_verifies(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """On the rows that it learns on: eight steps on random tokens tell of no others."""
    results: list[TuningResult] = []
    tune, divergence = TuningStream.tune, TuningStream._divergence

    def learned(self: Any, blocks: Any, states: Any, held: range) -> float:
        return divergence(self, blocks, states, range(held.start))

    def noted(*arguments: Any) -> TuningResult:
        results.append(tune(*arguments))
        return results[-1]

    monkeypatch.setattr(TuningStream, "tune", noted)
    monkeypatch.setattr(TuningStream, "_divergence", learned)
    quantize(wide, tmp_path / "x.gguf", tuned(kind, gptq=GptqOptions(refine=0)))
    assert results[0].after < 0.99 * results[0].before
    for source in (None, wide):
        report = verify(tmp_path / "x.gguf", source)
        assert report.findings == [], source


@pytest.mark.usefixtures("better")
@pytest.mark.parametrize("family", ["gemma2", thorough_case("qwen3_moe")])
def test_norms_are_tuned_in_the_dtype_of_the_file(tmp_path: Path, family: str) -> None:
    """It holds them in float32, of gemma with the one that the norm adds, whatever type the source has."""
    model, out = (
        gguf_models.make(family, tmp_path / "m", torch.bfloat16, num_hidden_layers=2),
        tmp_path / "x.gguf",
    )
    quantize(model, out, tuned("Q4_0"))
    source, result = open_model(model), open_model(out)
    name = "model.layers.1.input_layernorm.weight"
    before, after = source.read(name).float(), result.read(name).float()
    offset = 1.0 if family == "gemma2" else 0.0
    ratios = (after + offset) / (before + offset)
    assert 0.49 < float(ratios.min()) <= float(ratios.max()) < 1.51
    assert float((ratios - 1).abs().max()) > 1e-4
    assert not torch.equal(after.bfloat16().float(), after)
    assert torch.equal(
        result.read("model.norm.weight").float(), source.read("model.norm.weight").float()
    )
    report = verify(out, model, forward=False)
    assert report.findings == []


@pytest.mark.thorough
@pytest.mark.usefixtures("better")  # else nothing of so few rows is kept
@pytest.mark.parametrize("choices", [{"type": "Q4_1"}, {"scheme": "mxfp4", "format": "gguf"}])
def test_threads_and_resume_give_the_same_bytes_when_tuning(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]
) -> None:
    """It is killed when all is learned and nothing of it written; other places are those of `test_tuning`."""

    def run_quantize(name: str, **settings: Any) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        return quantize(
            tiny("llama"),
            tmp_path / name / "x.gguf",
            tuned("", **{"type": None, **choices}),
            **settings,
        )

    run_quantize("whole", threads=1)
    other = {"threads": 3, "activations": "disk"}
    with monkeypatch.context() as patched:
        patched.setattr(
            tuning.TuningStep, "_write_learned", lambda *_: (_ for _ in ()).throw(StopError)
        )
        with pytest.raises(StopError):
            run_quantize("out", **other)
    assert run_quantize("out", **other).resumed
    assert file_digests(tmp_path / "out") == file_digests(tmp_path / "whole")


@pytest.mark.usefixtures("better")
@pytest.mark.parametrize(
    ("scheme", "learned"),
    [("nvfp4", {"weight_packed", "weight_scale"}), ("mxfp4", {"weight_packed"})],
)
def test_four_bit_floats_are_tuned(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, learned: set[str]
) -> None:
    """And what is learned of them verifies: their codes, and the scales that are no powers of two."""
    monkeypatch.setattr(tuned_matrix, "FACTOR_RATE", 0.1)  # half a step of e4m3 is 3 to 6 %
    for name, epochs in (("plain", 0), ("tuned", 2)):
        choices = {"type": None, "scheme": scheme, "tune": epochs, "format": "compressed-tensors"}
        quantize(tiny("llama"), tmp_path / name, tuned("", **choices))
    plain, other = (open_model(tmp_path / name) for name in ("plain", "tuned"))
    changed = {
        name for name in plain.entries if not torch.equal(plain.read(name), other.read(name))
    }
    kinds = {name.rpartition(".")[2] for name in changed if not name.endswith("norm.weight")}
    assert kinds == learned
    assert any(name.endswith("norm.weight") for name in changed)
    for source in (None, tiny("llama")):
        report = verify(tmp_path / "tuned", source, forward=False)
        assert report.findings == []


def test_plan_forecasts_tuning_and_effort_includes_it(tiny: Tiny) -> None:
    text = CalibrationOptions()
    planned = plan(
        tiny("llama"), tuned("Q4_1", effort="high", tune=DEFAULT_RECIPE.tune, calibration=text)
    )
    assert planned.tune == EFFORT_SETTINGS["high"]["tune"]
    assert any("tune: 4 epochs" in note for note in planned.notes)
    plain = plan(tiny("llama"), tuned("Q4_1", tune=0, calibration=text))
    assert planned.peak_memory_bytes >= plain.peak_memory_bytes
    assert planned.work.operations["pass"] > 5 * plain.work.operations["pass"]
