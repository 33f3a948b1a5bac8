"""Units of work: their shares of the time, and what processes can share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quantforge.errors import UsageError
from quantforge.execution.units import (
    check_shareable,
    claimable_units,
    list_units,
    unit_name_of,
    work_shares,
)
from quantforge.plans import Action, TensorPlan


def planned(
    name: str, part: int, size: int, expert: int = -1, action: Action = Action.QUANTIZE
) -> TensorPlan:
    return TensorPlan(name, "F32", (size, 10), action, "", None, (), part, expert=expert)


def plan_of(
    *tensors: TensorPlan,
    needs: tuple[str, ...] = ("hessian",),
    guided_hessians: int = 0,
    tune: int = 0,
) -> Any:
    return SimpleNamespace(
        tensors=tensors,
        tensors_after_blocks=("head",),
        needs=needs,
        guided_hessians=guided_hessians,
        tune=tune,
    )


MIXTURE = (
    planned("embed", -1, 100, action=Action.KEEP),
    planned("q", 0, 10),
    planned("up 1", 0, 20, expert=1),
    planned("up 0", 0, 20, expert=0),
    planned("o", 1, 30),
    planned("head", -1, 0),
)


def test_experts_are_units_only_in_calibrated_runs() -> None:
    units = list_units(plan_of(*MIXTURE), 2)
    assert [unit.name for unit in units] == [
        "outer", "block 0 expert 0", "block 0 expert 1", "block 0", "block 1", "head",
    ]  # fmt: skip
    assert [[tensor.name for tensor in unit.tensors] for unit in units] == [
        ["embed"], ["up 0"], ["up 1"], ["q"], ["o"], ["head"],
    ]  # fmt: skip
    assert unit_name_of(MIXTURE[3], plan_of(*MIXTURE)) == "block 0 expert 0"
    plain = plan_of(*MIXTURE, needs=())
    assert [unit.name for unit in list_units(plain, 2)] == ["outer", "block 0", "block 1", "head"]
    assert unit_name_of(MIXTURE[3], plain) == unit_name_of(MIXTURE[1], plain) == "block 0"


def test_experts_are_claimed_with_their_block() -> None:
    units = claimable_units(list_units(plan_of(*MIXTURE), 2))
    assert [(unit.name, [tensor.name for tensor in unit.tensors]) for unit in units] == [
        ("outer", ["embed"]), ("block 0", ["up 0", "up 1", "q"]), ("block 1", ["o"]), ("head", ["head"]),
    ]  # fmt: skip


def test_token_weights_unit_precedes_the_blocks() -> None:
    units = list_units(plan_of(MIXTURE[1], MIXTURE[4], guided_hessians=2), 2)
    assert [unit.name for unit in units] == ["outer", "token weights", "block 0", "block 1", "head"]
    assert work_shares(units)["token weights"] == pytest.approx(0.5)


def test_work_shares_follow_rounded_weights() -> None:
    shares = work_shares(list_units(plan_of(*MIXTURE), 2))
    assert shares.keys() == {"outer", "block 0", "block 1", "head"}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["block 0"] / shares["block 1"] == pytest.approx(5 / 3)
    assert 0 < shares["outer"] < shares["block 1"] / 10  # to copy is quick
    assert shares["head"] == 0
    assert set(work_shares(list_units(plan_of(), 2)).values()) == {0.0}


def test_runs_that_processes_cannot_share_are_refused() -> None:
    def check(plan: Any, **options: bool) -> None:
        usual = {"overwrite": False, "prunes_experts": False, "torchrun": True, "replayed": False}
        check_shareable(plan, **{**usual, **options})

    check(plan_of(*MIXTURE, needs=()))
    check(plan_of(MIXTURE[1], MIXTURE[4]))
    with pytest.raises(UsageError, match="--overwrite"):
        check(plan_of(MIXTURE[1]), overwrite=True)
    with pytest.raises(UsageError, match="--prune-experts"):
        check(plan_of(*MIXTURE, needs=()), prunes_experts=True)
    check(plan_of(*MIXTURE))
    with pytest.raises(UsageError, match=r"torchrun.*--guided-hessians") as refused:
        check(plan_of(MIXTURE[1], guided_hessians=1))
    assert refused.value.hint.endswith("; or --guided-hessians 0")
    assert "without --join and torchrun" in refused.value.hint
    tuned = plan_of(*MIXTURE, tune=2)  # by whoever puts the result together
    check(tuned)
    assert claimable_units(list_units(tuned, 2)) == claimable_units(
        list_units(plan_of(*MIXTURE), 2)
    )
    check(plan_of(*MIXTURE, needs=()), torchrun=False, replayed=True)
    with pytest.raises(UsageError, match="one after the other") as refused:
        check(plan_of(MIXTURE[1]), torchrun=False)
    assert "torchrun" in refused.value.hint
    assert "--calibration none" in refused.value.hint
    with pytest.raises(UsageError, match="more than hidden states"):
        check(plan_of(MIXTURE[1]), replayed=True)
