"""Families with layers of several kinds, and mixtures: our artifacts in stock transformers, and what they cost."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantforge import api
from quantforge.architectures.match import Role
from quantforge.formats.open_model import open_model
from quantforge.plans import Plan
from quantforge.recipe import CalibrationOptions, Rule
from quantforge.runtime.load import load
from quantforge.verification.opening import open_source
from quantforge.verification.verify import verify
from tests.conftest import MIXTURES, VOCABULARY, Tiny
from tests.evaluations import evaluate_models, options
from tests.runs import fast_recipe, quantize, recipe
from tests.thorough import mark_others_thorough, thorough_case

STACKED = ("gpt-oss", "granitemoe", "granitemoeshared", "granitemoehybrid", "gemma4-moe")
NOT_LOADED = ("kimi-linear",)  # by transformers, as plan says
ONE_BY_ONE = sorted({*MIXTURES} - {*STACKED, *NOT_LOADED, "mixtral", "qwen3-moe"})
# Kinds of stacks: gate and up interleaved, with biases; one after the other.
STACKS = ("gpt-oss", "granitemoe")
# Latent attention with shared experts; convolutions; linear attention beside a shared expert with a gate of its own.
SINGLE = ("deepseek-v3", "lfm2-moe", "qwen3-next")
BLIND = CalibrationOptions(source="none")
MOST = 3e-5  # logits are about 1; packed experts are multiplied in float32 sums of another order
# linears of three blocks beside the experts, where these are not four in each
DENSE = {"granitemoeshared": 3 * 6, "granitemoehybrid": 14, "gemma4-moe": 7 + 2 * 6}
IDS = torch.arange(48).reshape(1, 48) * 7 % VOCABULARY


def theirs(path: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("method", [thorough_case("rtn"), "gptq"])
def test_convolution_and_attention_layers(tiny: Tiny, tmp_path: Path, method: str) -> None:
    source = tiny("lfm2")
    done = quantize(source, tmp_path / "q", fast_recipe(method, scheme="int8:g32:sym"))
    assert len(done.plan.quantized()) == 2 * (2 + 3) + 2 * (4 + 3)
    with torch.inference_mode():
        ours = load(tmp_path / "q").model(IDS).logits
    assert ours.std() > 0.1
    assert torch.equal(ours, theirs(tmp_path / "q"))
    assert not torch.equal(ours, theirs(source))
    assert verify(tmp_path / "q", source).findings == []
    assert 0 < evaluate_models(source, [tmp_path / "q"], options()).rows[1]["kl_mean"] < 0.002


@pytest.mark.parametrize("family", ["gpt2", thorough_case("openai-gpt")])
def test_matrices_of_conv1d_are_decoded_on_loading(tiny: Tiny, tmp_path: Path, family: str) -> None:
    source = tiny(family)
    wanted = fast_recipe("gptq", scheme="int8:g32:sym", engine="transformers")
    done = quantize(source, tmp_path / "q", wanted)
    assert transformers_says(done.plan) == ""
    with torch.inference_mode():
        ours = load(tmp_path / "q").model(IDS).logits
    assert ours.std() > 0.1
    assert (ours - theirs(tmp_path / "q")).abs().max() <= MOST
    assert not torch.equal(ours, theirs(source))
    assert verify(tmp_path / "q", source).findings == []


def test_convolutions_are_joined_for_transformers(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("kimi-linear")
    wanted = recipe(scheme="int8:g32:sym", engine="transformers", calibration=BLIND)
    done = quantize(source, tmp_path / "q", wanted)
    assert transformers_says(done.plan) == ""
    assert any(
        name.endswith("self_attn.conv1d.weight") for name in open_model(tmp_path / "q").entries
    )
    with torch.inference_mode():
        ours = load(tmp_path / "q").model(IDS).logits
    assert (ours - theirs(tmp_path / "q")).abs().max() <= MOST
    assert verify(tmp_path / "q", source).findings == []


def transformers_says(plan: Plan) -> str:
    verdict = next(v for v in plan.engines if v.engine == "transformers")
    return "" if verdict.loads else verdict.reason


@pytest.mark.parametrize("family", mark_others_thorough(ONE_BY_ONE, *SINGLE))
def test_mixtures_decode_as_transformers_does(tiny: Tiny, tmp_path: Path, family: str) -> None:
    """Experts, shared experts and latent attention are quantized; routers and what weighs experts stay."""
    done = quantize(tiny(family), tmp_path / "q", recipe(scheme="int8:g32:sym", calibration=BLIND))
    assert [event.kind for event in done.events] == []
    assert transformers_says(done.plan) == ""
    with torch.inference_mode():
        ours = load(tmp_path / "q").model(IDS).logits
    assert ours.std() > 0.1
    assert (ours - theirs(tmp_path / "q")).abs().max() <= MOST
    assert not torch.equal(ours, theirs(tiny(family)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "linears", "method"),
    [("mixtral", 16 + 32, "rtn"), ("qwen3-moe", 16 + 23, "awq+gptq")],
)
def test_experts_one_by_one(
    tiny: Tiny, tmp_path: Path, family: str, linears: int, method: str
) -> None:
    source = tiny(family)
    done = quantize(source, tmp_path / "q", fast_recipe(method, scheme="int8:g32:sym"))
    assert (len(done.plan.quantized()), done.plan.peak_memory_bytes > 0) == (linears, True)
    assert done.plan.needs
    assert transformers_says(done.plan) == ""
    loaded = load(tmp_path / "q")
    with torch.inference_mode():
        ours = loaded.model(IDS).logits
    assert ours.std() > 0.1
    assert (ours - theirs(tmp_path / "q")).abs().max() <= MOST
    assert not torch.equal(ours, theirs(source))
    assert list(loaded.events) == []
    assert verify(tmp_path / "q", source).findings == []
    assert 0 < evaluate_models(source, [tmp_path / "q"], options()).rows[1]["kl_mean"] < 0.005


def test_experts_that_the_loader_unrolls_are_taken_one_by_one(tiny: Tiny, tmp_path: Path) -> None:
    """Of several schemes, and one that stays, too; all that stay are one tensor, which it does not take."""
    source = tiny("llama4")
    rules = (Rule("*layers.2*experts.1.*", "int4:g16:sym"), Rule("*layers.3*experts.2.*", "keep"))
    wanted = fast_recipe("gptq", scheme="int8:g16:sym", rules=rules)
    done = quantize(source, tmp_path / "q", wanted)
    assert transformers_says(done.plan) == ""
    with torch.inference_mode():
        ours = load(tmp_path / "q").model(IDS).logits
    assert (ours - theirs(tmp_path / "q")).abs().max() <= MOST
    checked = verify(tmp_path / "q", source, engine="transformers")
    assert checked.findings == []
    stay = recipe(scheme="int8:g16:sym", ignore=("*experts*",), calibration=BLIND)
    kept = quantize(source, tmp_path / "k", stay)
    assert "stored as one tensor" in transformers_says(kept.plan)
    (finding,) = verify(tmp_path / "k", source, engine="transformers").findings
    assert "experts.0.down_proj.weight" in finding.detail


@pytest.mark.parametrize(("ignore", "loads"), [((), False), (("*self_attn*",), True)])
def test_rows_of_queries_that_an_engine_reorders_are_not_packed_for_it(
    tiny: Tiny, ignore: tuple[str, ...], loads: bool
) -> None:
    wanted = recipe(scheme="int8:g32:sym", ignore=ignore)
    made = {item.engine: item for item in api.plan(str(tiny("llama4")), wanted).engines}
    assert (made["vllm"].loads, "reorders the rows" in made["vllm"].reason) == (loads, not loads)
    assert not made["sglang"].loads


@pytest.mark.parametrize("family", mark_others_thorough(STACKED, STACKS[0]))
def test_stacked_experts_are_rounded_one_by_one(tiny: Tiny, tmp_path: Path, family: str) -> None:
    """Every expert is a tensor of its own; what stock transformers does not join is said, and decoded here rightly."""
    source = tiny(family)
    done = quantize(source, tmp_path / "q", recipe(scheme="int8:g32:sym", calibration=BLIND))
    dense = DENSE.get(family, 3 * 4)
    assert len(done.plan.quantized()) == dense + 3 * 4 * 3
    assert [event.kind for event in done.events] == []
    assert "stacked in one tensor" in transformers_says(done.plan)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    decoded = open_source(tmp_path / "q", one_by_one=True)
    model_layout = decoded.model_layout
    for tensor in (item for item in model_layout.tensors if item.role is Role.LINEAR):
        if tensor.expert >= 0:
            place = model_layout.expert_slice(tensor)
            stack = f"{model_layout.block_name(tensor.block)}.{place.stack.parameter}"
            own = place.view(model.get_parameter(stack).data)
        else:
            own = model.get_parameter(tensor.name).data
        value = decoded.weight(tensor.name)
        assert value is not None
        assert 0 < (value - own).abs().max() <= own.abs().max() / 100
        own.copy_(value)
    with torch.inference_mode():
        expected, ours = model(IDS).logits, load(tmp_path / "q").model(IDS).logits
    assert (ours - expected).abs().max() <= MOST
    assert verify(tmp_path / "q", source).findings == []
    assert 0 < evaluate_models(source, [tmp_path / "q"], options()).rows[1]["kl_mean"] < 0.005


@pytest.mark.parametrize("family", ["deepseek-v32", "gpt-oss"])
def test_transforms_and_feedback_work_on_all_experts(
    tiny: Tiny, tmp_path: Path, family: str
) -> None:
    """An indexer that stays takes the factors of its norm; experts of a stack are calibrated one by one."""
    source = tiny(family)
    done = quantize(source, tmp_path / "q", fast_recipe("awq+gptq", scheme="int8:g32:sym"))
    assert done.plan.needs
    assert {event.kind for event in done.events} == {"few-calibration-tokens", "expert-few-tokens"}
    report = verify(tmp_path / "q", source)
    assert report.findings == []
    with torch.inference_mode():
        ours = load(tmp_path / "q").model(IDS).logits
    if not transformers_says(done.plan):
        assert (ours - theirs(tmp_path / "q")).abs().max() <= MOST


@pytest.mark.parametrize("family", mark_others_thorough(STACKED, STACKS[0]))
def test_stacked_experts_that_stay_remain_stacked(tiny: Tiny, tmp_path: Path, family: str) -> None:
    source = tiny(family)
    rest = fast_recipe("gptq", scheme="int8:g32:sym", ignore=("*experts*",))
    done = quantize(source, tmp_path / "q", rest)
    assert len(done.plan.quantized()) == DENSE.get(family, 3 * 4)
    assert "low-coverage" not in {event.kind for event in done.events}
    assert transformers_says(done.plan) == ""
    with torch.inference_mode():
        assert torch.equal(load(tmp_path / "q").model(IDS).logits, theirs(tmp_path / "q"))
    assert verify(tmp_path / "q", source).findings == []


def test_experts_that_stay_beside_packed_layers_are_not_joined(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("mixtral")
    rest = fast_recipe("awq+gptq", scheme="int8:g32:sym", ignore=("*experts*",))
    done = quantize(source, tmp_path / "rest", rest)
    assert len(done.plan.quantized()) == 3 * 4
    assert "joins packed experts alone" in transformers_says(done.plan)
    assert verify(tmp_path / "rest", source).findings == []
