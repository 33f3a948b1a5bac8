"""Effort levels: what each sets, keeps and omits with a reason; planning again changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from quantforge import plan, reproduce
from quantforge.architectures.match import match_tensors
from quantforge.artifacts import manifest
from quantforge.errors import QuantForgeError, UsageError
from quantforge.files.reader import open_checkpoint
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.planning import effort
from quantforge.planning.effort import EFFORT_SETTINGS, MIN_TUNING_ROWS, _gptq_passes_obstacle
from quantforge.planning.planner import Planned, make_plan
from quantforge.planning.recipe_options import build_recipe
from quantforge.planning.release_spec import parse_release
from quantforge.recipe import VALUES, CalibrationOptions, GptqOptions, Recipe, from_toml
from quantforge.settings import Settings
from tests.conftest import Tiny, make_tiny
from tests.runs import CALIBRATION, file_digests, make_variants, quantize, recipe, run_command
from tests.thorough import thorough_case

LOW, MEDIUM, HIGH = VALUES["effort"]
SHORT = replace(CALIBRATION, length=24)
ONE_ROW = CalibrationOptions(samples=1)
ALL_EXPERT_TOKENS = CalibrationOptions(expert_tokens="all")


def make_planned(tiny: Tiny, requested_recipe: Recipe, family: str = "llama") -> Planned:
    return make_plan(requested_recipe, open_checkpoint(tiny(family)))


def effort_note(planned_run: Planned) -> str:
    (note,) = (
        note
        for note in planned_run.plan.notes
        if "--effort" in note and "--method" not in note[:20]
    )
    return note


def test_every_effort_level_has_settings() -> None:
    assert set(EFFORT_SETTINGS) == set(VALUES["effort"])
    assert Recipe().effort == MEDIUM


@pytest.mark.parametrize("method", ["gptq", "awq+gptq", ""])
def test_medium_effort_tunes_for_one_epoch(tiny: Tiny, method: str) -> None:
    planned_run = make_planned(tiny, Recipe(method=method, bits=4))
    assert planned_run.recipe == Recipe(
        method=method or "awq+gptq",
        bits=4,
        format=planned_run.recipe.format,
        guided_hessians=0,
        tune=1,
        calibration=CalibrationOptions(random_share=1 / 16),
    )
    assert (
        effort_note(planned_run)
        == "chosen: tune = 1: --effort medium; --tune 0 is faster, and worse"
    )
    assert make_planned(tiny, planned_run.recipe).recipe == planned_run.recipe


@pytest.mark.parametrize(
    ("family", "choices"),
    [
        ("llama", {"tune": 0}),
        ("llama", {"method": "rtn"}),
        ("llama", {"method": "awq"}),
        ("llama", {"bits": 5}),
        ("llama", {"bits": None, "format": "gguf", "type": "Q5_K_M"}),
        ("llama", {"bits": None, "scheme": "mxfp8"}),
        ("llama", {"calibration": CalibrationOptions(samples=MIN_TUNING_ROWS - 1)}),
    ],
)
def test_medium_effort_does_not_tune_without_benefit(
    tiny: Tiny, family: str, choices: dict[str, Any]
) -> None:
    planned_run = make_planned(tiny, Recipe(**{"method": "gptq", "bits": 4, **choices}), family)
    assert (planned_run.recipe.guided_hessians, planned_run.recipe.tune) == (0, 0)
    assert not any("effort" in note for note in planned_run.plan.notes)


def test_medium_effort_does_not_tune_very_large_blocks(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effort, "MAX_TUNED_BLOCK_WEIGHTS", 3000)
    assert make_planned(tiny, Recipe(method="gptq", bits=4)).recipe.tune == 0


def test_medium_effort_does_not_tune_derived_architectures(tiny: Tiny) -> None:
    planned_run = make_planned(tiny, Recipe(method="gptq", bits=4))
    family = planned_run.model_layout.architecture
    assert family is not None
    derived = replace(
        planned_run.model_layout, architecture=replace(family, derivation=cast(Any, "found"))
    )
    words = ("gptq",)
    for model_layout, reason in (
        (planned_run.model_layout, ""),
        (derived, "what blocks read was derived"),
    ):
        context = effort.EffortContext(words, planned_run.plan.tensors, model_layout, frozenset())
        assert effort._tuning_obstacle(Recipe(), context) == reason


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of one block."""
    return make_tiny("llama", tmp_path_factory.mktemp("block"), num_hidden_layers=1)


