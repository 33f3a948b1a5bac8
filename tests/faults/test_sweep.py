"""Sweeps make every combination with the bytes of its own command, resume, and name what is impossible."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from quantforge.api import quantize, sweep
from quantforge.api.sweep import combinations
from quantforge.artifacts import manifest
from quantforge.errors import InputError, QuantForgeError, RefusedError, ResourceError, UsageError
from quantforge.events import Policy
from quantforge.files.disk import run_folder
from quantforge.settings import Settings
from tests.runs import file_digests, run_command
from tests.thorough import parametrize_each_value, thorough_case

ROWS = {"samples": 4, "length": 16}
EVALUATION = {"windows": 2, "length": 16}


def run_sweep(model, out, over, **options):
    return sweep(model, over, out, measured=EVALUATION, **{**ROWS, **options})


def test_sweep_results_match_their_commands_and_existing_ones_stay(model, tmp_path):
    over = {"bits": ["3", "4"], "method": ["gptq", "rtn"]}
    first = run_sweep(model, tmp_path / "s", {**over, "bits": ["4"]})
    before = (tmp_path / "s/bits4-gptq/model.safetensors").stat().st_mtime_ns
    result = run_sweep(model, tmp_path / "s", over)
    assert [*first.results] == ["bits4-gptq", "bits4-rtn"]
    assert [*result.results] == ["bits3-gptq", "bits3-rtn", "bits4-gptq", "bits4-rtn"]
    assert (tmp_path / "s/bits4-gptq/model.safetensors").stat().st_mtime_ns == before
    for name in ("bits3-gptq", "bits4-rtn"):  # one of either command
        path, method = result.results[name], name.rpartition("-")[2]
        quantize(model, None, tmp_path / name, method=method, bits=int(name[4]), **ROWS)
        assert file_digests(path) == file_digests(tmp_path / name)
    rows = result.evaluation.rows
    assert [row["kl_mean"] is None for row in rows] == [True, False, False, False, False]
    with pytest.raises(RefusedError, match=r"made in: calibration\.samples: "):
        run_sweep(model, tmp_path / "s", over, samples=5)


@parametrize_each_value(("left", [(), ("journal",)]), ("overwrite", [False, True]))
def test_a_sweep_keeps_a_result_beside_a_killed_run(model, tmp_path, left, overwrite):
    out, over = tmp_path / "s", {"type": ["Q8_0"], "method": ["rtn"]}
    path = run_sweep(model, out, over).results["Q8_0-rtn"]
    before, run = path.stat().st_mtime_ns, run_folder(path)
    run.mkdir()
    (run / "lock").touch()
    for name in left:
        (run / name).mkdir()
    run_sweep(model, out, over, settings=Settings(overwrite=overwrite))
    assert path.stat().st_mtime_ns == before
    assert not run.exists()


def test_a_truncated_sweep_result_is_refused(model, tmp_path):
    run_sweep(model, tmp_path / "s", {"bits": ["4"]}, method="rtn")
    file = tmp_path / "s/bits4/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RefusedError, match="differs from what would be made in: files"):
        run_sweep(model, tmp_path / "s", {"bits": ["4"]}, method="rtn")


def test_combinations_a_format_cannot_hold_are_skipped_or_refused(model, tmp_path):
    over = {"scheme": ["int4:g32:asym", "int3:g32:asym"], "format": ["awq", "compressed-tensors"]}
    result = run_sweep(model, tmp_path / "s", over, method="rtn")
    assert [*result.left_out] == ["int3-g32-asym-awq"]
    assert "the layout holds 4 bits" in result.left_out["int3-g32-asym-awq"]
    assert len(result.results) == 3
    with pytest.raises(RefusedError, match="1 of 4 combinations"):
        run_sweep(
            model, tmp_path / "t", over, method="rtn", settings=Settings(policy=Policy(True, {}))
        )
    with pytest.raises(RefusedError, match="1 of 1 combinations"):
        run_sweep(model, tmp_path / "t", {"bits": [3]}, format="awq")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("over", "options", "left_out"),
    [
        ({"tune": [0, 1], "method": ["rtn"]}, {}, {"tune1-rtn": "not tuned"}),
        ({"method": ["magnitude", "rtn"]}, {"bits": 4}, {"magnitude": "no --sparsity"}),
        ({"engine": ["vllm", "lmdeploy"], "bits": [8]}, {"method": "rtn"}, {"lmdeploy-bits8": "4 bits"}),
        thorough_case({"bits": [3, 8]}, {"method": "rtn", "engine": "vllm"}, {"bits3": "4 or 8 bits"}),
    ],
)  # fmt: skip
def test_combinations_a_method_or_engine_rejects_are_skipped(
    model, tmp_path, over, options, left_out
):
    result = run_sweep(model, tmp_path / "s", over, **options)
    assert result.left_out.keys() == left_out.keys()
    assert all(words in result.left_out[name] for name, words in left_out.items())
    assert len(result.results) == 1
    if "engine" in {*over, *options}:  # of an engine and bits, as `quantize` has it
        (path,) = result.results.values()
        arguments = {"engine": "vllm", "bits": 8, "method": "rtn", **ROWS}
        quantize(model, None, tmp_path / path.name, **arguments)
        assert file_digests(path) == file_digests(tmp_path / path.name)
        assert (manifest.read_manifest(path) or {})["format"] == "compressed-tensors"


@pytest.mark.parametrize(
    ("over", "options", "error", "words"),
    [
        ({"method": ["rtn", "gtpq"]}, {}, UsageError, "^unknown method 'gtpq'"),
        ({"format": ["awq", "awk"]}, {}, UsageError, "^unknown format 'awk'"),
        ({"engine": ["vllm", "vlm"]}, {}, UsageError, "^--for vlm: unknown engine"),
        ({"bits": [4, 77]}, {}, UsageError, "^recipe: bits = 77 is too large"),
        ({"bits": [3, 4]}, {"method": "magnitude"}, UsageError, "^--method magnitude: no --sparsity"),
        ({"bits": [3, 5]}, {"engine": "vllm"}, RefusedError, "^2 of 2 .*bits5: --for vllm --bits 5"),
        ({"bits": [3, 4]}, {"scheme": "int4:g32:sym"}, UsageError, "^--bits and --scheme are both"),
    ],
)  # fmt: skip
def test_options_invalid_in_every_combination_raise_the_quantize_error(
    model, tmp_path, over, options, error, words
):
    with pytest.raises(error, match=words):
        run_sweep(model, tmp_path / "s", over, **options)
    assert not (tmp_path / "s").exists()


def test_a_sweep_refuses_split_gguf_files_before_work(model, tmp_path):
    over = {"type": ["Q4_0", "Q8_0"]}
    with pytest.raises(RefusedError, match=r"2 of 2 .*Q8_0: its file would be split into \d"):
        run_sweep(model, tmp_path / "s", over, method="rtn", max_shard_bytes=20000)
    assert not (tmp_path / "s").exists()


def test_an_invalid_sweep_directory_is_refused_before_work(model, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(model, source)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = {*tmp_path.rglob("*")}
    for output, code, words in (
        ("no/such", 3, "no directory"),
        ("file", 3, "is no directory"),
        ("link", 3, "is a link"),
        ("source/sub", 2, "overlaps the model"),
        ("source", 2, "overlaps the model"),
    ):
        arguments = ("--over", "bits=4", "--method", "rtn", "-o", tmp_path / output)
        ended = run_command(capsys, "sweep", source, *arguments)
        assert (ended.code, words in ended.err) == (code, True), ended.err
        assert {*tmp_path.rglob("*")} == before


def test_combination_names_are_made_of_option_values():
    named = combinations({"bits": ["2"], "scales": ["search"], "embedding": ["int8:row", "keep"]})
    assert named == {
        "bits2-search-int8-row": {"bits": 2, "scales": "search", "embedding": "int8:row"},
        "bits2-search-keep": {"bits": 2, "scales": "search", "embedding": "keep"},
    }
    assert [*combinations({"seed": ["-1", "1"]})] == ["seed-1", "seed1"]
    assert combinations({"chat_template": ["true"]}) == {
        "chat_templateTrue": {"chat_template": True}
    }


INVALID_GRIDS: list[tuple[dict[str, Any], type[QuantForgeError], str]] = [
    ({}, UsageError, "nothing is varied"),
    ({"bit": ["3"]}, UsageError, "no option 'bit'"),
    ({"bits": ["x"]}, InputError, "not a number"),
    ({"bits": ["3", "3"]}, UsageError, "a value twice"),
    ({"bits": [3, "3"]}, UsageError, "a value twice"),
    ({"method": ["AWQ", "awq"]}, UsageError, "a value twice"),
    ({"bits": []}, UsageError, "no values"),
    ({"bits": "34"}, UsageError, "a list of values"),
    ({"ignore": ["lm_head"]}, UsageError, "takes a list"),
    ({"chat_template": ["maybe"]}, InputError, "not understood"),
    ({"scheme": ["int4:sym", "int4-sym"]}, UsageError, "two combinations"),
]


def test_an_invalid_sweep_grid_is_refused():
    for grid, error, words in INVALID_GRIDS:
        with pytest.raises(error, match=words):
            combinations(grid)


def test_an_option_both_fixed_and_varied_is_refused(model, tmp_path):
    with pytest.raises(UsageError, match="--bits is given too"):
        run_sweep(model, tmp_path / "s", {"bits": [3, 4]}, bits=4)
    with pytest.raises(UsageError, match="--bits and --scheme are both given"):
        run_sweep(model, tmp_path / "s", {"scheme": ["int4:g32:sym"]}, bits=4)
    assert not (tmp_path / "s").exists()


def test_the_sweep_command_prints_results_and_next_step(model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("sweep", model, "--over", "bits=4", "--over", "method=rtn", "--windows", 2)
    rows = ("--samples", 4, "--length", 16, "--window-length", 16)
    ended = run_command(capsys, *arguments, *rows, "--report", "s.md", "--json")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["schema"] == "quantforge.sweep/2"
    assert [*document["results"]] == ["bits4-rtn"]
    assert (tmp_path / f"{model.name}-sweep/bits4-rtn/config.json").is_file()
    assert "bits4-rtn" in (tmp_path / "s.md").read_text()
    assert "results:" not in ended.err  # the document says it
    again = run_command(capsys, *arguments, *rows)
    assert f"results: 1 in ./{model.name}-sweep, under the names of their rows\n" in again.err
    assert f"next: quantforge generate {model.name}-sweep/bits4-rtn\n" in again.err
    both = run_command(capsys, *arguments, "--bits", 4)
    assert both.code == 2
    assert "--bits is given too" in both.err
    assert run_command(capsys, "sweep", model, "--over", "bits").code == 2
    typo = run_command(capsys, "sweep", model, "--over", "method=gtpq")
    assert typo.code == 2
    assert "unknown method" in typo.err


def test_a_failed_report_write_still_prints_the_table(model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ("sweep", model, "--over", "bits=4", "--method", "rtn", "--windows", 2)
    arguments += ("--samples", 4, "--length", 16, "--window-length", 16, "--report", "s.md")

    def full(*_, **__):
        raise ResourceError("no space")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantforge.cli.evaluate.save_file", full)
        first = run_command(capsys, *arguments)
    assert (first.code, "bits4" in first.out) == (ResourceError.exit_code, True)
    assert run_command(capsys, *arguments).code == 0
    assert "bits4" in (tmp_path / "s.md").read_text()
