"""Unstacked experts: each matrix equals its slice of the stack and is read alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantforge.files.checksums import compute_checksums
from quantforge.files.reader import Checkpoint, open_checkpoint
from quantforge.files.unstacked_experts import MAX_CACHED_EXPERTS, unstack_experts
from tests.conftest import Tiny

PARTS = ("gate", "up", "down")
STACKS = {  # the stacks of gate and up, and of down; the name of a matrix
    "gpt-oss": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.experts.{}.{}_proj.weight"),
    "granitemoe": (
        "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight",
        "block_sparse_moe.experts.{}.{}.weight",
    ),
}  # fmt: skip
LEAVES = {"granitemoe": dict(zip(PARTS, ("w1", "w3", "w2"), strict=True))}


def load_tensors(model: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def expected_matrices(family: str, model: Path) -> dict[str, Tensor]:
    """Return the matrices of all experts, sliced from the stacks here."""
    first, second, name = STACKS[family]
    tensors, matrices = load_tensors(model), {}
    for layer in range(3):
        block = f"model.layers.{layer}."
        for number in range(4):
            both, down = tensors[block + first][number], tensors[block + second][number]
            gate, up = (both.T[::2], both.T[1::2]) if family == "gpt-oss" else both.chunk(2)
            for part, value in zip(
                PARTS, (gate, up, down.T if family == "gpt-oss" else down), strict=True
            ):
                leaf = LEAVES.get(family, {}).get(part, part)
                matrices[block + name.format(number, leaf)] = value
    return matrices


@pytest.mark.parametrize("family", STACKS)
def test_unstacked_experts_equal_slices_of_the_stack(tiny: Tiny, family: str) -> None:
    source = open_checkpoint(tiny(family))
    view, expected_tensors = unstack_experts(source), expected_matrices(family, tiny(family))
    first, second, _ = STACKS[family]
    stacks = {f"model.layers.{n}.{name}" for n in range(3) for name in (first, second)}
    assert view.entries.keys() == (source.entries.keys() - stacks) | expected_tensors.keys()
    assert sorted(view.entries) == list(view.entries)
    for name, value in expected_tensors.items():
        entry = view.entries[name]
        assert entry.name == name
        assert entry.shape == tuple(value.shape)
        assert entry.nbytes == value.numel() * value.element_size()
        read = view.read(name)
        assert torch.equal(read, value), name
        assert read.is_contiguous()
        assert torch.equal(view.read_rows(name, 1, 5), value[1:5])
        assert view.read_rows(name, 3, 3).shape == (0, value.shape[1])
    norm = "model.norm.weight"
    assert torch.equal(view.read(norm), source.read(norm))
    assert torch.equal(view.read_rows(norm, 2, 9), source.read(norm)[2:9])
    assert view.original is source.original
    assert view.source_notes == source.source_notes
    assert view.derived_declarations is None


def test_experts_are_read_alone_and_cached(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    view = unstack_experts(open_checkpoint(tiny("gpt-oss")))
    read: list[tuple[str, int, int]] = []
    rows = Checkpoint.read_rows

    def record_read(self: Checkpoint, name: str, first: int, last: int) -> Tensor:
        read.append((name, first, last))
        return rows(self, name, first, last)

    monkeypatch.setattr(Checkpoint, "read_rows", record_read)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a whole stack was read"))
    name = "model.layers.1.mlp.experts.{}.{}_proj.weight"
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    for part in ("gate", "up"):
        view.read_rows(name.format(2, part), 0, 3)
        view.read(name.format(2, part))
    assert read == [(stack, 2, 3)]
    for number in range(MAX_CACHED_EXPERTS):  # others are read meanwhile
        view.read(name.format(number, "up"))
    view.read(name.format(1, "gate"))
    assert len(read) == 1 + MAX_CACHED_EXPERTS
    view.read(name.format(2, "gate"))
    assert len(read) == 2 + MAX_CACHED_EXPERTS  # no more than so many are held


def test_checksums_reach_the_inner_checkpoint(tiny: Tiny) -> None:
    view = unstack_experts(open_checkpoint(tiny("gpt-oss")))
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    before, norm = view.read(name), "model.norm.weight"
    files = {entry.file for entry in view.inner.entries.values()}  # type: ignore[attr-defined]
    again = view.with_checksums({file: compute_checksums(file, file.parent) for file in files})
    assert again.inner.entries[norm].checksums is not None
    assert torch.equal(again.read(name), before)
    assert again.entries == view.entries


def test_unstacking_a_model_without_stacks_changes_nothing(tiny: Tiny) -> None:
    for family in ("llama", "mixtral"):
        source = open_checkpoint(tiny(family))
        assert unstack_experts(source) is source


@pytest.mark.parametrize("experts", [3, 5])
def test_stacks_of_unexpected_shape_are_left_unchanged(
    tiny: Tiny, tmp_path: Path, experts: int
) -> None:
    shutil.copytree(
        tiny("gpt-oss"), tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors*")
    )
    tensors = load_tensors(tiny("gpt-oss"))
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name] = torch.cat((tensors[name], tensors[name]))[:experts].contiguous()
    odd = "model.layers.2.mlp.experts.gate_up_proj"
    tensors[odd] = tensors[odd][..., :-1].contiguous()  # no two halves
    flat = "model.layers.0.mlp.experts.down_proj"
    tensors[flat] = tensors[flat].flatten(1)
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    view = unstack_experts(open_checkpoint(tmp_path / "m"))
    for left in (name, odd, flat):
        assert left in view.entries
        assert torch.equal(view.read(left), tensors[left])
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in view.entries
    assert not any(
        ".experts.0.down_proj" in name_in_view
        for name_in_view in view.entries
        if "layers.1" in name_in_view
    )
