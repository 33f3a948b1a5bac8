"""Hidden states that ranks pass on in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.errors import IntegrityError, ResourceError
from quantforge.execution import shared_run
from quantforge.execution.shared_run import SharedStates

ROWS = torch.arange(2 * 3 * 4, dtype=torch.float32).view(2, 3, 4)


def test_written_states_are_read_by_others_and_not_replaced(
    tmp_path: Path,
) -> None:
    mine = SharedStates(tmp_path / "states")
    for block, start in ((-1, 0), (-1, 2), (0, 0), (0, 2)):
        mine.block = block
        mine.write(start, (ROWS + 100 * block + start).to(torch.float64))
    mine.flush()
    other = SharedStates(tmp_path / "states")
    other.block = 5
    other.write(0, ROWS)  # by which it knows the shape
    for reader in (mine, other):
        for block, start in ((-1, 0), (-1, 2), (0, 0), (0, 2)):
            reader.block = block + 1
            assert torch.equal(reader.read(start, start + 2), ROWS + 100 * block + start)
    mine.close()
    other.close()


def test_damaged_states_are_refused(tmp_path: Path) -> None:
    states = SharedStates(tmp_path / "states")
    states.write(0, ROWS)
    states.flush()
    for file in (tmp_path / "states").iterdir():
        file.write_bytes(b"damaged")
    states.block = 0
    with pytest.raises(IntegrityError, match="is not what a worker had written"):
        states.read(0, 2)
    states.close()


def test_write_failure_is_raised_by_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise ResourceError("no space", "free some")

    states = SharedStates(tmp_path / "states")
    monkeypatch.setattr(shared_run, "save_file", full)
    states.write(0, ROWS)
    with pytest.raises(ResourceError, match="no space"):
        states.flush()
    states.close()


def test_last_micro_batch_may_have_fewer_rows(tmp_path: Path) -> None:
    states = SharedStates(tmp_path / "states")
    for start, rows in ((0, ROWS), (2, ROWS[:1])):
        states.write(start, rows)
    states.block = 0
    states.flush()
    assert torch.equal(states.read(2, 3), ROWS[:1])
    assert torch.equal(states.read(0, 2), ROWS)
    states.close()


def test_delete_removes_states_of_earlier_blocks(tmp_path: Path) -> None:
    states = SharedStates(tmp_path / "states")
    for block in (-1, 0):
        states.block = block
        states.write(0, ROWS)
    states.flush()
    states.delete(0)
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["1.0"]
    states.close()
