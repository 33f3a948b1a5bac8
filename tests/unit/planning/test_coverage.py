"""Coverage of a plan: unquantized experts, routers and families that engines do not load are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import api
from quantforge.architectures.routers import expert_counts, find_routers
from quantforge.errors import InputError, RefusedError
from quantforge.events import Policy
from quantforge.planning.coverage import coverage
from quantforge.plans import Action, Plan
from quantforge.recipe import Recipe, Rule
from quantforge.runtime.load import load
from quantforge.settings import Settings
from tests.runs import run_command

H, EXPERTS = 64, 4
ATTENTION = {f"self_attn.{name}_proj.weight": (H, H) for name in "qkvo"}
PER_EXPERT = {
    f"mlp.experts.{number}.{name}_proj.weight": (H, H)
    for number in range(EXPERTS)
    for name in ("gate", "up", "down")
}
STACKED = {
    "mlp.experts.gate_up_proj": (EXPERTS, H, 2 * H),
    "mlp.experts.down_proj": (EXPERTS, H, H),
}


def write_model(
    folder: Path, block: dict[str, tuple[int, ...]], model_type: str = "novel_moe", **config: object
) -> Path:
    folder.mkdir()
    tensors = {
        "model.embed_tokens.weight": (320, H),
        "lm_head.weight": (320, H),
        "model.norm.weight": (H,),
    }
    for index in range(2):
        tensors |= {
            f"model.layers.{index}.{name}": shape for name, shape in {**ATTENTION, **block}.items()
        }
    filled = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in tensors.items()}
    save_file(filled, folder / "model.safetensors", {"format": "pt"})
    settings = {
        "model_type": model_type,
        "hidden_size": H,
        "num_hidden_layers": 2,
        "vocab_size": 320,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def plan_model(model: Path, **values: object) -> Plan:
    return api.plan(str(model), Recipe(scheme="int4:g32", scales="absmax", **values))


def test_unquantized_experts_are_a_low_coverage_event(tmp_path, capsys):
    model = write_model(
        tmp_path / "m", STACKED | {"mlp.router.weight": (EXPERTS, H)}, num_local_experts=EXPERTS
    )
    (event,) = plan_model(model).substitutions
    assert event.kind == "low-coverage"
    assert "24.9% of the weights inside blocks are quantized" in event.detail
    assert "model.layers.*.mlp.experts.gate_up_proj (131,072 bytes)" in event.detail
    result = run_command(capsys, "plan", model, "--scheme", "int4:g32")
    assert "coverage         24.9%" in result.out
    document = json.loads(run_command(capsys, "plan", model, "--scheme", "int4:g32", "--json").out)
    assert document["quantized_share_in_blocks"] == pytest.approx(0.249, abs=1e-3)
    assert (
        document["unquantized_in_blocks"]["model.layers.*.mlp.experts.down_proj"]
        == 2 * EXPERTS * H * H * 2
    )
    strict = run_command(
        capsys, "quantize", model, "--scheme", "int4:g32", "--strict", "-o", tmp_path / "o"
    )
    assert (strict.code, "--allow low-coverage=1" in strict.err) == (4, True)


def test_layers_kept_on_request_give_no_event(tmp_path):
    model = write_model(tmp_path / "m", PER_EXPERT, num_experts=EXPERTS)
    assert plan_model(model).substitutions == ()
    assert plan_model(model, ignore=("*experts*",)).substitutions == ()
    assert plan_model(model, rules=(Rule("down_proj", "keep"),)).substitutions == ()
    declared = Path(__file__).parents[3] / "models" / "demo"
    assert api.plan(str(declared), Recipe(bits=4)).substitutions == ()


@pytest.mark.parametrize(
    ("router", "rows", "config"),
    [
        ("mlp.gate.wg", EXPERTS, {"num_experts": EXPERTS}),
        ("mlp.chooser", EXPERTS, {"n_routed_experts": EXPERTS}),
        ("feed_forward.select", EXPERTS, {"moe_num_experts": [EXPERTS, EXPERTS]}),
        ("mlp.shared_expert_gate", 1, {"num_local_experts": EXPERTS}),
    ],
)
def test_routers_are_kept_whatever_their_name(router, rows, config, tmp_path):
    model = write_model(tmp_path / "m", PER_EXPERT | {f"{router}.weight": (rows, H)}, **config)
    unquantized = {
        tensor.name for tensor in plan_model(model).tensors if tensor.action is Action.KEEP
    }
    assert f"model.layers.1.{router}.weight" in unquantized
    assert not any("experts.0" in name or "self_attn" in name for name in unquantized)


def test_shared_experts_are_not_mistaken_for_routers():
    """Two matrices of that shape, and attention matrices, are not routers."""
    shapes = {"l.0.mlp.shared.gate_proj.weight": (512, 64), "l.0.mlp.shared.up_proj.weight": (512, 64),
              "l.0.self_attn.q_proj.weight": (512, 64), "l.0.mlp.gate.weight": (512, 64)}  # fmt: skip
    assert find_routers({"num_experts": 512, "num_experts_per_tok": 10}, shapes) == {
        "l.0.mlp.gate.weight"
    }
    assert find_routers({"num_experts_per_tok": 512}, shapes) == set()
    assert expert_counts({"num_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 3}) == {8}


def test_exporting_a_quantized_router_is_an_event(tmp_path):
    """The artifact is made with a configuration that does not count the experts."""
    model = write_model(tmp_path / "m", PER_EXPERT | {"mlp.chooser.weight": (EXPERTS, H)})
    recipe = Recipe(scheme="int4:g32", scales="absmax")
    api.quantize(str(model), recipe, tmp_path / "a", Settings())
    config = json.loads((tmp_path / "a" / "config.json").read_text()) | {"num_experts": EXPERTS}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedError, match="router-quantized"):
        api.export(str(tmp_path / "a"), Recipe(format="plain"), tmp_path / "b",
                        Settings(policy=Policy(strict=True, allow={"inexact": 99})), allow_inexact=True)  # fmt: skip


def test_exports_report_low_coverage_like_the_first_run(tmp_path, capsys):
    """Experts that could not be quantized are an event of every export; those kept on request are not."""
    stacked = write_model(tmp_path / "m", STACKED, num_local_experts=EXPERTS)
    api.quantize(
        str(stacked), Recipe(scheme="int4:g32", scales="absmax"), tmp_path / "a", Settings()
    )
    result = run_command(capsys, "export", tmp_path / "a", "--format", "gptq", "-o", tmp_path / "b")
    assert "25.0% of the weights inside blocks are quantized" in result.err
    assert "event low-coverage x1" in result.err
    document = json.loads(
        run_command(
            capsys, "export", tmp_path / "a", "--format", "awq", "-o", tmp_path / "c", "--json"
        ).out
    )
    assert document["quantized_share_in_blocks"] == pytest.approx(0.25)
    assert [event["kind"] for event in document["events"]] == ["low-coverage"]
    strict = run_command(
        capsys, "export", tmp_path / "a", "--format", "gptq", "--strict", "-o", tmp_path / "d"
    )
    assert (strict.code, "low-coverage" in strict.err) == (4, True)
    plain = run_command(
        capsys,
        "export",
        tmp_path / "a",
        "--format",
        "plain",
        "-o",
        tmp_path / "e",
        "--allow-inexact",
    )
    assert (plain.code, "low-coverage" in plain.err) == (0, False)


@pytest.mark.parametrize(
    "choices", [{"ignore": ("*experts*",)}, {"rules": (Rule("*experts*", "keep"),)}]
)
@pytest.mark.parametrize("block", [PER_EXPERT, STACKED], ids=["each", "stacked"])
def test_kept_experts_give_no_event_in_runs_and_exports(block, choices, tmp_path):
    model = write_model(tmp_path / "m", block, num_experts=EXPERTS)
    recipe = Recipe(scheme="int4:g32", scales="absmax", **choices)
    assert api.quantize(str(model), recipe, tmp_path / "a", Settings()).events == ()
    for number, format_key in enumerate(("gptq", "compressed-tensors")):  # the second of the first
        source, out = tmp_path / "ab"[number], tmp_path / "bc"[number]
        outcome = api.export(
            str(source), Recipe(format=format_key), out, Settings(policy=Policy(strict=True))
        )
        assert outcome.events == ()
        assert outcome.coverage.share == pytest.approx(4 / 16 if block is PER_EXPERT else 0.25)


def test_small_expert_stacks_are_an_event_and_towers_named(tmp_path):
    few = {"mlp.experts.down_proj": (EXPERTS, 2, 2)}
    wide = {"mlp.up_proj.weight": (64 * H, H)}
    (event,) = plan_model(
        write_model(tmp_path / "m", few | wide, num_local_experts=EXPERTS)
    ).substitutions
    assert (
        "99.9% of the weights inside blocks are quantized" in event.detail
        or "100.0%" in event.detail
    )
    assert "experts.down_proj (64 bytes)" in event.detail
    block = {"q_proj.weight": (H, H), "blocks.0.fc.weight": (H, H)}
    tower = write_model(
        tmp_path / "t", block, text_config={"num_hidden_layers": 2}, seen_config={"depth": 1}
    )
    tensors = load_file(tower / "model.safetensors")
    tensors |= {
        f"model.sam.blocks.{i}.fc.weight": torch.ones(H, H, dtype=torch.bfloat16) for i in range(3)
    }
    save_file(tensors, tower / "model.safetensors", {"format": "pt"})
    covered = coverage(plan_model(tower).tensors)
    assert (covered.share, dict(covered.kept), dict(covered.outside_blocks)) == (
        1.0,
        {},
        {"model.sam.blocks": 3 * H * H * 2},
    )
    assert str(covered).endswith("; of other parts stay model.sam.blocks (24,576 bytes)")


def test_rules_for_routers_or_experts_are_refused_or_noted(tmp_path):
    block = {"mlp.router.weight": (EXPERTS, H), "mlp.shared.up_proj.weight": (H, H)}
    model = write_model(tmp_path / "m", STACKED | block, num_local_experts=EXPERTS)
    for pattern in ("router", "*experts.down_proj", "re:.*experts.*"):
        with pytest.raises(
            InputError, match=r"no layer that can be rounded, but model\.layers\.0\.mlp"
        ):
            plan_model(model, rules=(Rule(pattern, "int8:row"),))
    plan = plan_model(model, rules=(Rule("*.mlp.*", "int8:row"),))
    (note,) = (note for note in plan.notes if "rule" in note and "also means" in note)
    assert "and 5 more: routers and experts" in note
    assert {str(t.scheme.weight.grid) for t in plan.quantized() if "shared" in t.name} == {"int8"}
    assert plan_model(
        model,
        rules=(Rule("*q_proj", "int8:row"), Rule("k_proj", "int8:row"), Rule("v_proj", "int8:row")),
    )


@pytest.mark.parametrize("family", ["ernie4_5_vl_moe", "longcat_flash", "qianfan_ocr"])
def test_unloadable_families_are_refused_for_their_engine(family, tmp_path, capsys):
    model = write_model(tmp_path / "m", PER_EXPERT, family, num_experts=EXPERTS)
    verdicts = {verdict.engine: verdict for verdict in plan_model(model).engines}
    assert not verdicts["transformers"].loads
    assert f"{family} does not load" in verdicts["transformers"].reason
    result = run_command(capsys, "plan", model, "--scheme", "int4:g32", "--for", "transformers")
    assert (result.code, family in result.err) == (4, True)


@pytest.mark.parametrize("family", ["mamba2", "falcon"])
def test_families_decoded_on_loading_need_one_scheme(family, tmp_path):
    model = write_model(tmp_path / "m", PER_EXPERT, family, num_experts=EXPERTS)

    def loading_verdict(**options):
        return {v.engine: v for v in plan_model(model, **options).engines}["transformers"]

    alone = loading_verdict()
    assert (alone.loads, "no memory is saved" in alone.reason) == (None, True)
    mixed = loading_verdict(
        rules=(Rule("*q_proj", "int8:row"), Rule("k_proj", "int8:row"), Rule("v_proj", "int8:row"))
    )
    assert (mixed.loads, "first scheme alone" in mixed.reason) == (False, True)


def test_families_with_fused_loading_need_the_engine_option(tmp_path):
    model = write_model(tmp_path / "m", PER_EXPERT, "bailing_hybrid", num_experts=EXPERTS)
    (verdict,) = (v for v in plan_model(model).engines if v.engine == "transformers")
    assert (verdict.loads, "--for transformers" in verdict.reason) == (False, True)


@pytest.mark.parametrize(("block", "scheme", "format_key", "loads"), [
    (PER_EXPERT, "nf4", "bnb", False), (PER_EXPERT, "int8:row", "bnb", False), (STACKED, "nf4", "bnb", True),
    (PER_EXPERT, "int4:g32", "compressed-tensors", True),
])  # fmt: skip
def test_transformers_loads_experts_only_if_it_can_fuse_them(
    block, scheme, format_key, loads, tmp_path
):
    model = write_model(tmp_path / "m", block, num_experts=EXPERTS)
    plan = api.plan(str(model), Recipe(scheme=scheme, format=format_key, scales="absmax"))
    (verdict,) = (item for item in plan.engines if item.engine == "transformers")
    assert (verdict.loads is not False, "joins" in verdict.reason) == (loads, not loads)


@pytest.mark.parametrize(("family", "config"), [
    ("flex_olmo", {"num_experts": EXPERTS, "pad_token_id": 0, "num_attention_heads": 4, "num_key_value_heads": 4,
               "intermediate_size": H}),
    ("falcon", {"num_attention_heads": 4}),
])  # fmt: skip
def test_incomplete_or_extra_tensors_are_refused_by_name(family, config, tmp_path):
    model = write_model(tmp_path / "m", PER_EXPERT, family, **config)

    def quantized_and_loaded():  # what is missing is missed first, what is left over when it is loaded
        recipe = Recipe(scheme="int4:g32", scales="absmax")
        api.quantize(str(model), recipe, tmp_path / "a", Settings())
        load(tmp_path / "a")

    pattern = (
        r"(are in no file|have no place in the model), first: model\.|model\.\S+: not a tensor of"
    )
    with pytest.raises(InputError, match=pattern):
        quantized_and_loaded()


def test_coverage_names_large_tensors_outside_the_blocks(tiny):
    text = str(coverage(plan_model(tiny("gemma4")).tensors))
    assert "of other parts stay model.embed_tokens_per_layer (" in text
    assert "embed_tokens (" not in text
    assert "of other parts" not in str(coverage(plan_model(tiny("llama")).tensors))
