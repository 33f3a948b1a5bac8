"""Incomplete sets of experts are refused by name, in declared and undeclared families."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import api
from quantforge.architectures.expert_sets import check_experts
from quantforge.errors import InputError
from quantforge.plans import StoredTensor
from quantforge.recipe import Recipe
from quantforge.settings import Settings
from tests.conftest import Tiny

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.0.block_sparse_moe.experts"
GATE = "model.layers.0.block_sparse_moe.gate.weight"


def without(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(part)]:
            del tensors[name]

    return change


def another_type(tensors: Tensors) -> None:
    tensors[f"{EXPERTS}.1.w2.weight"] = tensors[f"{EXPERTS}.1.w2.weight"].half()


def a_row_more(tensors: Tensors) -> None:
    tensors[GATE] = torch.cat([tensors[GATE], tensors[GATE][:1]])


def not_a_number(tensors: Tensors) -> None:
    tensors[f"{EXPERTS}.1.w2.weight"][3, 3] = torch.nan


@pytest.mark.parametrize("model_type", ["mixtral", "novel_moe"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{EXPERTS}.1."), rf"{EXPERTS}\.1\b.*: missing"),
        (without(f"{EXPERTS}.3."), rf"{EXPERTS}\.3\b.*: missing"),
        (without(f"{EXPERTS}.1.w2"), rf"{EXPERTS}\.1\.w2\.weight: missing"),
        (a_row_more, rf"{GATE}: (5 rows for 4 experts|shape \[5, 64\])"),
        (another_type, rf"{EXPERTS}\.1\.w2\.weight: F16, where others are F32"),
        (not_a_number, rf"{EXPERTS}\.1\.w2\.weight' holds nan at \[3, 3\]"),
    ],
    ids=["expert", "last-expert", "matrix", "router", "type", "nan"],
)
def test_incomplete_or_bad_experts_are_refused_by_name(
    tiny: Tiny, tmp_path: Path, model_type: str, change: Callable[[Tensors], None], message: str
) -> None:
    shutil.copytree(tiny("mixtral"), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    recipe = Recipe(scheme="int4:g32", scales="absmax")
    with pytest.raises(InputError, match=message):
        api.quantize(str(tmp_path / "m"), recipe, tmp_path / "o", Settings())
    assert not (tmp_path / "o").exists()


def test_an_index_that_names_an_expert_twice_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """Once as a duplicate key, once as a tensor in two files."""
    shutil.copytree(tiny("qwen3-moe"), tmp_path / "m")
    index = tmp_path / "m" / "model.safetensors.index.json"
    text = index.read_text()
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    line = next(line for line in text.splitlines() if f'"{name}"' in line)
    index.write_text(text.replace(line, f"{line.rstrip(',')},\n{line}", 1))
    with pytest.raises(InputError, match=r"experts\.1\.up_proj\.weight"):
        api.plan(str(tmp_path / "m"), Recipe(bits=4))
    index.write_text(text)
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    own = next(path for path in files if name in load_file(path))
    other = next(path for path in files if path != own)
    save_file(load_file(other) | {name: load_file(own)[name]}, other, {"format": "pt"})
    with pytest.raises(InputError, match=r"experts\.1\.up_proj\.weight"):
        api.plan(str(tmp_path / "m"), Recipe(bits=4))


@pytest.mark.parametrize("model_type", ["lfm2", "novel"])
def test_too_short_layer_types_are_refused(tiny: Tiny, tmp_path: Path, model_type: str) -> None:
    shutil.copytree(tiny("lfm2"), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text()) | {"model_type": model_type}
    path.write_text(json.dumps(config | {"layer_types": config["layer_types"][:-1]}))
    with pytest.raises(InputError, match="layer"):
        api.plan(str(tmp_path / "m"), Recipe(bits=4))


def test_too_short_no_rope_layers_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("llama4"), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())  # which lists the kinds of layers, too
    path.write_text(json.dumps(config | {"no_rope_layers": [1, 1, 1]}))
    with pytest.raises(InputError, match="no_rope_layers names 3 layers of 4"):
        api.plan(str(tmp_path / "m"), Recipe(bits=4))
    path.write_text(json.dumps(config | {"no_rope_layers": []}))
    assert api.plan(str(tmp_path / "m"), Recipe(bits=4)).tensors


def test_an_unknown_kind_of_layer_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("lfm2"), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"layer_types": ["conv", "telepathy"] * 2}))
    with pytest.raises(InputError, match="telepathy"):
        api.plan(str(tmp_path / "m"), Recipe(bits=4))


@pytest.mark.parametrize(
    ("config", "experts", "rows", "fine"),
    [
        ({"num_experts": 4}, 4, 4, True),
        ({"num_experts": 4, "zero_expert_num": 2}, 4, 6, True),
        ({"num_experts": 4, "zero_expert_num": 2}, 6, 6, True),
        ({"num_experts": [4, 4]}, 8, 8, True),
        ({"num_experts": [4, 4]}, 6, 6, False),
        ({"num_experts": 4, "moe_intermediate_size": [32, 32]}, 8, 8, True),
        ({"num_experts": 4, "moe_intermediate_size": [32, 32]}, 7, 7, False),
        ({}, 5, 5, True),
        ({"num_experts": 4}, 4, 5, False),
        ({"num_experts": 4, "n_shared_experts": 1, "shared_expert_sink": True}, 4, 5, True),
        ({"num_experts": 4, "n_shared_experts": 1}, 4, 5, False),
        ({"num_experts": 4}, 5, 5, False),
    ],
)
def test_expert_and_router_counts_are_checked(
    config: dict[str, Any], experts: int, rows: int, fine: bool
) -> None:
    shapes = {f"l.0.mlp.experts.{i}.up.weight": (8, 8) for i in range(experts)}
    shapes |= {"l.0.mlp.router.classifier.weight": (rows, 8), "l.0.self_attn.gate.weight": (9, 8)}
    stored = [StoredTensor(name, "BF16", shape) for name, shape in shapes.items()]
    if fine:
        check_experts(config, stored)
    else:
        with pytest.raises(InputError, match=r"experts, the config counts|rows for|missing"):
            check_experts(config, stored)


def test_billions_of_declared_experts_are_refused_without_listing_them() -> None:
    tensors = [
        StoredTensor(f"mlp.experts.{number}.up.weight", "F32", (4, 4)) for number in range(4)
    ]
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"mlp\.experts\.4: missing and 2147483643 more"):
            check_experts({"num_local_experts": 2**31}, tensors)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
