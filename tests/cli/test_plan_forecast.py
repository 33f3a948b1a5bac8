"""What `plan` says of a run beside its result: time, disk, memory, each with its basis, and what is missing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from quantforge import settings
from quantforge.api import output
from quantforge.cli import plan_summary
from tests import headers
from tests.runs import CALIBRATION_ARGUMENTS, run_command

GPTQ = ("--method", "gptq", "--bits", "4", "--tune", "0", "--threads", "1")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
    return headers.llama(tmp_path_factory.mktemp("llama") / "m", **changes)


def entries(text: str) -> dict[str, str]:
    pairs = (line.partition("  ") for line in text.splitlines())
    return {name: said.strip() for name, _, said in pairs}


def test_a_plan_says_time_reads_and_disk_with_their_basis(llama, capsys):
    told = entries(run_command(capsys, "plan", llama, *GPTQ).out)
    assert told["time"].startswith("about ")
    assert " on 1 thread: pass " in told["time"]
    assert "GFLOP/s" in told["by"]
    assert "recorded on" in told["by"]
    assert told["source"].endswith("read 2 times, never copied")
    assert "more with --activations disk" in told["disk"]
    assert told["disk"].endswith("are free there")
    assert (
        "hidden states, "
        in entries(run_command(capsys, "plan", llama, *GPTQ, "--activations", "disk").out)["disk"]
    )


def test_what_the_machine_lacks_is_said_with_what_to_type(llama, capsys, monkeypatch):
    assert "beyond" not in run_command(capsys, "plan", llama, *GPTQ).out or os.environ.get("CI")
    monkeypatch.setattr(plan_summary, "free_bytes", lambda _: 10**9)
    monkeypatch.setattr(plan_summary, "memory_bytes", lambda: 10**9)
    told = run_command(capsys, "plan", llama, *GPTQ)
    assert told.code == 0
    lines = [line for line in told.out.splitlines() if line.startswith("beyond")]
    assert len(lines) == 2
    assert lines[0].endswith("-o on another disk")
    assert "--activations disk, fewer --samples" in lines[1]
    found = json.loads(run_command(capsys, "plan", llama, *GPTQ, "--json").out)["forecast"]
    assert found["beyond"] == ["disk", "memory"]
    assert found["total_seconds"] == pytest.approx(sum(found["seconds"].values()), rel=0.01)


def test_a_run_says_it_too(tiny, tmp_path, capsys, monkeypatch):
    words = ("quantize", tiny("llama-wide"), "--method", "gptq", *CALIBRATION_ARGUMENTS)
    monkeypatch.setattr(output, "memory_bytes", lambda: 10**6)
    told = run_command(capsys, *words, "-o", tmp_path / "a")
    assert told.code == 0
    assert "memory: a peak of" in told.err
    assert "this machine has 1.00 MB" in told.err
    monkeypatch.setattr("quantforge.files.stage.free_bytes", lambda _: 1000)
    refused = run_command(capsys, *words, "-o", tmp_path / "b")
    assert refused.code == 7
    assert "hint: free space in" in refused.err


def test_an_export_that_moves_codes_has_no_forecast(tiny, tmp_path, capsys):
    made = run_command(
        capsys,
        "quantize",
        tiny("llama-wide"),
        "--method",
        "rtn",
        "--scales",
        "absmax",
        "-o",
        tmp_path / "a",
    )
    assert made.code == 0, made.err
    words = ("export", tmp_path / "a", "--format", "plain", "-o", tmp_path / "b", "--dry-run")
    assert json.loads(run_command(capsys, *words, "--json").out)["forecast"] is None
    assert "\ntime " not in run_command(capsys, *words).out


def test_memory_is_that_of_the_machine():
    found = settings.memory_bytes()
    assert found is None or 10**8 < found < 10**15
