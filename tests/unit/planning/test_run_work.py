"""Estimated work of a run from shapes alone, also for models of a trillion weights."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trillion_plan
from quantforge import api
from quantforge.planning.run_work import BYTES_PER_SECOND, OPERATIONS_PER_SECOND, seconds_of
from quantforge.plans import Plan, RunWork
from quantforge.recipe import CalibrationOptions, GptqOptions, Recipe
from quantforge.settings import Settings
from tests import headers
from tests.thorough import thorough_case

TOKENS = 128 * 512
LARGE = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
LARGER = {
    **LARGE, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128
}  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return headers.llama(tmp_path_factory.mktemp("large") / "m", **LARGE)


def plan_run(model: Path, method: str, **values: Any) -> Plan:
    settings = Settings(threads=1, activations=values.pop("activations", "memory"))
    return api.plan(str(model), Recipe(method=method, **{"bits": 4, "tune": 0, **values}), settings)


def work_of_run(model: Path, method: str, **values: Any) -> RunWork:
    run_work = plan_run(model, method, **values).work
    assert run_work is not None
    return run_work


def test_rtn_work_is_reading_and_rounding(large: Path) -> None:
    run_work = work_of_run(large, "rtn", scales="absmax")
    assert run_work.operations.keys() == {"round"}
    assert run_work.source_bytes == (large / "model.safetensors").stat().st_size
    assert (run_work.source_reads, run_work.states_bytes, run_work.guide_bytes) == (2, 0, 0)
    searched = work_of_run(large, "rtn").operations["round"]
    assert searched > run_work.operations["round"]
    table = work_of_run(large, "rtn", format="bnb", scheme="nf4:g64:sym", bits=None)
    assert table.operations["round"] > 2 * searched


def test_gptq_work_counts_passes_and_hessian_products(large: Path) -> None:
    run_work = work_of_run(large, "gptq")
    hidden, ffn, layers, kv = 8192, 28672, 80, 1024
    block = 2 * hidden**2 + 2 * kv * hidden + 3 * ffn * hidden
    products = 2 * TOKENS * layers * block
    assert products < run_work.operations["pass"] < 1.2 * products
    assert run_work.operations["observe"] == 2 * TOKENS * layers * (3 * hidden**2 + ffn**2)
    assert run_work.states_bytes == 4 * TOKENS * hidden
    sweeps = work_of_run(large, "gptq", gptq=GptqOptions(refine=4))
    assert sweeps.operations["round"] > 1.3 * run_work.operations["round"]
    few = work_of_run(large, "gptq", calibration=CalibrationOptions(samples=32))
    assert few.operations["observe"] == run_work.operations["observe"] / 4
    guided = work_of_run(large, "gptq", guided_hessians=2)
    assert guided.source_reads == 4
    assert guided.guide_bytes > 0
    assert guided.operations["pass"] > 2 * run_work.operations["pass"]
    tried = work_of_run(large, "awq+gptq").operations
    assert tried["search"] > run_work.operations["pass"] / 10
    assert tried["round"] == run_work.operations["round"]


def test_threads_divide_operations_but_not_reading(large: Path) -> None:
    run_work = work_of_run(large, "gptq")
    single, two = seconds_of(run_work, 1), seconds_of(run_work, 2)
    assert (single["pass"], single["read"]) == (2 * two["pass"], two["read"])
    assert single["pass"] == run_work.operations["pass"] / OPERATIONS_PER_SECOND
    assert single["read"] == 2 * run_work.source_bytes / BYTES_PER_SECOND


def test_extra_gptq_passes_of_3_bits_are_counted(large: Path) -> None:
    once, twice = (work_of_run(large, "gptq", bits=bits).operations["round"] for bits in (4, 3))
    assert 1.05 < twice / once < 2


def test_estimated_work_grows_with_the_model(large: Path, tmp_path: Path) -> None:
    larger = headers.llama(tmp_path / "larger", **LARGER)
    for method in ("rtn", "gptq", "awq"):
        first, second = (
            work_of_run(large, method).operations,
            work_of_run(larger, method).operations,
        )
        for step in first:
            assert 4 < second[step] / first[step] < 16, (method, step)


@pytest.mark.parametrize("tiles", [False, thorough_case(True)])
def test_expert_work_counts_only_routed_tokens(tmp_path: Path, tiles: bool) -> None:
    """Two layers with the shape of Kimi K2, in sparse files; a plan reads only headers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trillion_plan, "LAYERS", 2)
        patch.setattr(trillion_plan, "CONFIG", {**trillion_plan.CONFIG, "num_hidden_layers": 2})
        trillion_plan.written(tmp_path / "m", tiles=tiles)
    tracemalloc.start()
    gptq = plan_run(tmp_path / "m", "gptq")
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert gptq.work is not None
    experts = 3 * 384 * 2048 * 7168
    dense = sum(
        2 * TOKENS * tensor.shape[0] * tensor.shape[-1]
        for tensor in gptq.tensors
        if tensor.block >= 0 and tensor.expert < 0 and len(tensor.shape) > 1
    )
    routed = 2 * TOKENS * experts * 8 / 384
    assert dense + routed < gptq.work.operations["pass"] < 1.3 * (dense + routed)
    every = CalibrationOptions(expert_tokens="all")
    assert work_of_run(tmp_path / "m", "gptq", calibration=every).operations["pass"] > 20 * routed
    source = sum(file.stat().st_size for file in (tmp_path / "m").glob("*.safetensors"))
    assert gptq.work.source_bytes == source
    awq = work_of_run(tmp_path / "m", "awq").operations
    assert (
        awq["observe"] > gptq.work.operations["observe"] / 10
    )  # of experts, by which factors are judged
