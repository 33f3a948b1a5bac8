"""Progress: every verb that works says where it is, on a terminal, in a log, to machines and to programs."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
import time
from pathlib import Path

import pytest

import quantforge
from quantforge.cli.progress_bar import JsonLineMeter, LineMeter, duration
from quantforge.progress import Progress, phase, report_step, report_to
from tests.conftest import Tiny
from tests.runs import CALIBRATION_ARGUMENTS, run_command

FIELDS = {
    "progress",
    "phase",
    "step",
    "part",
    "done",
    "total",
    "elapsed_seconds",
    "remaining_seconds",
}
EVAL = ("--windows", "4", "--length", "32", "--no-speed")


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("llama-wide")


@pytest.fixture(scope="module")
def made(model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "int4"
    quantforge.quantize(model, method="rtn", bits=4, calibration="none", scales="absmax", out=out)
    return out


# ---- the protocol


def test_phases_share_what_encloses_them_and_shares_never_fall():
    told: list[Progress] = []
    with report_to(told.append), phase("all", 1.0):
        with phase("first", 0.25):
            report_step("a", 1, 2)
            report_step("b", 2, 2)
        with phase("", 1.0, "inside"):
            with report_to(told.append):  # another listener object: a course of its own
                report_step("elsewhere", share=0.1)
            report_step("back", share=0.0)
        report_step("end", share=1.0)
    found = [(one.phase, one.step, round(one.share, 3)) for one in told]
    assert found == [
        ("all", "", 0), ("first", "", 0), ("first", "a", 0.125), ("first", "b", 0.25), ("all", "inside", 0.25),
        ("", "elsewhere", 0.1), ("all", "back", 0.25), ("all", "end", 1),
    ]  # fmt: skip


def test_a_verb_inside_of_a_verb_is_a_part_of_it():
    told: list[Progress] = []
    listener = told.append
    with report_to(listener), phase("outer", 1.0), report_to(listener), phase("inner", 0.5):
        report_step(share=1.0)
    assert told[-1].share == 0.5


def test_nobody_is_told_where_nobody_listens():
    with phase("work", 1.0):
        report_step("step", 1, 2)


# ---- every verb tells a program


def test_every_verb_that_works_tells_where_it_is(model, made, tmp_path):
    def told_by(verb) -> list[Progress]:
        told: list[Progress] = []
        verb(told.append)
        shares = [one.share for one in told]
        assert shares == sorted(shares)
        return told

    def settings(listener):
        return quantforge.Settings(progress=listener)

    found = told_by(
        lambda listener: quantforge.quantize(
            model, method="gptq", bits=4, samples=4, length=16, out=tmp_path / "gptq", settings=settings(listener)
        )
    )  # fmt: skip
    assert {one.phase for one in found} >= {"planning", "reading", "rounding", "publishing"}
    assert "block 0: rounding self_attn.q_proj, self_attn.k_proj, self_attn.v_proj" in [
        one.step for one in found
    ]
    assert [one.part for one in found if one.part] == ["outer", "block 0", "block 1", "head"]
    found = told_by(
        lambda listener: quantforge.export(
            made,
            format="plain",
            out=tmp_path / "plain",
            allow_inexact=True,
            settings=settings(listener),
        )
    )
    assert {one.phase for one in found} >= {"reading", "writing"}
    found = told_by(lambda listener: quantforge.reproduce(made, model, settings(listener)))
    assert "rounding" in {one.phase for one in found}
    found = told_by(lambda listener: quantforge.verify(made, model, progress=listener))
    assert {one.phase for one in found} >= {"verifying", "tensors and logits"}
    found = told_by(lambda listener: quantforge.diff(made, model, progress=listener))
    assert found[-1].done == found[-1].total - 1
    found = told_by(
        lambda listener: quantforge.evaluate(
            model, [made, made, made], settings(listener), windows=2, length=16, speed=False
        )
    )
    assert {one.phase for one in found} >= {f"scoring {model.name}", f"scoring {made.name}"}
    begun = [one.share for one in found if one.phase.startswith("loading") and not one.step]
    assert begun == pytest.approx([0, 0.25, 0.5, 0.75], abs=0.01)  # as much for each model


# ---- a log, machines, silence


def test_a_log_gets_a_line_for_each_phase_and_each_tenth(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(LineMeter, "initial_delay", 0.0)
    told = run_command(
        capsys,
        "quantize",
        model,
        "--method",
        "gptq",
        "--bits",
        "4",
        *CALIBRATION_ARGUMENTS,
        "-o",
        tmp_path / "o",
    ).err
    lines = [re.fullmatch(r"\[(.*?)\] +(\d+)% (\w+).*", line) for line in told.splitlines()]
    found = [(int(match[2]), match[3]) for match in lines if match]
    assert found == sorted(found, key=lambda one: one[0])
    assert [found[0], found[-1]] == [(0, "starting"), (100, "done")]
    assert {"planning", "reading", "rounding", "publishing"} <= {name for _, name in found}
    assert len(found) < 30


def test_work_without_a_phase_is_told_once(capsys, monkeypatch):
    monkeypatch.setattr(LineMeter, "initial_delay", 0.0)
    with LineMeter(str) as lines:
        lines.show(Progress(step="files and digests"))
        time.sleep(0.8)  # three beats
    said = capsys.readouterr().err.splitlines()
    assert [line.split(None, 3)[3] for line in said] == [
        "starting",
        "working: files and digests",
        "done",
    ]


def test_parts_of_work_without_a_phase_get_a_line_for_each_tenth(capsys, monkeypatch):
    monkeypatch.setattr(LineMeter, "initial_delay", 0.0)
    with LineMeter(str) as lines:
        for number in range(100):
            lines.show(Progress(share=number / 100, part=f"tensor {number}"))
    assert len(capsys.readouterr().err.splitlines()) == 12  # with "starting" and "done"


def test_a_part_of_a_run_is_named_for_people_in_words(capsys, monkeypatch):
    monkeypatch.setattr(LineMeter, "initial_delay", 0.0)
    with LineMeter(str) as lines:
        lines.show(Progress(phase="rounding", step="outer"))
    with JsonLineMeter(str) as lines:
        lines.show(Progress(phase="rounding", step="outer"))
    said = capsys.readouterr().err
    assert "rounding: outside of the blocks" in said
    assert '"step": "outer"' in said


def test_machines_get_json_alone(model, made, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    told = run_command(
        capsys, "eval", model, made, *EVAL, "--windows", "5000", "--text", text, "--json", "--json-progress"
    )  # fmt: skip
    lines = [json.loads(line) for line in told.err.splitlines()]
    reports = [line for line in lines if "progress" in line]
    assert all(set(line) == FIELDS for line in reports)
    assert reports[-1]["progress"] == 1
    (note,) = [line["note"] for line in lines if "note" in line]
    assert re.match(r"the text gives \d+ windows of 32 tokens \(at most 5000", note)
    assert json.loads(told.out)["protocol"]["windows_requested"] == 5000
    failed = run_command(capsys, "eval", model, "./absent", "--json-progress")
    assert "absent" in json.loads(failed.err.splitlines()[-1])["error"]["message"]


def test_quiet_is_silent_and_verbose_tells_of_every_part(model, tmp_path, capsys):
    quantize = ("quantize", model, "--method", "rtn", "--calibration", "none", "--bits", "4", "-o")
    assert run_command(capsys, *quantize, tmp_path / "quiet", "-q").err == ""
    told = run_command(capsys, *quantize, tmp_path / "verbose", "-v").err
    assert re.search(r"^outside of the blocks  [\d.]+ s", told, re.MULTILINE)
    assert "outer" not in told
    assert re.search(r"^block 1  err 0\.\d+  [\d.]+ s  peak .* [MG]B$", told, re.MULTILINE)
    assert "peak" not in run_command(capsys, *quantize, tmp_path / "plain").err


def test_swapped_arguments_are_noticed(model, made, capsys):
    told = run_command(capsys, "eval", made, model, *EVAL)
    assert f"quantforge eval {model} {made}" in told.err
    assert "other way" not in run_command(capsys, "eval", model, made, *EVAL).err


# ---- a terminal


def on_a_terminal(*arguments: object) -> tuple[str, int]:
    """Run a command with a terminal for stderr and stdout; return what was drawn."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "80"}
        script = Path(sys.executable).with_name("quantforge")
        os.execv(script, [str(script), *map(str, arguments)])
    drawn = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        drawn += part
    return drawn.decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.thorough
def test_nothing_glues_to_the_bar(model, made, tmp_path):
    """A gate that fails after the work: what follows the bar begins a line of its own, and the bar is gone."""
    drawn, code = on_a_terminal("eval", made, model, *EVAL, "--max-kl", "0")  # swapped: it is noted
    assert code == 6
    assert "━" in drawn
    assert "starting" in drawn
    lines = [
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in re.split(r"[\r\n]+", drawn)
    ]
    assert any(line.startswith(f"{made} is the reference, and it is quantized") for line in lines)
    assert any(line.startswith("error: 1 quality gate(s) failed") for line in lines)
    end = drawn[drawn.rindex("━") :]
    assert "\x1b[2K" in end[: end.index("Quality")]  # the line of the bar was erased
    assert "\x1b[?25h" in end  # and the cursor is back


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (185, "3:05 min"), (7810, "2:10 h")]
)
def test_times_are_for_people(seconds, text):
    assert duration(seconds) == text
