"""Families with layers of several kinds, and mixtures: our artifacts in stock transformers, and what they cost."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantforge import verbs
from quantforge.errors import RefusedError
from quantforge.evaluation.evaluate import evaluate
from quantforge.plans import Plan
from quantforge.recipe import CalibrationOptions
from quantforge.runtime.load import load
from quantforge.verification.verify import VerificationOptions, verify
from tests.conftest import VOCABULARY, Tiny
from tests.evaluations import options
from tests.runs import quantize, recipe

IDS = torch.arange(48).reshape(1, 48) * 7 % VOCABULARY


def theirs(path: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_convolution_and_attention_layers(tiny: Tiny, tmp_path: Path, method: str) -> None:
    source = tiny("lfm2")
    done = quantize(source, tmp_path / "q", recipe(method, scheme="int8:g32:sym"))
    assert len(done.plan.quantized()) == 2 * (2 + 3) + 2 * (4 + 3)
    with torch.inference_mode():
        ours = load(tmp_path / "q").model(IDS).logits
    assert ours.std() > 0.1
    assert torch.equal(ours, theirs(tmp_path / "q"))
    assert not torch.equal(ours, theirs(source))
    assert verify(tmp_path / "q", VerificationOptions(source)).findings == []
    assert 0 < evaluate(source, [tmp_path / "q"], options()).rows[1]["kl_mean"] < 0.002


def transformers_says(plan: Plan) -> str:
    verdict = next(v for v in plan.engines if v.engine == "transformers")
    return "" if verdict.loads else verdict.reason


@pytest.mark.parametrize(("family", "linears"), [("mixtral", 16 + 32), ("qwen3-moe", 16 + 23)])
def test_experts_one_by_one_are_rounded_without_data(
    tiny: Tiny, tmp_path: Path, family: str, linears: int
) -> None:
    source = tiny(family)
    done = quantize(source, tmp_path / "q", recipe(scheme="int8:g32:sym"))
    assert (len(done.plan.quantized()), done.plan.peak_memory_bytes > 0) == (linears, True)
    assert any("all layers are rounded without data" in note for note in done.plan.notes)
    assert transformers_says(done.plan) == ""
    loaded = load(tmp_path / "q")
    with torch.inference_mode():
        ours = loaded.model(IDS).logits
    assert ours.std() > 0.1
    assert torch.equal(ours, theirs(tmp_path / "q"))
    assert not torch.equal(ours, theirs(source))
    assert [event.kind for event in loaded.events] == ["kernel-fallback"]
    assert verify(tmp_path / "q", VerificationOptions(source)).findings == []
    assert 0 < evaluate(source, [tmp_path / "q"], options()).rows[1]["kl_mean"] < 0.005


def test_stacked_experts_stay_and_the_rest_is_calibrated(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("gpt-oss")
    done = quantize(source, tmp_path / "q", recipe("gptq", scheme="int8:g32:sym"))
    assert len(done.plan.quantized()) == 3 * 4
    said = {event.kind: event.detail for event in done.events}
    assert "19.8% of the weights inside blocks are quantized" in said["coverage"]
    with torch.inference_mode():
        assert torch.equal(load(tmp_path / "q").model(IDS).logits, theirs(tmp_path / "q"))
    assert verify(tmp_path / "q", VerificationOptions(source)).findings == []


def test_what_needs_the_inputs_of_single_experts_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    source = str(tiny("mixtral"))
    for wanted in (
        recipe("gptq", scheme="int8:g32:sym"),
        recipe("awq", scheme="int8:g32:sym"),
        recipe(scheme="W8A8_STATIC"),
        recipe(scheme="int8:g32:sym", kv_cache="fp8"),
    ):
        with pytest.raises(RefusedError, match=r"single experts .* they are 80% of"):
            verbs.plan(source, wanted)
    rest = recipe("awq+gptq", scheme="int8:g32:sym", ignore=("*experts*",))
    done = quantize(Path(source), tmp_path / "rest", rest)
    assert len(done.plan.quantized()) == 3 * 4
    assert "joins packed experts alone" in transformers_says(done.plan)
    assert verify(tmp_path / "rest", VerificationOptions(Path(source))).findings == []


def test_a_mixture_in_gguf_does_not_claim_importance(tiny: Tiny) -> None:
    """The keys of a file name the text whose importance it knows; here nothing was observed."""
    source = str(tiny("mixtral"))
    wanted = recipe(format="gguf", type="Q4_K_M")
    blind = verbs.plan(source, wanted)
    without = verbs.plan(source, replace(wanted, calibration=CalibrationOptions(source="none")))
    assert blind.output_bytes == without.output_bytes
    assert "all layers are rounded without data" in str(blind.notes)
    assert "all layers are rounded without data" not in str(without.notes)


def test_rounded_inputs_of_experts_are_not_run(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("mixtral")
    quantize(source, tmp_path / "q", recipe(scheme="W8A8"))
    report = verify(tmp_path / "q", VerificationOptions(source))
    assert report.findings == []
    assert report.skipped["logits"] == "the runtime does not round the inputs of experts"
    with pytest.raises(RefusedError, match="inputs of experts are rounded"):
        load(tmp_path / "q")