def test_gguf_metadata_states_effort_settings(block: Path, tmp_path: Path) -> None:
    few = replace(SHORT, samples=128)
    for level, rows in ((LOW, 32), (HIGH, 6)):
        out = tmp_path / f"{level}.gguf"
        requested_recipe = recipe("gptq", type="Q4_0", format="gguf", effort=level)
        quantize(block, out, replace(requested_recipe, calibration=few if level == LOW else SHORT))
        file = read_gguf(out)
        assert file.value("quantize.imatrix.chunks_count", int) == rows
        assert file.value("quantforge.recipe", str) == manifest.read_manifest(out)["recipe"]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_high_effort_sets_guide_tuning_and_passes(tiny: Tiny, family: str) -> None:
    planned_run = make_planned(tiny, Recipe(method="gptq", bits=4, effort=HIGH), family)
    assert (
        planned_run.recipe.guided_hessians,
        planned_run.recipe.tune,
        planned_run.recipe.gptq.passes,
    ) == (1, 4, 4)
    assert (planned_run.plan.guided_hessians, planned_run.plan.tune) == (1, 4)
    assert (
        effort_note(planned_run)
        == "chosen: guided_hessians = 1, tune = 4, gptq.passes = 4: --effort high"
    )
    assert effort_note(
        make_planned(tiny, Recipe(method="gptq", type="Q4_0", effort=HIGH))
    ) == effort_note(planned_run)


def test_forecasts_grow_with_effort(tiny: Tiny) -> None:
    low, medium, high = (
        make_planned(tiny, Recipe(method="gptq", bits=4, effort=level)).plan
        for level in VALUES["effort"]
    )
    assert low.work.operations["observe"] < medium.work.operations["observe"] / 3
    assert medium.work.operations["round"] < high.work.operations["round"]
    assert medium.work.operations["pass"] * 3 < high.work.operations["pass"]
    assert low.peak_memory_bytes < medium.peak_memory_bytes < high.peak_memory_bytes
    assert medium.work.guide_bytes == 0 < high.work.guide_bytes


def test_low_effort_defaults_to_rtn(tiny: Tiny) -> None:
    planned_run = make_planned(tiny, Recipe(bits=4, effort=LOW))
    assert planned_run.recipe.method == "rtn"
    assert any(
        note.startswith("chosen: --method rtn: --effort low") for note in planned_run.plan.notes
    )
    assert make_planned(tiny, Recipe(bits=4)).recipe.method == "awq+gptq"


def test_low_effort_calibrates_on_fewer_rows(tiny: Tiny) -> None:
    planned_run = make_planned(tiny, Recipe(method="gptq", bits=4, effort=LOW))
    assert planned_run.recipe.calibration == CalibrationOptions(samples=32, random_share=1 / 16)
    nothing = Recipe(method="rtn", bits=4, effort=LOW, calibration=CalibrationOptions("none"))
    read = Recipe(
        method="rtn", bits=4, effort=LOW, calibration=CalibrationOptions(source="imatrix:a")
    )
    assert "calibration.samples = 32 (importance is read from a file)" in effort_note(
        make_planned(tiny, read)
    )
    assert "nothing: --effort low; left out: calibration.samples = 32 (nothing is" in effort_note(
        make_planned(tiny, nothing)
    )


@pytest.mark.parametrize(
    ("choices", "explicit_key"),
    [
        ({"guided_hessians": 4}, "guided_hessians"),
        ({"tune": 2}, "tune"),
        ({"guided_hessians": 0}, "guided_hessians"),
        ({"tune": 0}, "tune"),
        ({"gptq": GptqOptions(passes=1)}, "gptq.passes"),
    ],
)
def test_explicit_settings_override_effort(
    tiny: Tiny, choices: dict[str, Any], explicit_key: str
) -> None:
    planned_run = make_planned(tiny, Recipe(method="gptq", bits=4, effort=HIGH, **choices))
    for name, value in choices.items():
        assert getattr(planned_run.recipe, name) == value
    reason = "switched off" if 0 in choices.values() else "named already"
    assert f"{reason}: {explicit_key}" in effort_note(planned_run)
    assert explicit_key not in effort_note(planned_run).split(": --effort")[0]


