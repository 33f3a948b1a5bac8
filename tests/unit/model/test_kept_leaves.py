"""Tensors of nested structures are stored on disk exactly, and freed space is reused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from quantforge.errors import ResourceError
from quantforge.model.hidden_states import LeafStore


@pytest.mark.parametrize("on_disk", [False, True])
def test_stored_leaves_keep_dtypes_and_shapes(tmp_path: Path, on_disk: bool) -> None:
    leaves = LeafStore(tmp_path if on_disk else None)
    structure: Any = (
        torch.arange(6.0).view(2, 3).T,  # not contiguous
        {"chosen": torch.tensor([[3, 1]]), "mask": torch.tensor(True), "few": torch.empty(0, 4)},
        [torch.randn(3, 2).bfloat16(), None, "word", 7],
    )
    kept = leaves.put(structure)
    loaded = tree_map(leaves.load, kept)
    for expected, other in zip(tree_leaves(structure), tree_leaves(loaded), strict=True):
        if isinstance(expected, Tensor):
            assert (expected.dtype, expected.shape) == (other.dtype, other.shape)
            assert torch.equal(expected, other)
        else:
            assert expected == other
    leaves.close()


def test_disk_space_of_dropped_leaves_is_reused(tmp_path: Path) -> None:
    leaves = LeafStore(tmp_path)
    stored = leaves.put([torch.zeros(64), torch.zeros(64), torch.zeros(32)])
    for step in range(5):
        stored = leaves.put(
            [torch.full((64,), 1.0 * step), torch.full((64,), -1.0 * step), torch.full((32,), 9.0)]
        )
    assert leaves._file_end == 2 * (64 + 64 + 32) * 4  # two generations
    assert [int(leaves.load(leaf)[5]) for leaf in stored] == [4, -4, 9]


def test_a_missing_leaf_directory_is_a_resource_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="missing: activations cannot be kept on disk"):
        LeafStore(tmp_path / "missing").put([torch.ones(2)])
