"""What a command makes: what the plan said, under a name of its own, with its events shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quantforge.execution.journal import count_scaled_activations
from tests.runs import CALIBRATION_ARGUMENTS, run_command
from tests.thorough import thorough_case


def test_the_summary_tells_for_how_many_activations_factors_were_found(model, tmp_path, capsys):
    asked = ("quantize", model, "--bits", "4", *CALIBRATION_ARGUMENTS)
    said = run_command(capsys, *asked, "--method", "awq", "-o", tmp_path / "a").err
    (told,) = re.findall(r"^columns scaled for (\d+) of (\d+) activations; ", said, re.M)
    assert 0 <= int(told[0]) <= int(told[1]) > 0
    assert "scaled" not in run_command(capsys, *asked, "--method", "rtn", "-o", tmp_path / "r").err
    records = [{"transform": {"a": {"family": "none"}, "b": {"family": "duo"}}}, {"events": []}]
    assert count_scaled_activations(records) == (1, 2)
    assert count_scaled_activations([{"transform": {"a": {"error": 0.5}}}]) is None


QUICK = ["--method", "rtn", "--scales", "absmax"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bits", "3", "--method", "gptq"], [*QUICK, "--scheme", "int5:g256"],
        [*QUICK, "--bits", "4", "--format", "gptq"],
        [*QUICK, "--rule", "down_proj=int8:g64:sym", "--ignore", "*.layers.0.*", "--max-shard-bytes", "50000"],
        [*QUICK, "--lm-head", "int8", "--embedding", "int8"],
        *map(thorough_case, (
            ["--bits", "3"], [*QUICK, "--scheme", "int4:g32:asym"], [*QUICK, "--scheme", "int8:row"],
            [*QUICK, "--scheme", "int4:tensor"], ["--bits", "4", "--format", "awq"],
            [*QUICK, "--rule", "lm_head=int6"],
        )),
    ],
)  # fmt: skip
def test_the_plan_is_what_quantize_does(model, tmp_path, capsys, arguments):
    planned = json.loads(run_command(capsys, "plan", model, *arguments, "--json").out)
    out = tmp_path / "out"
    done = run_command(
        capsys, "quantize", model, *arguments, *CALIBRATION_ARGUMENTS, "-o", out, "--json"
    )
    result = json.loads(done.out)
    weights = list(out.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in weights) == planned["output_bytes"]
    assert len(weights) == planned["files"]
    for key in ("output_bytes", "bits_per_weight", "bits_per_weight_total", "format", "method"):
        assert result[key] == planned[key]
    manifest = json.loads((out / "quantforge.manifest.json").read_text())
    chosen = {(t["name"], t["action"], t["rule"], t["scheme"]) for t in planned["tensors"]}
    written = {(t["name"], t["action"], t["rule"], t.get("scheme")) for t in manifest["tensors"]}
    assert chosen == written
    assert planned["substitutions"] == [
        e for e in manifest["events"] if e["kind"] == "substitution"
    ]
    found = json.loads(run_command(capsys, "inspect", out, "--json").out)
    assert found["tensor_bytes"] == sum(tensor["bytes"] for tensor in planned["tensors"])
    assert found["file_bytes"] == planned["output_bytes"]
    assert found["bits_per_weight"] == pytest.approx(planned["bits_per_weight_total"])
    assert found["bits_per_quantized_weight"] == pytest.approx(planned["bits_per_weight"])


def test_options_override_the_recipe(model, capsys):
    result = run_command(
        capsys, "plan", model, "--recipe", "small-3bit", "--bits", "5", "--method", "rtn", "--json"
    )
    planned = json.loads(result.out)
    assert planned["method"] == "rtn"
    schemes = {tensor["scheme"] for tensor in planned["tensors"] if tensor["scheme"]}
    assert schemes == {"int5:g128:sym:bf16", "int4:g128:sym:bf16"}  # the recipe's rule stays


def test_an_event_is_shown_and_counted(tiny, tmp_path, capsys):
    arguments = ("quantize", tiny("llama"), "--scales", "absmax", "-o", tmp_path / "out")
    assert "event substitution x18" in run_command(capsys, *arguments).err
    again = run_command(capsys, *arguments, "--overwrite", "--strict", "--json")
    assert again.code == 4
    assert json.loads(again.err)["error"]["code"] == "refused"


def test_results_have_names_of_their_own(model, tmp_path, capsys, monkeypatch):
    """Without -o: said before the work, the same in the plan, and what exists is refused."""
    monkeypatch.chdir(tmp_path)
    typed = ["quantize", model, "--scales", "absmax", "--bits", "4"]
    made = run_command(capsys, *typed, "-v")
    name = f"{model.name}-rtn-int4"
    assert (made.code, made.out) == (0, f"{name}\n")
    assert made.err.index(f"output: ./{name}") < made.err.index("block 0")
    planned = run_command(capsys, "plan", *typed[1:], "--json")
    assert json.loads(planned.out)["output"] == name
    assert f"./{name}\n" in run_command(capsys, "plan", *typed[1:]).out
    again = run_command(capsys, *typed)
    assert (again.code, "exists" in again.err) == (4, True)
    moved = run_command(capsys, "export", f"{name}/", "--format", "gguf", "--json")
    assert json.loads(moved.out)["path"] == f"{model.name}-Q4_0.gguf"
    assert (tmp_path / f"{model.name}-Q4_0.gguf").is_file()


def test_words_are_taken_in_letters_of_either_case_and_recorded_in_small_ones(
    model, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    typed = ["--method", "RTN", "--format", "GPTQ", "--scales", "AbsMax", "--bits", "4"]
    typed += ["--calibration", "none"]
    made = run_command(capsys, "quantize", model, *typed)
    assert made.out == f"{model.name}-rtn-int4-gptq\n", made.err
    small = run_command(capsys, "quantize", model, *map(str.lower, typed), "-o", "small")
    assert small.code == 0, small.err
    manifests = [Path(place, "quantforge.manifest.json") for place in ("small", made.out.strip())]
    recipe, same = (json.loads(path.read_text())["recipe"] for path in manifests)
    assert recipe == same
    assert 'method = "rtn"' in recipe
    chosen = run_command(
        capsys, "plan", model, "--for", "VLLM", "--device-name", "L4", "--context", "64", "--json"
    )
    assert chosen.code == 0, chosen.err
    assert json.loads(chosen.out)["capacity"]["cards"][0]["name"] == "l4"


def test_what_is_asked_for_decides_the_format(model, tmp_path, capsys):
    for words, form, file in (
        (["--bits", "8"], "gguf", "a.gguf"),
        (["--scheme", "nf4"], "bnb", "b"),
        (["--format", "plain"], "plain", "c"),
    ):
        out = tmp_path / file
        typed = [*words, "--scales", "absmax", "--json", "-o", out]
        assert json.loads(run_command(capsys, "plan", model, *typed).out)["format"] == form
        made = run_command(capsys, "quantize", model, *typed)
        assert json.loads(made.out)["format"] == form, made.err
        assert out.is_file() is (form == "gguf")
    typed = ("--scheme", "nf4", *CALIBRATION_ARGUMENTS, "-v", "-o", tmp_path / "e")
    said = run_command(capsys, "quantize", model, *typed)
    assert said.err.index("chosen: --format bnb") < said.err.index("block 0")


def test_an_event_of_a_whole_model_is_not_told_as_one_of_a_tensor(model, tmp_path, capsys):
    place = tmp_path / "made"
    rounded = ("--method", "rtn", "--scales", "absmax", "--scheme", "int8:row:sym")
    assert run_command(capsys, "quantize", model, *rounded, "-o", place).code == 0
    again = ("--format", "gguf", "--type", "Q8_0", "--requantize", "--dry-run")
    told = run_command(capsys, "export", place, *again)
    assert told.code == 0, told.err
    assert "requantized: made: from decoded weights\n" in told.out
    assert "tensors, the first is made" not in told.out


def test_a_job_summary_is_added_to_with_the_verdict_of_the_gates(model, tmp_path, capsys):
    made = tmp_path / "made"
    scheme = ("--method", "rtn", "--scales", "absmax", "--scheme", "int4:g32:sym")
    assert run_command(capsys, "quantize", model, *scheme, "-o", made).code == 0
    summary = tmp_path / "summary.md"
    small = ("--windows", 2, "--length", 16, "--no-speed")
    assert run_command(capsys, "eval", model, made, *small, "--summary", summary).code == 0
    first = summary.read_text()
    assert first.startswith("## Evaluation\n\n|  | model |")
    assert "Failed" not in first
    assert (
        run_command(capsys, "eval", model, made, *small, "--summary", summary, "--max-kl", 0).code
        == 6
    )
    added = summary.read_text().removeprefix(first)
    assert added.startswith("## Evaluation\n\n**Failed:** 1 quality gate(s) failed: ")
    refused = run_command(
        capsys, "eval", model, made, *small, "--summary", tmp_path / "no" / "s.md"
    )
    assert refused.code == 3
