"""Interruptions of commands: one line, and a promise that is true."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quantforge.cli.app import RESUMABLE_VERBS, Stopped
from tests.runs import run_command
from tests.thorough import parametrize_each_value


def test_the_page_names_the_verbs_that_an_interruption_does_not_cost():
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    told = (
        page.partition("### After a signal")[2].partition("## Events")[0].partition("All other")[0]
    )
    assert RESUMABLE_VERBS | {"export", "eval"} == {*re.findall(r"`([a-z]+)`", told)}


INTERRUPTED_AT = """
import importlib.abc, os, runpy, signal, sys

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

module = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupts())
sys.argv[1:1] = ["plan", "./absent"]
runpy.run_module("quantforge", run_name="__main__", alter_sys=True)
"""


@parametrize_each_value(
    ("module", ["quantforge.cli", "typer", "quantforge.api.sweep"]),
    ("more, said", [((), "stopped\n"), (("--json-progress",), '{"note": "stopped"}\n')]),
)
def test_an_interruption_while_it_starts_is_one_line(module, more, said):
    words = [sys.executable, "-c", INTERRUPTED_AT, module, *more]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", said)


@pytest.mark.parametrize(
    ("verb", "said"), [("quantize", "goes on behind what it had finished"), ("plan", "begins anew")]
)
def test_what_an_interrupted_command_promises_is_true(verb, said, model, monkeypatch, capsys):
    def stop(*_: object, **__: object) -> None:
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(f"quantforge.api.{verb}", stop)
    told = run_command(capsys, verb, model, "--bits", "4")
    assert told.code == 130
    assert told.err.endswith(f"stopped; the same command again {said}\n")


def test_a_signal_that_compiled_code_has_made_an_error_of_its_own_is_a_signal(
    model, monkeypatch, capsys
):
    def stop(*_: object, **__: object) -> None:
        raise SystemError("returned a result with an exception set") from Stopped(signal.SIGINT)

    monkeypatch.setattr("quantforge.api.quantize", stop)
    told = run_command(capsys, "quantize", model, "--bits", "4")
    assert (told.code, told.err) == (
        130,
        "stopped; the same command again goes on behind what it had finished\n",
    )


@pytest.mark.parametrize(
    ("quantized", "said"), [(False, "goes on behind what it had finished"), (True, "begins anew")]
)
def test_an_interrupted_export_goes_on_where_it_rounds(
    quantized, said, model, tmp_path, monkeypatch, capsys
):
    def stop(*_: object, **__: object) -> None:
        raise Stopped(signal.SIGINT)

    module = sys.modules[importlib.import_module("quantforge.api").export.__module__]
    place = tmp_path / "made"
    if quantized:
        rounded = ("--method", "rtn", "--scales", "absmax", "--scheme", "int4:g32:sym")
        assert run_command(capsys, "quantize", model, *rounded, "-o", place).code == 0
    monkeypatch.setattr(module, "quantize_opened", stop)
    monkeypatch.setattr(module, "check_values", stop)
    told = run_command(
        capsys, "export", place if quantized else model, "--format", "gptq", "-o", tmp_path / "x"
    )
    assert told.code == 130
    assert told.err.endswith(f"stopped; the same command again {said}\n")
