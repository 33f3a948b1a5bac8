"""Allocation for mixtures of experts: errors per expert and one scheme per layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantforge import api
from quantforge.architectures.match import match_tensors
from quantforge.errors import RefusedError
from quantforge.files.reader import open_checkpoint
from quantforge.planning.allocation import Allocated
from quantforge.planning.gradient_options import refuse_guide
from quantforge.settings import Settings
from tests.runs import interrupt_measurement

SCHEMES = ("int3:g32:sym", "int4:g32:sym", "int8:g32:sym")
ROWS = {"samples": 2, "length": 32, "calibration": "builtin"}


def allocated(model, target="4.6bpw", out=None, threads=1, **options) -> Allocated:
    return api.allocate(
        model, target, out, settings=Settings(threads=threads),
        **{"candidates": SCHEMES, **ROWS, **options},
    )  # fmt: skip


@pytest.fixture(scope="module")
def allocation(tiny):
    return allocated(tiny("qwen3-moe"))


def experts_of(groups):
    return [group for group in groups if any(".experts." in name for name in group)]


def test_experts_of_a_layer_share_one_scheme_in_the_rules(tiny, allocation):
    model = tiny("qwen3-moe")
    groups = experts_of(allocation.groups)
    assert [len(group) for group in groups] == [12, 12]  # 4 experts of 3 matrices in 2 layers
    plan = api.plan(model, allocation.recipe)
    assert plan.output_bytes == allocation.nbytes
    assert 0.99 * 4.6 <= allocation.bits <= 4.6
    schemes = {t.name.removesuffix(".weight"): str(t.scheme.weight) for t in plan.quantized()}
    for group, chosen in zip(allocation.groups, allocation.chosen, strict=True):
        assert {schemes[name].removesuffix(":f32") for name in group} == {chosen}


def test_transformers_target_gets_one_scheme_for_all_experts(tiny):
    allocation = allocated(tiny("qwen3-moe"), engine="transformers")
    assert [len(group) for group in experts_of(allocation.groups)] == [24]
    assert next(engine.loads for engine in allocation.engines if engine.engine == "transformers")


def test_gguf_experts_may_have_a_type_per_stacked_matrix(tiny):
    allocation = allocated(tiny("mixtral"), "4.9bpw", format="gguf", candidates=("q4_0", "q5_0"))
    groups = experts_of(allocation.groups)
    assert [len(group) for group in groups] == [4] * 9
    assert all(len({name.rpartition(".")[2] for name in group}) == 1 for group in groups)
    assert api.plan(tiny("mixtral"), allocation.recipe).output_bytes == allocation.nbytes


@pytest.mark.thorough
def test_expected_divergence_is_near_the_measured_one(tiny, tmp_path):
    """To second order, and on another text: within a factor of two. It is 1.3 for a dense model of this size."""
    model, rows = tiny("gpt-oss"), {**ROWS, "samples": 48, "length": 64}
    expected = allocated(model, "6bpw", candidates=SCHEMES[::2], **rows).uniform[SCHEMES[0]][2]
    api.quantize(model, None, tmp_path / "out", method="gptq", scheme=SCHEMES[0], **rows)
    result = api.evaluate(model, [tmp_path / "out"], windows=4, length=64, speed=False)
    assert 0.5 < result.rows[1]["kl_mean"] / expected < 2


@pytest.mark.thorough
def test_threads_and_interruptions_give_the_same_allocation(
    tiny, allocation, tmp_path, monkeypatch
):
    model = tiny("qwen3-moe")
    interrupt_measurement(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        allocated(model, out=tmp_path / "mixed.toml")
    monkeypatch.undo()
    again = allocated(model, out=tmp_path / "mixed.toml", threads=2)
    assert again == allocation


def test_allocate_refuses_experts_without_stacks(tiny):
    checkpoint = open_checkpoint(tiny("qwen3-moe"))
    model_layout = match_tensors(
        checkpoint.config, [e.to_stored_tensor() for e in checkpoint.entries.values()]
    )
    tensors = api.plan(tiny("qwen3-moe"), method="gptq", scheme=SCHEMES[1], **ROWS).tensors
    refuse_guide(1, ("gptq",), tensors, model_layout, "allocate", "no")
    other = replace(
        model_layout, layers=tuple(replace(kind, stacks=()) for kind in model_layout.layers)
    )
    with pytest.raises(RefusedError, match="allocate: the model has experts"):
        refuse_guide(1, ("gptq",), tensors, other, "allocate", "no")