@pytest.mark.parametrize(
    ("family", "choices", "taken", "reasons"),
    [
        ("llama", {"method": "smooth+gptq", "bits": 4}, "guided_hessians = 1, gptq.passes = 4",
         ["smooth+gptq are not tuned"]),
        ("llama", {"method": "gptq", "scheme": "NVFP4"}, "guided_hessians = 1, tune = 4", ["has anyway"]),
        ("llama", {"method": "gptq", "scheme": "mxfp8"}, "guided_hessians = 1, gptq.passes = 4", ["are powers of two"]),
        ("mixtral", {"method": "gptq", "bits": 4, "calibration": ALL_EXPERT_TOKENS}, "tune = 4, gptq.passes = 4",
         ["guided_hessians = 1 (--expert-tokens all sends"]),
        ("llama", {"method": "gptq", "bits": 4, "scales": "absmax"}, "guided_hessians = 1, tune = 4", ["searched for"]),
        ("llama", {"method": "rtn", "bits": 4}, "nothing",
         ["rtn does not take guided", "of --method rtn are not", "of gptq alone"]),
        ("llama", {"method": "gptq", "bits": 4, "calibration": ONE_ROW}, "guided_hessians = 1, gptq.passes = 4",
         ["one calibration row"]),
    ],
)  # fmt: skip
def test_impossible_effort_settings_are_omitted_with_a_reason(
    tiny: Tiny, family: str, choices: dict[str, Any], taken: str, reasons: list[str]
) -> None:
    planned_run = make_planned(tiny, Recipe(effort=HIGH, **choices), family)
    note = effort_note(planned_run)
    assert note.startswith(f"chosen: {taken}: --effort high; left out: ")
    for reason in reasons:
        assert reason in note.split("left out: ")[1]
    assert planned_run.plan.tune == 4 * ("tune = 4" in taken)
    again = make_planned(tiny, planned_run.recipe, family)
    assert again.recipe == planned_run.recipe


def test_gptq_passes_need_a_quantized_matrix() -> None:
    assert (
        _gptq_passes_obstacle(EFFORT_SETTINGS[HIGH]["gptq.passes"], Recipe(), ())
        == "no matrix of a block is quantized"
    )


