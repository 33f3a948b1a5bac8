"""The default method: the best measured one, or rtn with a reason; it is recorded in the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantforge import api
from quantforge.artifacts import manifest
from quantforge.recipe import CalibrationOptions, Recipe, from_toml
from tests.conftest import Tiny
from tests.runs import CALIBRATION_ARGUMENTS, copy_model, run_command


@pytest.mark.parametrize(
    ("options", "method", "reason"),
    [
        ({"bits": 4}, "awq+gptq", "measured best"), ({"bits": 2}, "awq+gptq", "measured best"),
        ({}, "awq+gptq", "measured best"), ({"bits": 8}, "rtn", "8 bits lose next to nothing"),
        ({"scheme": "int4:g64:min", "format": "mlx"}, "gptq", "measured best"),
        ({"scheme": "nf4"}, "gptq", "measured best"), ({"type": "Q4_K_M"}, "gptq", "measured best"),
        ({"bits": 4, "format": "gguf"}, "gptq", "measured best"), ({"type": "Q8_0"}, "rtn", "8 bits lose"),
        ({"bits": 8, "rules": ["down_proj=int4:g128:sym"]}, "awq+gptq", "measured best"),
        ({"bits": 4, "calibration": "none"}, "rtn", "--calibration none"),
        ({"bits": 4, "scales": "absmax"}, "rtn", "--scales absmax"),
        ({"type": "Q4_0", "scales": "reference"}, "rtn", "--scales reference"),
    ],
)  # fmt: skip
def test_the_default_method_and_its_reason(tiny: Tiny, options, method: str, reason: str) -> None:
    plan = api.plan(tiny("llama-wide"), **options)
    assert plan.method == method
    messages = [note for note in plan.notes if note.startswith("chosen: --method")]
    assert len(messages) == 1
    assert f"--method {method}: " in messages[0]
    assert reason in messages[0]


def test_explicit_methods_and_conversions_give_no_note(tiny: Tiny) -> None:
    for options in ({"method": "rtn", "bits": 4}, {"format": "plain"}, {"type": "BF16"}):
        plan = api.plan(tiny("llama-wide"), **options)
        assert plan.method == "rtn"
        assert not any(note.startswith("chosen: --method") for note in plan.notes)


def test_without_a_tokenizer_the_method_is_rtn(tiny: Tiny, tmp_path: Path) -> None:
    model = copy_model(tiny("llama-wide"), tmp_path / "m")
    (model / "tokenizer.json").unlink()
    plan = api.plan(model, bits=4)
    assert plan.method == "rtn"
    assert any("there is no tokenizer" in note for note in plan.notes)


def test_undeclared_families_default_to_rtn(tiny: Tiny, tmp_path: Path) -> None:
    model = copy_model(tiny("llama-wide"), tmp_path / "m")
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(
        config.replace('"model_type": "llama"', '"model_type": "unheard_of"')
    )
    plan = api.plan(model, bits=4)
    assert plan.method == "rtn"
    assert any("unheard_of is not declared" in note for note in plan.notes)


def test_the_chosen_method_is_reported_first_and_recorded(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command(
        capsys,
        "quantize",
        tiny("llama-wide"),
        "--bits",
        4,
        *CALIBRATION_ARGUMENTS,
        "-v",
        "-o",
        tmp_path / "q",
    )
    assert result.code == 0
    assert result.err.index("chosen: --method awq+gptq") < result.err.index("block 0")
    document = manifest.read_manifest(tmp_path / "q")
    assert document is not None
    assert document["method"] == from_toml(document["recipe"]).method == "awq+gptq"
    text = CalibrationOptions(samples=4, length=24)
    moved = api.export(
        tiny("llama-wide"), Recipe(type="Q4_0", calibration=text), tmp_path / "m.gguf"
    )
    assert isinstance(moved, api.Outcome)
    assert moved.plan.method == "rtn"
