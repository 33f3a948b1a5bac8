"""Decisions of plans are shown before the work, equal ones of several plans once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantforge.files.reader import open_checkpoint
from quantforge.planning.planner import make_plan
from quantforge.plans import decisions, decisions_by_plan
from quantforge.recipe import Recipe
from tests.conftest import Tiny
from tests.runs import CALIBRATION_ARGUMENTS, run_command

RELEASE = """model = "{model}"
[calibration]
length = 16
[[variant]]
name = "int4"
method = "gptq"
effort = "low"
scheme = "int4:g32"
[[variant]]
name = "int3"
method = "gptq"
effort = "low"
scheme = "int3:g128"
"""


def test_equal_decisions_of_several_plans_are_merged(tiny: Tiny) -> None:
    plan = make_plan(Recipe(scheme="int4:g128", tune=0), open_checkpoint(tiny("llama"))).plan
    other = make_plan(Recipe(method="rtn", scheme="int4:g32"), open_checkpoint(tiny("llama"))).plan
    chosen, *substitution_notes = decisions(plan)
    assert chosen.startswith("chosen: --method ")
    assert all(note.startswith("substitution: ") for note in substitution_notes)
    assert substitution_notes
    assert decisions_by_plan({"a": plan, "b": other})[0] == f"a: {chosen}"
    assert decisions_by_plan({"a": plan, "b": plan})[0] == f"all 2: {chosen}"
    five = dict.fromkeys("abcde", plan)
    assert decisions_by_plan(five | {"f": other})[0] == f"a, b, c and 2 more: {chosen}"
    assert decisions_by_plan({"f": other}) == []


@pytest.mark.parametrize("more", [("--dry-run",), ()])
def test_a_release_reports_decisions(
    tiny: Tiny, tmp_path: Path, capsys: Any, more: tuple[str, ...]
) -> None:
    spec = tmp_path / "release.toml"
    spec.write_text(RELEASE.format(model=tiny("llama")))
    result = run_command(capsys, "release", spec, "-o", tmp_path / "out", *more)
    assert result.code == 0, result.err
    assert "all 2: chosen: calibration.samples = 32: --effort low" in result.err
    assert "int3: substitution: " in result.err
    if more:
        output = run_command(capsys, "release", spec, "-o", tmp_path / "out", *more, "--json")
        first, second = json.loads(output.out)["variants"]
        assert first["decisions"] == ["chosen: calibration.samples = 32: --effort low"]
        assert len(second["decisions"]) > 1
    else:
        again = run_command(capsys, "release", spec, "-o", tmp_path / "out")
        assert "chosen" not in again.err  # nothing is left to make


def test_a_sweep_reports_decisions(tiny: Tiny, tmp_path: Path, capsys: Any) -> None:
    result = run_command(
        capsys, "sweep", tiny("llama"), "--over", "scheme=int4:g128,int3:g32", "--method", "rtn", "--format",
        "compressed-tensors", "-o", tmp_path / "out", "--windows", "1", "--window-length", "16", *CALIBRATION_ARGUMENTS,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "substitution: " in result.err.partition("variants")[0]
