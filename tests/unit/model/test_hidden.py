"""Hidden states on disk: exact, in unnamed files, with a typed error when space is missing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from quantforge.errors import ResourceError
from quantforge.model.hidden_states import HiddenStates, InMemory, OnDisk


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_hidden_states_are_read_as_written(where: str, tmp_path: Path) -> None:
    store: HiddenStates = InMemory(5, 3, 4) if where == "memory" else OnDisk(5, 3, 4, tmp_path)
    states = torch.randn(5, 3, 4)
    states[0, 0, 0] = torch.nan
    for start in (3, 0):
        store.write(start, states[start : start + 3])
    assert torch.equal(store.read(0, 5).nan_to_num(7.0), states.nan_to_num(7.0))
    assert torch.equal(store.read(2, 4), states[2:4])
    store.write(1, states[4:])
    assert torch.equal(store.read(1, 3), torch.stack([states[4], states[2]]))
    assert not list(tmp_path.iterdir())
    store.close()


def test_missing_disk_space_is_reported_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=str(tmp_path)):
        OnDisk(1 << 40, 1 << 10, 1 << 7, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_activation_directory_is_a_resource_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot be kept on disk"):
        OnDisk(1, 1, 1, tmp_path / "missing")


def test_a_failed_disk_read_is_a_resource_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = OnDisk(1, 1, 4, tmp_path)
    store.write(0, torch.ones(1, 1, 4))

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ResourceError, match="Input/output error"):
        store.read(0, 1)
    store.close()
