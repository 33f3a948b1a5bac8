"""Triton kernels compile for an H100 with the expected loads and instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[3] / "kernels" / "bench" / "compiled.py"
VARIANTS = [
    "int4 row, exponents",
    "int4 row, assembly",
    "int4 rows",
    "fp8 x fp8",
    "attention, int4",
]
TABLES = ["table row", "table rows"]
BYTES = ["e5m2 row", "nvfp4 row", "q2_k row"]  # parameters, or weights, that are taken out of bytes


GROUPED = ["int4 row, grouped", "int4 rows, grouped, 16", "int4 rows, grouped, 64"]


def compile_kernels(*words):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *words]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr[-2000:]
    return json.loads(output.stdout)


@pytest.fixture(scope="module")
def compiled():
    return compile_kernels("--only", *VARIANTS, *GROUPED, *TABLES, *BYTES)


@pytest.mark.thorough
def test_every_gpu_kernel_compiles():
    """What the interpreter lets pass, a compiler may not: types of masked values, shapes of products."""
    compiled = compile_kernels()
    kinds = (
        "row",
        "rows",
        "decode",
        "x int8",
        "x fp8",
        "attention",
        "norm",
        "rotary",
        "gate",
        "splits",
    )
    assert all(any(kind in name for name in compiled) for kind in kinds)
    assert all(variant["loads"] for variant in compiled.values())


def test_weights_are_read_sixteen_bytes_at_a_time(compiled):
    """Eight rows of 1024 columns are 4096 bytes: 8 loads of 16 bytes by 32 threads."""
    for name in VARIANTS[:2]:
        assert compiled[name]["loads"][".v4.b32"] == 8
        # x, two bytes each, and a scale per row and 16 bytes of codes; nothing is read byte by byte
        assert ".b8" not in compiled[name]["loads"]
    assert compiled["int4 rows"]["loads_of_16_bytes"] > 0
    assert compiled["fp8 x fp8"]["loads_of_16_bytes"] > 0


def test_grouped_kernels_use_the_same_inner_loops(compiled):
    """Where its owner's weights lie is all that a program has to find out; nothing is added to a weight's cost."""
    pairs = [("int4 row, assembly", "int4 row, grouped"), ("int4 rows", "int4 rows, grouped, 16")]
    for alone, grouped in pairs:
        for key in ("loads_of_16_bytes", "lop3_in_ptx", "tensor_cores", "shared_bytes"):
            assert compiled[grouped][key] == compiled[alone][key]
        figures = [compiled[name]["instructions_per_weight"] for name in (alone, grouped)]
        assert None in figures or figures[1] < 1.05 * figures[0]
    assert compiled["int4 rows, grouped, 64"]["tensor_cores"]


def test_inline_assembly_is_used_in_one_variant_only(compiled):
    assert compiled[VARIANTS[0]]["lop3_in_ptx"] == 0
    assert compiled[VARIANTS[1]]["lop3_in_ptx"] == 256  # one per field of 8 rows x 4 words x 8


def test_few_instructions_per_weight(compiled):
    """At 3 per weight the instructions of an H100 take as long as reading 4 bits: more is too slow."""
    figure = compiled[VARIANTS[1]]["instructions_per_weight"]
    if figure is not None:
        assert 2 < figure < 3.6


def test_several_rows_use_tensor_cores(compiled):
    assert [compiled[name]["tensor_cores"] for name in VARIANTS] == [False, False, True, True, True]


def test_codebook_lookup_needs_no_layout_change(compiled):
    """Words that are moved to another layout for it cost thrice the instructions, and shared memory."""
    row, rows = (compiled[name] for name in TABLES)
    assert row["shared_bytes"] < 1 << 10
    assert rows["shared_bytes"] < 24 << 10
    figures = row["instructions_per_weight"], rows["instructions_per_weight"]
    assert None in figures or (3 < figures[0] < 6 and 5 < figures[1] < 9)


def test_byte_parameters_cost_few_instructions(compiled):
    for name in BYTES:
        figure = compiled[name]["instructions_per_weight"]
        if figure is not None:
            assert 3 < figure < 8
    # One byte of scales for every 16 weights, and in pairs one for 32: of 256 weights a thread.
    assert compiled["nvfp4 row"]["loads"][".b8"] == 16
