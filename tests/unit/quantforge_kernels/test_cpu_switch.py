"""QUANTFORGE_CPU_PROGRAMS=off imports no LLVM and gives the same results up to rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge_kernels.cpu import instruction_sets
from tests.runs import quantize, recipe, run_command

DEMO = Path(__file__).parents[3] / "models" / "demo"
CHILD = """
import json, sys
from pathlib import Path
import torch
from quantforge.cli.app import app
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import DecodingStep, prefill
from quantforge.runtime.load import load

reference, model = sys.argv[1:]
limits = ["--windows", "2", "--length", "32", "--no-speed", "--json"]
app(["eval", reference, model, *limits], standalone_mode=False)
loaded = load(Path(model), dtype=torch.bfloat16)
decoder = Decoder(loaded.model)
cache = decoder.cache(2, 20, "int8")
with torch.inference_mode():
    logits = [prefill(decoder, torch.arange(32).view(2, 16), cache, 4)]
    step = DecodingStep(decoder, cache)
    logits += [step(torch.tensor([300 + token, 400])) for token in range(4)]
llvm = [name for name in sys.modules if name.partition(".")[0] in {"llvmlite", "numba"}]
print(json.dumps({"kernels": loaded.kernels, "llvm": llvm, "logits": torch.stack(logits).tolist()}))
"""


def parse_output(stdout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    *document, last = stdout.splitlines()
    return json.loads("\n".join(document))["models"][1], json.loads(last)


@pytest.mark.thorough
def test_disabled_cpu_programs_give_the_same_results_in_torch(tmp_path, monkeypatch, capsys):
    """Without them in a process of its own, with them in this one: an evaluation, and a few tokens."""
    quantize(DEMO, tmp_path / "m", recipe(bits=4, scales="absmax"))
    arguments = [str(DEMO), str(tmp_path / "m")]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        env=os.environ | {instruction_sets.SWITCH_VARIABLE: "off"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    report, output = parse_output(done.stdout)
    assert output["llvm"] == []
    assert output["kernels"].keys() == {"reference", "dense"}
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    capsys.readouterr()
    exec(CHILD, {})
    other_report, other = parse_output(capsys.readouterr().out)
    assert report["perplexity"] == pytest.approx(other_report["perplexity"], rel=1e-5)
    assert report["kl_mean"] == pytest.approx(other_report["kl_mean"], rel=1e-3)
    if instruction_sets.best_instruction_set() is not None:
        assert other["kernels"].keys() == {"llvm-int", "dense"}
    without, programs = (torch.tensor(each["logits"]) for each in (output, other))
    assert float((without - programs).norm() / programs.norm()) < 0.02  # bfloat16 keeps 8 bits


@pytest.fixture
def switch(monkeypatch):
    """A function that sets the switch; what was found out about the processor is forgotten."""

    def turn(value: str) -> None:
        monkeypatch.setenv(instruction_sets.SWITCH_VARIABLE, value)
        instruction_sets.best_instruction_set.cache_clear()

    yield turn
    instruction_sets.best_instruction_set.cache_clear()


def test_doctor_warns_when_cpu_programs_are_off(switch, capsys):
    def doctor_check() -> dict[str, str]:
        checks = json.loads(run_command(capsys, "doctor", "--json").out)["checks"]
        return next(check for check in checks if check["check"] == "cpu programs")

    switch("off")
    assert doctor_check()["status"] == "WARN"
    assert f"{instruction_sets.SWITCH_VARIABLE}=off" in doctor_check()["detail"]
    switch("")
    best = instruction_sets.best_instruction_set()
    assert doctor_check()["status"] == ("WARN" if best is None else "PASS")
    assert best is None or best in doctor_check()["detail"]


def test_invalid_switch_value_is_refused(switch, capsys):
    switch("no")
    ended = run_command(capsys, "formats")
    assert ended.code == 2
    assert f"{instruction_sets.SWITCH_VARIABLE}=no" in ended.err
    with pytest.raises(ValueError, match="on or off"):
        instruction_sets.best_instruction_set()
