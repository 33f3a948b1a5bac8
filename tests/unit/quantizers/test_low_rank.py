"""The best product of low rank for an error, by what it leaves at the output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.quantizers.low_rank import MORE, STEPS, low_rank


def problem(rows: int, columns: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(0, -1.5, columns)
    x = torch.randn(tokens, columns, generator=generator) * scales
    return torch.randn(rows, columns, generator=generator) / 50, x.T @ x / tokens


def left(error: Tensor, hessian: Tensor) -> float:
    return float((error.double() @ hessian.double() * error.double()).sum())


def best(error: Tensor, hessian: Tensor, rank: int) -> float:
    """What no product of this rank can be below (Eckart and Young), by the paper's own way: a root of H."""
    values, vectors = torch.linalg.eigh(hessian.double())
    root = vectors * values.clamp(min=0).sqrt()
    return float(torch.linalg.svdvals(error.double() @ root)[rank:].square().sum())


@pytest.mark.parametrize(("rows", "columns"), [(48, 96), (96, 48)])
@pytest.mark.parametrize("tokens", [400, 20])  # of 20 tokens a Hessian is singular
def test_nothing_of_its_rank_leaves_less(rows: int, columns: int, tokens: int) -> None:
    error, hessian = problem(rows, columns, tokens)
    for rank in (1, 8, min(rows, columns)):
        a, b = low_rank(error, hessian, rank)
        assert (a.shape, b.shape, a.dtype) == ((rank, columns), (rows, rank), torch.float16)
        found = left(error - b.float() @ a.float(), hessian)
        assert found <= 1.0001 * best(error, hessian, rank) + 1e-6 * left(error, hessian)


def test_within_a_krylov_space_nearly_nothing_is_lost() -> None:
    error, hessian = problem(900, 300, 2000)
    whole = left(error, hessian)
    for rank in (8, 32):
        assert STEPS * (rank + MORE) < len(error)
        a, b = low_rank(error, hessian, rank)
        found, least = left(error - b.float() @ a.float(), hessian), best(error, hessian, rank)
        assert (found - least) / (whole - least) < 1e-3


def test_directions_that_no_token_had_get_no_worse() -> None:
    error, hessian = problem(48, 96, 20)
    a, b = low_rank(error, hessian, 8)
    unseen = torch.linalg.svd(hessian).U[:, 40:]
    assert ((error - b.float() @ a.float()) @ unseen).norm() <= 1.0001 * (error @ unseen).norm()


def test_what_is_beyond_float16_is_refused() -> None:
    error, hessian = problem(48, 96, 400)
    with pytest.raises(InputError, match="beyond float16"):
        low_rank(error * 1e12, hessian, 4)
