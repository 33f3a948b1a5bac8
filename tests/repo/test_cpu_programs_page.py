"""docs/cpu-programs.md: its examples run, and the code that it shows is the code that is printed."""

from __future__ import annotations

import doctest
import re

import pytest

from quantforge_kernels.cpu import instruction_sets, program_cache
from scripts import show_program
from scripts.structure import PACKAGES, ROOT

PAGE = ROOT / "docs" / "cpu-programs.md"
KERNELS = PACKAGES["quantforge_kernels"]


@pytest.mark.skipif(
    instruction_sets.best_instruction_set() is None, reason="for processors with AVX2"
)
def test_examples_run(monkeypatch):
    monkeypatch.setenv(program_cache.CACHE_VARIABLE, "")
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 15
    assert result.failed == 0


def test_code_is_what_is_printed():
    spec, _, parameters = show_program.random_weight(4, 128, "centre")
    printed = show_program.llvm_code(show_program.program_spec(spec, parameters, "avx512vnni"))
    shown = re.findall(r"```llvm\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(shown) == 2
    assert all(part in printed for part in shown)


def test_files_that_are_named_exist():
    named = set(re.findall(r"`(cpu/\w+\.py|\w+\.py)`", PAGE.read_text()))
    assert len(named) > 10
    there = {path.name for path in KERNELS.rglob("*.py")}
    assert {name.removeprefix("cpu/") for name in named} <= there
