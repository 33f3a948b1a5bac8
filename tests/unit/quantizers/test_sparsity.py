"""Pruning writes the exact number of zeros and compensates the remaining weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.model.statistics import Statistics
from quantforge.notation import parse_sparsity
from quantforge.quantizers.sparsity import sparsify, sparsity_figures
from quantforge.recipe import Recipe
from quantforge.scheme import Sparsity
from tests.thorough import parametrize_each_value

METHODS = ("magnitude", "wanda", "sparsegpt")
DAMPING = Recipe().rounding.gptq.damping


def drawn(rows: int = 24, columns: int = 320) -> tuple[Tensor, Statistics]:
    """A matrix, and what it reads: columns of unequal size that have much to do with each other."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(rows, columns, generator=generator)
    mixed = torch.randn(columns // 4, columns, generator=generator)
    x = torch.randn(2000, columns // 4, generator=generator) @ mixed
    x += 3 * torch.randn(2000, columns, generator=generator)
    x *= torch.linspace(0.2, 3, columns)[torch.randperm(columns, generator=generator)]
    return weight, Statistics(tokens=2000, hessian=x.T @ x / 2000)


def prune(method: str, weight: Tensor, statistics: Statistics, sparsity: str) -> Tensor:
    return sparsify(method, {"w": weight}, statistics, parse_sparsity(sparsity), DAMPING)[0]["w"]


def lost(weight: Tensor, other: Tensor, statistics: Statistics) -> float:
    assert statistics.hessian is not None
    change = weight - other
    return float(((change @ statistics.hessian) * change).sum())


def best(weight: Tensor, gone: Tensor, statistics: Statistics) -> Tensor:
    """What stays of each row, as good as can be, by another way: normal equations in float64."""
    assert statistics.hessian is not None
    hessian = statistics.hessian.double()
    result = torch.zeros_like(weight)
    for row, mask in enumerate(gone):
        stays = ~mask
        right = hessian[stays] @ weight[row].double()
        result[row, stays] = torch.linalg.solve(hessian[stays][:, stays], right).float()
    return result


def test_figures_do_not_depend_on_the_number_of_threads() -> None:
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    weight, squares = (
        torch.randn(1024, 512, generator=generator),
        torch.rand(512, generator=generator),
    )
    after = weight.masked_fill(weight.abs() < 0.5, 0.0)
    results = []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append(sparsity_figures(weight, after, Statistics(tokens=1, squares=squares)))
    finally:
        torch.set_num_threads(before)
    assert all(each == results[0] for each in results)
    change = (after - weight).double().square() * squares
    assert results[0]["error"] == pytest.approx(
        float(change.sum() / (weight.double().square() * squares).sum()), rel=1e-6
    )


@parametrize_each_value(
    ("method", METHODS),
    ("sparsity, zeros", [("2:4", 160), ("1:4", 240), ("50%", 160), ("0.333", 106)]),
)
def test_every_row_has_exactly_its_zeros(method: str, sparsity: str, zeros: int) -> None:
    weight, statistics = drawn()
    value = prune(method, weight, statistics, sparsity)
    assert ((value == 0).sum(1) == zeros).all()
    if ":" in sparsity:
        assert ((value.view(24, -1, 4) == 0).sum(-1) == zeros // 80).all()
    if method != "sparsegpt":
        assert torch.equal(value[value != 0], weight[value != 0])


@pytest.mark.parametrize("sparsity", ["2:4", "50%"])
def test_sparsegpt_beats_wanda_beats_magnitude(sparsity: str) -> None:
    weight, statistics = drawn()
    values = {method: prune(method, weight, statistics, sparsity) for method in METHODS}
    errors = {method: lost(weight, value, statistics) for method, value in values.items()}
    assert errors["wanda"] < 0.9 * errors["magnitude"]
    assert errors["sparsegpt"] < 0.7 * errors["wanda"]
    mended = best(weight, values["sparsegpt"] == 0, statistics)
    assert lost(weight, mended, statistics) < errors["sparsegpt"]
    assert errors["sparsegpt"] < 3 * lost(weight, mended, statistics)


def test_pruning_scores_match_the_papers() -> None:
    weight = torch.tensor([[3.0, 2.0, 1.0, 4.0]])
    statistics = Statistics(tokens=9, squares=torch.tensor([1.0, 4.0, 100.0, 0.01]))
    assert prune("magnitude", weight, statistics, "2:4").tolist() == [[3.0, 0.0, 0.0, 4.0]]
    assert prune("wanda", weight, statistics, "2:4").tolist() == [
        [0.0, 2.0, 1.0 * 1, 0.0]
    ]  # 3 4 10 .4
    hessian = torch.tensor([[1.0, 0.5], [0.5, 4.0]])
    value = prune("sparsegpt", torch.tensor([[1.0, 3.0]]), Statistics(9, hessian=hessian), "1:2")
    # Without the first, the second takes its share: 3 + 1 * H01 / H11, all but for the damping.
    assert value[0, 0] == 0
    assert value[0, 1] == pytest.approx(3.125, rel=0.01)


def test_missing_statistics_are_an_event_and_nan_an_error() -> None:
    weight, _ = drawn(4, 64)
    empty = Statistics(tokens=0, hessian=torch.zeros(64, 64))
    result, events = sparsify("sparsegpt", {"w": weight}, empty, parse_sparsity("2:4"), DAMPING)
    assert [event.kind for event in events] == ["rtn-fallback"]
    assert ((result["w"] == 0).sum(1) == 32).all()
    weight[1, 5] = torch.nan
    for method in METHODS:
        with pytest.raises(InputError, match=r"w: the value at \[1, 5\] is nan"):
            prune(method, weight, Statistics(9, torch.ones(64), torch.eye(64)), "2:4")


@pytest.mark.parametrize(
    "text", ["0", "100%", "4:2", "0:4", "2:2", "2:64", "half", "-1%", "2:4:8", ""]
)
def test_invalid_sparsity_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="sparsity"):
        parse_sparsity(text)


def test_sparsity_text_is_parsed() -> None:
    assert parse_sparsity("50%") == parse_sparsity("0.5") == Sparsity(0.5)
    assert parse_sparsity("2:4").zeros(8) == 4
    assert str(parse_sparsity("2:4")) == "2:4"
    assert not parse_sparsity("2:4").fits(6)
