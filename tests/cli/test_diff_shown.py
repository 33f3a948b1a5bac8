"""What `diff` prints of many differences: so many, and how many more there are."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from quantforge.cli.console import Console
from quantforge.cli.diff import MAX_LISTED, _show
from quantforge.cli.verify import _show as show_report
from quantforge.verification.difference import Difference
from quantforge.verification.findings import Report
from tests.runs import run_command

DEMO = Path(__file__).parents[2] / "models/demo"


def test_what_is_left_out_is_counted(capsys):
    many = {f"t{number}": float(number) for number in range(MAX_LISTED + 3)}
    only = {"first": [f"x{number}" for number in range(MAX_LISTED + 2)], "second": []}
    models = {"first": Path("a"), "second": Path("b")}
    found = Difference(
        **models, recorded_differences={}, unmatched_tensors=only, tensors=many, files=["a.json", "b.json"],
        compared=len(many), unmatched_files={"first": [], "second": ["b.json"]}, missing_records={}, uncompared=[],
    )  # fmt: skip
    _show(Console(), found)
    said = capsys.readouterr().out
    assert f"t{MAX_LISTED - 1} " in said
    assert f"t{MAX_LISTED} " not in said
    assert "dB: signal to noise of the decoded values, larger is closer" in said
    assert "and 3 more, closer than these" in said
    assert "only in the first: 2 more" in said
    assert "differs: the file a.json" in said
    assert "only the second has the file b.json" in said


def test_an_exact_export_is_said_to_be_equal(capsys):
    def said(*decibels: float) -> str:
        tensors = [{"name": "w", "snr_db": one, "scheme": "int4"} for one in decibels]
        found = Report(path=Path("a"), model_type="", format="plain", tensors=tensors)
        show_report(Console(), found, strict=False)
        return capsys.readouterr().out

    assert "2 tensors compared; all equal" in said(math.inf, math.inf)
    assert "the noisiest is w at 9.0 dB" in said(math.inf, 9.0)


def test_what_one_side_does_not_state_is_told_once_and_of_which_side(capsys):
    stated = {
        "config.dtype": ["bfloat16", None],
        "manifest.method": [None, "awq"],
        "manifest.source": [None, {"model": "wren"}],
        "recipe.bits": [4, 3],
        "recipe.awq": [{"points": 20, "clip": [1, 2]}, None],
    }
    models = {"first": Path("a"), "second": Path("b")}
    found = Difference(
        **models, recorded_differences=stated, unmatched_tensors={}, tensors={}, files=[], compared=1,
        unmatched_files={}, missing_records={"first": ["manifest"], "second": []}, uncompared=[],
    )  # fmt: skip
    _show(Console(), found)
    said = capsys.readouterr().out
    assert said.splitlines()[:5] == [
        "first: a",
        "second: b",
        "config.dtype: bfloat16 | not stated",
        "manifest: the first has none, so what was done cannot be compared",
        "recipe.bits: 4 | 3",
    ]
    assert "recipe.awq: points 20, clip 1, 2 | not stated" in said
    assert "None" not in said
    assert "{" not in said


def test_one_field_that_a_recipe_lacks_is_not_told_as_no_recipe(capsys):
    stated = {"recipe.tune": [None, 0]}
    models = {"first": Path("a"), "second": Path("b")}
    found = Difference(
        **models, recorded_differences=stated, unmatched_tensors={}, tensors={}, files=[], compared=1,
        unmatched_files={}, missing_records={"first": [], "second": []}, uncompared=[],
    )  # fmt: skip
    _show(Console(), found)
    assert capsys.readouterr().out.splitlines()[2] == "recipe.tune: not stated | 0"


def test_words_too_many_are_answered_with_an_option(capsys):
    assert "--compare MODEL" in run_command(capsys, "generate", DEMO, "Explain", "json.").err
    assert "the result is an option: -o" in run_command(capsys, "quantize", DEMO, "out").err


def test_every_field_that_differs_has_its_line(capsys):
    source = {"model": "wren", "files": {"a.json": {"bytes": 5, "sha256": 64 * "a"}, "same": 1}}
    other = {
        "model": "lark",
        "files": {"a.json": {"bytes": 5, "sha256": 64 * "b"}, "same": 1, "new": {"bytes": 7}},
    }
    stated = {
        "manifest.source": [source, other],
        "config.rope": [{"f": {str(n): n for n in range(MAX_LISTED + 3)}}, {"f": {}}],
    }
    models = {"first": Path("a"), "second": Path("b")}
    found = Difference(
        **models,
        recorded_differences=stated,
        unmatched_tensors={},
        tensors={},
        files=[],
        compared=1,
        unmatched_files={},
        missing_records={},
        uncompared=[],
    )
    _show(Console(), found)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines[:3] == [
        "manifest.source, model: wren | lark",
        f"manifest.source, files, a.json, sha256: {12 * 'a'} | {12 * 'b'}",
        "manifest.source, files, new: not stated | bytes 7",
    ]
    assert lines[3] == "config.rope, f, 0: 0 | not stated"
    assert "config.rope: 3 more fields differ (--json lists all)" in lines


def test_what_another_container_cannot_hold_is_no_difference(tmp_path, capsys):
    model = tmp_path / "demo"
    shutil.copytree(DEMO, model)
    assert (
        run_command(capsys, "export", model, "--type", "BF16", "-o", tmp_path / "d.gguf").code == 0
    )
    for pair in ((model, tmp_path / "d.gguf"), (tmp_path / "d.gguf", model)):
        ended = run_command(capsys, "diff", *pair)
        assert ended.code == 0
        assert "not compared, since a GGUF file holds no such files" in ended.out
        assert "tokenizer.json" in ended.out
        assert "differs:" not in ended.out
        told = json.loads(run_command(capsys, "diff", *pair, "--json").out)
        assert {"tokenizer.json", "tokenizer_config.json"} <= {*told["files_not_compared"]}
        assert (told["equal"], told["files"]) == (True, [])
    (model / "chat_template.jinja").write_text("{{ messages }}")
    run_command(capsys, "export", model, "--type", "BF16", "-o", tmp_path / "t.gguf")
    assert run_command(capsys, "diff", model, tmp_path / "t.gguf").code == 0
    (model / "chat_template.jinja").write_text("{{ other }}")
    ended = run_command(capsys, "diff", model, tmp_path / "t.gguf")
    assert (ended.code, "differs: the file chat_template.jinja" in ended.out) == (5, True)
