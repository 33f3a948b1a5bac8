"""Names in files and in the running model: what is loaded is what transformers loads, in families of every kind."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.errors import InputError
from quantforge.files.reader import open_checkpoint
from quantforge.model.skeleton import build_skeleton
from quantforge.model.weight_mapping import WeightMapping
from quantforge.plans import StoredTensor
from quantforge.runtime.load import load
from tests.thorough import mark_others_thorough

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import tiny_families

# Experts one by one and stacked, converted and renamed tensors, prefixes, towers, tied and shared weights,
# configurations with infinite numbers, blocks that read weights themselves.
FAMILIES = (
    "phimoe", "jamba", "granitemoe", "llama4", "falcon", "mamba2", "qwen3_vl", "llava",
    "gemma4_unified", "qwen3_next", "nemotron_h", "olmo_hybrid", "zamba2",
)  # fmt: skip
IDS = torch.tensor([[5, 17, 3, 99, 42, 8, 120, 64]])


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a ``model_type`` to the directory of its tiny model."""

    @cache
    def make(name: str) -> Path:
        return tiny_families.write(name, tmp_path_factory.mktemp(name))

    return make


def stored(path: Path) -> list[StoredTensor]:
    return [entry.to_stored_tensor() for entry in open_checkpoint(path).entries.values()]


@pytest.mark.parametrize(
    "name",
    mark_others_thorough(
        FAMILIES,
        *(
            "phimoe",
            "granitemoe",
            "mamba2",
            "qwen3_vl",
            "gemma4_unified",
            "qwen3_next",
            "nemotron_h",
            "zamba2",
        ),
    ),
)
def test_what_is_loaded_is_what_transformers_loads(family: Any, name: str) -> None:
    """All weights are equal bit for bit; sums of products may depend on where in memory the weights lie."""
    path = family(name)
    loaded = load(path)
    peer = type(loaded.model).from_pretrained(path, dtype=torch.float32).eval()
    peer.set_experts_implementation("eager")
    own, theirs = loaded.model.state_dict(), peer.state_dict()
    assert own.keys() == theirs.keys()
    assert [key for key in own if not torch.equal(own[key], theirs[key])] == []
    with torch.inference_mode():
        ours = loaded.model(input_ids=IDS, use_cache=False).logits
        expected = peer(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen2_moe", "jamba"])
def test_a_place_is_where_transformers_puts_an_expert(family: Any, name: str) -> None:
    checkpoint = open_checkpoint(family(name))
    model = build_skeleton(checkpoint.config)
    names = WeightMapping(model, stored(checkpoint.path))
    peer = type(model).from_pretrained(checkpoint.path, dtype=torch.float32)
    assert len(names.expert_places) >= 3 * 4
    for own, place in names.expert_places.items():
        stack = peer.get_parameter(place.stack.parameter)
        assert torch.equal(place.view(stack), checkpoint.read(own).float())


def test_every_tensor_has_a_place_and_every_parameter_a_source(family: Any) -> None:
    path = family("qwen2_moe")
    config, tensors = open_checkpoint(path).config, stored(path)
    names = WeightMapping(build_skeleton(config), tensors)
    assert not names.unused
    assert not names.missing
    norm = "model.norm.weight"
    lost = WeightMapping(build_skeleton(config), [item for item in tensors if item.name != norm])
    assert lost.missing == (norm,)
    more = WeightMapping(
        build_skeleton(config), [*tensors, StoredTensor("model.extra.weight", "F32", (3,))]
    )
    assert more.unused == ("model.extra.weight",)
    with pytest.raises(InputError, match="has no place"):
        more.parameter_name("model.extra.weight")


def test_a_missing_expert_is_refused(family: Any) -> None:
    path = family("jamba")
    tensors = stored(path)
    expert = next(item for item in tensors if ".experts.1." in item.name)
    with pytest.raises(InputError, match="experts"):
        WeightMapping(
            build_skeleton(open_checkpoint(path).config),
            [item for item in tensors if item is not expert],
        )


def test_a_type_that_is_unknown_is_the_class_that_it_names(family: Any) -> None:
    config = {**open_checkpoint(family("jamba")).config, "model_type": "of_its_own"}
    assert type(build_skeleton(config)).__name__ == "JambaForCausalLM"
    with pytest.raises(InputError, match="unknown to transformers"):
        build_skeleton({**config, "architectures": ["NoSuchModel"]})