def test_effort_omits_gradients_for_replayed_models(tiny: Tiny) -> None:
    checkpoint = open_checkpoint(tiny("llama"))
    stored = [entry.to_stored_tensor() for entry in checkpoint.entries.values()]
    model_layout = match_tensors(checkpoint.config, stored, checkpoint.derived_declarations)
    assert model_layout.architecture is not None
    replayed = replace(
        model_layout, architecture=replace(model_layout.architecture, needs_model_replay=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantforge.planning.planner._match_unquantized", lambda *_: replayed)
        planned_run = make_plan(Recipe(method="gptq", bits=4, effort=HIGH), checkpoint)
    assert (
        planned_run.recipe.guided_hessians,
        planned_run.recipe.tune,
        planned_run.recipe.gptq.passes,
    ) == (
        0,
        0,
        4,
    )
    assert "name it to try" in effort_note(planned_run)


def test_an_explicit_impossible_guide_is_refused(tiny: Tiny) -> None:
    with pytest.raises(UsageError, match="--guided-hessians 1: --method rtn"):
        plan(tiny("llama"), recipe("rtn", bits=4, guided_hessians=1, effort=HIGH))


@pytest.mark.parametrize("level", [LOW, thorough_case(HIGH)])
def test_the_manifest_records_effort_settings_and_reproduces(
    block: Path, tmp_path: Path, level: str
) -> None:
    rows = {LOW: 128, HIGH: 6}[level]  # as many as a recipe has that names none
    requested_recipe = recipe(
        "gptq", bits=3, effort=level, calibration=replace(SHORT, samples=rows)
    )
    quantize(block, tmp_path / "out", requested_recipe)
    document = json.loads((tmp_path / "out" / "quantforge.manifest.json").read_text())
    recorded = from_toml(document["recipe"])
    assert recorded.effort == level
    for key, value in EFFORT_SETTINGS[level].items():
        inside, _, name = key.rpartition(".")
        assert getattr(getattr(recorded, inside) if inside else recorded, name) == value
    assert not reproduce(tmp_path / "out", block).differing


def test_more_gptq_passes_change_the_codes(tiny: Tiny, tmp_path: Path) -> None:
    files = []
    for runs in (0, 1, 2):
        requested_recipe = recipe("gptq", bits=4, gptq=GptqOptions(passes=runs))
        quantize(tiny("llama"), tmp_path / str(runs), requested_recipe)
        files.append(file_digests(tmp_path / str(runs))["model.safetensors"])
    assert files[0] == files[1] != files[2]  # the grid of 4 bits has one


@pytest.mark.thorough
def test_release_variants_equal_separate_runs(block: Path, tmp_path: Path) -> None:
    text = f"""
model = "{block}"
[calibration]
samples = 8
length = 24
[[variant]]
name = "quick"
method = "gptq"
bits = 4
[[variant]]
name = "best"
method = "gptq"
bits = 4
effort = "high"
"""
    spec = parse_release(text, "release.toml")
    assert [variant.recipe.effort for variant in spec.variants] == [MEDIUM, HIGH]
    pairs = [(variant.recipe, tmp_path / variant.name) for variant in spec.variants]
    recipes = {variant.name: variant.recipe for variant in spec.variants}
    make_variants(block, recipes, lambda name, _: tmp_path / name, Settings())
    for variant_recipe, path in pairs:
        alone = path.with_name(f"{path.name}-alone")
        quantize(block, alone, variant_recipe)
        ours, theirs = file_digests(path), file_digests(alone)
        assert {n: d for n, d in ours.items() if n != "README.md"} == {
            n: d for n, d in theirs.items() if n != "README.md"
        }
    assert (
        file_digests(pairs[0][1])["model.safetensors"]
        != file_digests(pairs[1][1])["model.safetensors"]
    )


def test_the_command_line_accepts_effort(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "plan",
        tiny("llama"),
        "--method",
        "gptq",
        "--bits",
        "4",
        "--samples",
        "8",
        "--length",
        "24",
    )
    result = run_command(capsys, *arguments, "--effort", "HIGH")
    assert "chosen: guided_hessians = 1, tune = 4, gptq.passes = 4: --effort high" in result.out
    wrong = run_command(capsys, *arguments, "--effort", "hihg")
    assert wrong.code == 2
    assert "did you mean 'high'?" in wrong.err
    assert build_recipe(None, effort=LOW).effort == LOW


@pytest.mark.parametrize("choices", [{"join": True}])
def test_joined_processes_refuse_high_effort(
    tiny: Tiny, tmp_path: Path, choices: dict[str, Any]
) -> None:
    requested_recipe = recipe("gptq", bits=4, effort=HIGH)
    with pytest.raises(QuantForgeError, match="calibration rows pass its blocks"):
        quantize(tiny("llama"), tmp_path / "out", requested_recipe, **choices)


def test_size_targets_require_medium_effort(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command(
        capsys,
        "quantize",
        tiny("llama"),
        "--target",
        "3.5bpw",
        "--effort",
        HIGH,
        "-o",
        tmp_path / "out",
    )
    assert result.code == 2
    assert "--effort high: errors are measured at medium" in result.err
    assert "quantize --recipe FILE --effort high" in result.err
    recipe_path = tmp_path / "own.toml"
    recipe_path.write_text(f'effort = "{LOW}"\n')
    arguments = ("--target", "3.5bpw", "--recipe", recipe_path, "-o", tmp_path / "made.toml")
    result = run_command(capsys, "allocate", tiny("llama"), *arguments)
    assert result.code == 2
    assert "remove `effort` from the recipe" in result.err
    assert "quantize --recipe FILE --effort low" in result.err
