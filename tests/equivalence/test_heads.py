"""Heads that predict further tokens, as files hold them: kept, rounded plainly or dropped; declared and derived."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantforge import api
from quantforge.api.reproduce import reproduce
from quantforge.architectures.draft_heads import find_draft_head_tensors, without_draft_heads
from quantforge.artifacts import manifest
from quantforge.errors import InputError, QuantForgeError, RefusedError, UsageError
from quantforge.plans import Action, StoredTensor
from quantforge.runtime.load import load
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from scripts import tiny_families
from tests.conftest import VOCABULARY, Tiny, tiny_tokenizer
from tests.runs import fast_recipe, quantize, recipe
from tests.thorough import mark_others_thorough

IDS = torch.randint(0, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(5))
# How files hold a head: where its layer lies, other tensors of it, the key that counts it.
LAYOUTS = {
    "behind": ("model.layers.{layers}", ("{at}.eh_proj", "{at}.shared_head.head"), "num_nextn_predict_layers"),
    "mtp": ("mtp.layers.0", ("mtp.fc",), "mtp_num_hidden_layers"),
    "ernie": ("model.mtp_block.0", ("model.mtp_linear_proj.0",), "num_nextn_predict_layers"),
    "mimo": ("model.mtp_layers.0", ("model.mtp_layers.0.input_proj",), "num_nextn_predict_layers"),
}  # fmt: skip
CASES = [
    ("deepseek-v3", "behind"),
    ("ernie4-5-moe", "ernie"),
    ("qwen3", "mimo"),
    ("qwen3_next", "mtp"),
]
Make = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def with_head(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that adds a head to a tiny model: a copy of its last layer with an own matrix before it."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, layout: str) -> Path:
        if (family, layout) not in made:
            out = tmp_path_factory.mktemp(family) / "m"
            if "_" in family:  # not declared
                source = tiny_families.write(family, out.parent / "plain", tiny_tokenizer())
            else:
                source = tiny(family)
            made[family, layout] = _written(source, out, layout)
        return made[family, layout]

    return make


def _written(source: Path, out: Path, layout: str) -> Path:
    tensors: dict[str, Tensor] = {}
    for path in source.glob("*.safetensors"):
        tensors |= load_file(path)
    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    at, matrices, key = LAYOUTS[layout]
    at = at.format(layers=layers)
    last = f"model.layers.{layers - 1}."
    head = {
        f"{at}.{name.removeprefix(last)}": value.clone()
        for name, value in tensors.items()
        if name.startswith(last)
    }
    hidden = config["hidden_size"]
    dtype = next(iter(tensors.values())).dtype
    for text in matrices:
        rows = config["vocab_size"] if text.endswith("head") else hidden
        name = f"{text.format(at=at)}.weight"
        head[name] = torch.randn(rows, 2 * hidden if rows == hidden else hidden).to(dtype)
    head[f"{at}.enorm.weight"] = torch.ones(hidden, dtype=dtype)
    out.mkdir()
    for path in source.iterdir():
        if "safetensors" not in path.name:
            (out / path.name).write_bytes(path.read_bytes())
    (out / "config.json").write_text(json.dumps({**config, key: 1}))
    save_file({**tensors, **head}, out / "model.safetensors", {"format": "pt"})
    return out


def heads_in(path: Path) -> set[str]:
    """Tensors of heads in files, by a rule of its own."""
    config = json.loads((path / "config.json").read_text())
    behind = rf"model\.layers\.{config['num_hidden_layers']}\."
    names = [name for file in path.glob("*.safetensors") for name in load_file(file)]
    return {name for name in names if re.match(rf"{behind}|mtp|model\.mtp", name)}


@pytest.mark.parametrize(("family", "layout"), mark_others_thorough(CASES, ("qwen3", "mimo")))
def test_kept_rounded_or_dropped(with_head: Make, tmp_path: Path, family: str, layout: str) -> None:
    model = with_head(family, layout)
    before = heads_in(model)
    source = load_file(model / "model.safetensors")
    logits = []
    # A head is rounded plainly whatever its layers are: one layout goes with a calibrated run.
    method = fast_recipe("gptq") if layout == "mtp" else recipe("rtn", scales="absmax")
    for mtp in ("keep", "quantize", "drop"):
        out = tmp_path / mtp
        wanted = replace(method, scheme="int4:g32:sym", mtp=mtp)
        plan = api.plan(str(model), wanted)
        made = quantize(model, out, wanted).plan
        assert [t.outputs for t in made.tensors] == [t.outputs for t in plan.tensors]
        after, stored = heads_in(out), load_file(out / "model.safetensors")
        said = [note for note in plan.notes if "predict further tokens" in note]
        assert len(said) == 1
        assert f"{len(before)} tensors" in said[0]
        assert f"{sum(source[name].nbytes for name in before):,} bytes" in said[0]
        rounded = {t.name for t in made.quantized()} & before
        if mtp == "keep":
            assert after == before
            assert all(torch.equal(stored[name], source[name]) for name in before)
        elif mtp == "quantize":
            assert rounded
            assert all(re.search(r"attn|mlp", name) for name in rounded)
            assert not any(
                re.search(r"mlp\.gate\.|norm|eh_proj|fc|head|linear_proj", n) for n in rounded
            )
            copies = [t for t in made.quantized() if t.block == max(t.block for t in made.tensors)]
            assert len(rounded) == len(copies)  # as many as in the layer that it is a copy of
            ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
            matrices = {
                n for n in before - rounded if n.endswith(".weight") and source[n].dim() == 2
            }
            kept = {n.removesuffix(".weight") for n in matrices}
            assert kept <= set(ignored)
            assert not {name.removesuffix(".weight") for name in rounded} & set(ignored)
        else:
            assert not after
            config = json.loads((out / "config.json").read_text())
            assert config[LAYOUTS[layout][2]] == 0
            document = manifest.read_manifest(out)
            assert document is not None
            assert f"{len(before)} tensors" in document["source"]["dropped_heads"]
        runs = mtp == "keep"  # the others compute the same logits
        assert verify(out, model, forward=runs).findings == []
        logits.append(load(out).model(IDS).logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.thorough
def test_dropped_ones_are_reproduced_and_a_damaged_one_is_seen(
    with_head: Make, tmp_path: Path
) -> None:
    model = with_head("glm4-moe", "behind")
    for mtp in ("quantize", "drop"):
        out = tmp_path / mtp
        quantize(model, out, recipe("rtn", scheme="int4:g32:sym", mtp=mtp))
        assert reproduce(out, str(model), Settings()).differing == ()
    quantize(model, tmp_path / "keep", recipe("rtn", scheme="int4:g32:sym"))
    values = load_file(tmp_path / "keep/model.safetensors")
    name = next(name for name in values if name.endswith("eh_proj.weight"))
    values[name] = values[name].roll(1, 0)
    save_file(values, tmp_path / "keep/model.safetensors", {"format": "pt"})
    found = verify(tmp_path / "keep", model).findings
    assert ("unquantized-changed", name) in {(finding.check, finding.where) for finding in found}
    values = load_file(tmp_path / "quantize/model.safetensors")
    name = next(
        n
        for n in values
        if n.endswith("o_proj.weight_packed") and n in heads_in(tmp_path / "quantize")
    )
    values[name] = values[name].roll(1, 0)
    save_file(values, tmp_path / "quantize/model.safetensors", {"format": "pt"})
    found = verify(tmp_path / "quantize", model).findings
    assert any(finding.check == "swapped-tensors" for finding in found)


def test_experts_may_be_pruned_where_the_head_is_dropped(with_head: Make, tmp_path: Path) -> None:
    model, out = with_head("qwen3-moe", "mtp"), tmp_path / "p"
    pruned = {"format": "plain", "prune_experts": "25%"}
    with pytest.raises(RefusedError, match="behind its last layer"):
        quantize(model, out, recipe(**pruned))
    quantize(model, out, recipe(**pruned, mtp="drop"))
    assert not heads_in(out)
    assert verify(out, model).findings == []


@pytest.mark.parametrize(
    ("family", "values", "error", "said"),
    [
        ("", {"mtp": "drop"}, UsageError, "no tensor here"),
        ("", {"mtp": "quantize"}, UsageError, "no tensor here"),
        ("qwen3", {"mtp": "quantize", "format": "gguf"}, RefusedError, "no place for heads"),
        ("qwen3", {"mtp": "cut"}, InputError, "mtp"),
    ],
)
def test_what_cannot_be_is_refused(
    with_head: Make, tiny: Tiny, family: str, values: dict[str, Any], error: type[QuantForgeError], said: str
) -> None:  # fmt: skip
    model = with_head(family, "mimo") if family else tiny("llama")
    with pytest.raises(error, match=said):
        api.plan(str(model), recipe(**{"bits": 4, **values}))


def test_gguf_says_that_it_leaves_them_out(with_head: Make) -> None:
    plan = api.plan(str(with_head("mistral", "mimo")), recipe(format="gguf", type="Q4_0"))
    dropped = [tensor for tensor in plan.tensors if tensor.action is Action.DROP]
    assert {tensor.name for tensor in dropped} == heads_in(with_head("mistral", "mimo"))
    assert any("no place for them" in note for note in plan.notes)


def test_names_and_counts() -> None:
    def found(config: dict[str, Any], *names: str) -> dict[str, bool]:
        return find_draft_head_tensors(
            config, 4, [StoredTensor(name, "BF16", (64, 64)) for name in names]
        )

    counted = {"num_nextn_predict_layers": 1, "n_routed_experts": 8}
    assert (
        found(counted, "model.layers.3.mlp.up_proj.weight", "model.layers.5.mlp.up_proj.weight")
        == {}
    )
    assert found(counted, "model.visual.blocks.4.mlp.up_proj.weight") == {}
    assert found({}, "model.layers.4.mlp.up_proj.weight") == {}
    inside = ("self_attn.q_a_proj", "mlp.experts.3.down_proj", "mlp.shared_experts.up_proj")
    beside = (
        "eh_proj",
        "embed_tokens",
        "shared_head.head",
        "enorm",
        "self_attn.q_a_layernorm",
        "mlp.gate",
    )
    for linear, names in ((True, inside), (False, beside)):
        for name in names:
            full = f"model.layers.4.{name}.weight"
            assert found(counted, full) == {full: linear}, name
    with pytest.raises(InputError, match="num_nextn"):
        found({"num_nextn_predict_layers": 9})
    tower = {"text_config": {"mtp_num_hidden_layers": 1, "num_hidden_layers": 4}, "use_mtp": True}
    assert without_draft_heads(tower) == {
        "text_config": {"mtp_num_hidden_layers": 0, "num_hidden_layers": 4},
        "use_mtp": False,
    }
