"""Experts removed by saliency: an ordinary smaller checkpoint, the right experts gone, before any rounder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantforge import api
from quantforge.api.reproduce import reproduce
from quantforge.artifacts import manifest
from quantforge.errors import InputError, QuantForgeError, RefusedError, UsageError
from quantforge.execution.expert_saliency import expert_saliency
from quantforge.files.reader import open_checkpoint
from quantforge.files.without_experts import format_removed, parse_removed, plan_pruning
from quantforge.runtime.load import load
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from scripts.demo_text import calibration_text, evaluation_text
from tests.conftest import VOCABULARY, Tiny
from tests.runs import (
    CALIBRATION,
    StopError,
    crash_after,
    file_digests,
    quantize,
    recipe,
    run_command,
)
from tests.thorough import mark_others_thorough

DEMO = Path(__file__).parents[2] / "models/demo-moe"
ROWS = torch.randint(0, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(5))


def removed(out: Path) -> dict[int, tuple[int, ...]]:
    document = manifest.read_manifest(out)
    assert document is not None
    return dict(parse_removed(document["source"]["removed_experts"]))


@pytest.mark.parametrize(
    "family",
    mark_others_thorough(
        ["qwen2-moe", "olmoe", "deepseek-v2", "ernie4-5-moe", "gpt-oss", "granitemoe", "lfm2-moe"],
        *("ernie4-5-moe", "gpt-oss"),
    ),
)
def test_a_smaller_checkpoint_that_everyone_loads(tiny: Tiny, tmp_path: Path, family: str) -> None:
    model, out = tiny(family), tmp_path / "p"
    wanted = recipe(format="plain", prune_experts="25%")
    plan = api.plan(str(model), wanted)
    assert [t.shape for t in quantize(model, out, wanted).plan.tensors] == [
        t.shape for t in plan.tensors
    ]
    gone = removed(out)
    assert all(len(experts) == 1 for experts in gone.values())
    assert verify(out, model).findings == []
    loaded, info = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    shrunk = 0
    for name, value in loaded.state_dict().items():
        old = before[name]
        if value.shape != old.shape:
            layer = int(name.split("layers.")[1].split(".")[0])
            kept = [number for number in range(4) if number not in gone[layer]]
            axis = next(i for i in range(old.dim()) if old.shape[i] != value.shape[i])
            old, shrunk = old.index_select(axis, torch.tensor(kept)), shrunk + 1
        assert torch.equal(value, old), name
    assert shrunk >= 3 * len(gone)
    ours = load(out).model(ROWS[:1]).logits
    theirs = loaded(ROWS[:1]).logits
    assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)


def test_saliency_is_the_mean_weighted_norm_of_what_an_expert_returns(tiny: Tiny) -> None:
    path = tiny("qwen2-moe")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    expected: dict[int, list[float]] = {}

    def watch(index: int, module: Any) -> None:
        forward = module.forward

        def seen(states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            found = []
            for number in range(4):
                token, place = (chosen == number).nonzero(as_tuple=True)
                ones = torch.ones(len(token), 1)
                alone = forward(states[token], torch.full((len(token), 1), number), ones)
                norms = alone.norm(dim=1) * weights[token, place]
                found.append(float(norms.mean()) if len(token) else 0.0)
            expected[index] = found
            return forward(states, chosen, weights)

        module.forward = seen

    for index in (0, 2):
        watch(index, model.model.layers[index].mlp.experts)
    with torch.no_grad():
        model(ROWS)
    found = expert_saliency(open_checkpoint(path), ROWS, CALIBRATION, "cpu")
    assert found.keys() == expected.keys()
    for index, values in expected.items():
        assert found[index] == pytest.approx(values, rel=1e-4)
        assert len(set(found[index])) == 4


def test_those_that_do_least_go_from_every_group(tiny: Tiny) -> None:
    pruning = plan_pruning(open_checkpoint(tiny("qwen2-moe")), "50%")
    assert (pruning.num_experts, pruning.removed_per_group, pruning.layers) == (4, 2, (0, 2))
    saliency = {0: [3.0, 1.0, 2.0, 4.0], 2: [1.0, 1.0, 1.0, 0.5]}
    assert pruning.choose_experts(saliency) == {0: (1, 2), 2: (2, 3)}  # of equal ones the later
    grouped = replace(pruning, num_groups=2, removed_per_group=1)
    assert grouped.choose_experts(saliency) == {0: (1, 2), 2: (1, 3)}
    assert parse_removed(
        format_removed(pruning.choose_experts(saliency))
    ) == pruning.choose_experts(saliency)
    with pytest.raises(InputError, match="removed_experts"):
        parse_removed("0: 1, 2")


def test_it_is_said_wherever_people_look(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out, blocks = tiny("mixtral"), tmp_path / "p", tmp_path / "b.gguf"
    words = ("--prune-experts", "25%", "--samples", 4, "--length", 16)
    made = run_command(capsys, "quantize", model, "--format", "plain", *words, "-o", out)
    assert "source kept experts: 3 of 4 in each layer\n" in made.err
    assert "kept experts: 3 of 4 in each layer\n" in run_command(capsys, "inspect", out).out
    _, card = (out / "README.md").read_text().split("\n---\n")
    assert f"# {model.name} with 3 of 4 experts in each layer (plain)\n" in card
    assert f"`{model.name}` with 3 of 4 experts in each layer, stored in the format" in card
    assert f"1. `{model.name}` with 3 of 4 experts in each layer: " in card
    name, wanted = f"{model.name}-3of4experts", recipe(prune_experts="25%", format="plain")
    assert api.plan(str(model), wanted).name == f"{name}-plain"
    asked = recipe("gptq", scheme="int4:g32:sym", prune_experts="25%")
    assert api.plan(str(model), asked).name == f"{name}-gptq-int4-g32"
    assert api.plan(str(out), recipe(scheme="int4:g32:sym")).name == f"{name}-rtn-int4-g32"
    again = recipe(prune_experts="34%", format="plain")
    assert api.plan(str(out), again).name == f"{name}-2of3experts-plain"
    moved = api.export(out, type="Q8_0", out=blocks)
    assert moved.plan.name == f"{name}-Q8_0.gguf"
    run_command(capsys, "quantize", model, "--type", "Q8_0", *words, "-o", tmp_path / "own.gguf")
    assert name.encode() in (tmp_path / "own.gguf").read_bytes()[:4096]


@pytest.mark.thorough
def test_before_a_rounder_and_after_a_crash(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3-moe")
    wanted = recipe("gptq", scheme="int4:g32:sym", prune_experts="50%")
    quantize(model, tmp_path / "a", wanted, threads=1)
    with pytest.raises(StopError):
        quantize(model, tmp_path / "b", wanted, progress=crash_after("block 0 expert 1"))
    quantize(model, tmp_path / "b", wanted, threads=2, activations="disk")
    assert file_digests(tmp_path / "a") == file_digests(tmp_path / "b")
    assert json.loads((tmp_path / "a/config.json").read_text())["num_local_experts"] == 2
    assert verify(tmp_path / "a", model).findings == []
    assert reproduce(tmp_path / "a", str(model), Settings()).differing == ()
    path = tmp_path / "a" / manifest.NAME
    said = format_removed(removed(tmp_path / "a"))
    other = format_removed(
        {layer: (0, 1) if gone != (0, 1) else (2, 3) for layer, gone in parse_removed(said).items()}
    )
    path.write_text(path.read_text().replace(said, other))
    assert {f.check for f in verify(tmp_path / "a", model).findings} >= {"unquantized-changed"}


@pytest.mark.parametrize(
    ("family", "values", "error", "said"),
    [
        ("llama", {}, UsageError, "no experts"),
        ("qwen2-moe", {"prune_experts": "20%"}, UsageError, "experts 20%: that is none of 4"),
        (
            "qwen2-moe",
            {"prune_experts": "75%"},
            RefusedError,
            "experts 75%: 1 expert would be left",
        ),
        (
            "qwen2-moe",
            {"prune_experts": ".75"},
            RefusedError,
            "experts .75: 1 expert would be left",
        ),
        ("qwen2-moe", {"prune_experts": "140%"}, InputError, "140%"),
        ("qwen2-moe", {"prune_experts": "a quarter"}, InputError, "prune_experts"),
        ("deepseek-v3", {"prune_experts": "50%"}, RefusedError, "would be left"),
        ("qwen2-moe", {"calibration": replace(CALIBRATION, source="none")}, UsageError, "a text"),
    ],
)
def test_what_cannot_be_is_refused(
    tiny: Tiny, tmp_path: Path, family: str, values: dict[str, Any], error: type[QuantForgeError], said: str
) -> None:  # fmt: skip
    with pytest.raises(error, match=said):
        quantize(
            tiny(family),
            tmp_path / "p",
            recipe(format="plain", **{"prune_experts": "25%", **values}),
        )
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_experts_per_tok", "two"), ("topk_group", "1"), ("topk_group", [1]), ("n_group", True)],
)
def test_groups_and_counts_of_wrong_types_are_named(tiny: Tiny, key: str, value: object) -> None:
    checkpoint = open_checkpoint(tiny("deepseek-v3"))
    config = {**checkpoint.config, "n_group": 2, "topk_group": 1, key: value}
    with pytest.raises(InputError, match=key):
        plan_pruning(replace(checkpoint, config=config), "50%")


@pytest.mark.thorough
def test_on_a_trained_mixture_saliency_beats_chance(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(calibration_text())
    (tmp_path / "other.txt").write_text(evaluation_text())
    calibration = replace(CALIBRATION, source=str(tmp_path / "text.txt"), samples=16, length=256)
    out, chance = tmp_path / "p", tmp_path / "chance"
    wanted = recipe(format="plain", prune_experts="25%", calibration=calibration)
    quantize(DEMO, out, wanted)
    generator = torch.Generator().manual_seed(3)
    kept = {layer: torch.randperm(8, generator=generator)[:6].sort().values for layer in range(3)}
    _without(kept, chance)
    measured = api.evaluate(
        DEMO, [out, chance], text=str(tmp_path / "other.txt"), windows=4, length=256, speed=False
    )
    ours, random = (float(row["kl_mean"]) for row in measured.rows[1:])
    assert ours < 0.8 * random


def _without(kept: dict[int, torch.Tensor], out: Path) -> None:
    """Write the demo mixture with some experts, by another way than the product's."""
    from safetensors.torch import save_file

    found = {}
    for name, value in load_file(DEMO / "model.safetensors").items():
        parts = name.split(".")
        if name.endswith("mlp.gate.weight"):
            found[name] = value[kept[int(parts[2])]].contiguous()
        elif "experts" in parts:
            places = kept[int(parts[2])].tolist()
            if int(parts[5]) in places:
                parts[5] = str(places.index(int(parts[5])))
                found[".".join(parts)] = value
        else:
            found[name] = value
    out.mkdir()
    for path in DEMO.iterdir():
        if path.suffix == ".json":
            (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((DEMO / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "num_experts": 6}))
    save_file(found, out / "model.safetensors", {"format": "pt"})
