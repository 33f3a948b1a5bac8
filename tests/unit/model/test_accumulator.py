"""Sums of activation statistics with token weights."""

from __future__ import annotations

import torch

from quantforge.model import accumulator
from quantforge.model.statistics import Statistic


def test_rows_with_zero_weight_skip_products_but_count_tokens(monkeypatch):
    products = []
    original = accumulator.addmm_
    monkeypatch.setattr(
        accumulator, "addmm_", lambda *arguments: products.append(original(*arguments))
    )
    rows = [torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    weights = [torch.full((8,), float(index == 1)) for index in range(4)]
    total, alone = (accumulator.Accumulator({Statistic.HESSIAN}) for _ in range(2))
    for first in (0, 2):  # the second two rows have none at all
        for job in total.addition_jobs(rows[first : first + 2], weights[first : first + 2]):
            job()
    count = len(products)
    for job in alone.addition_jobs(rows[1:2], weights[1:2]):
        job()
    result, expected = total.result(), alone.result()
    assert len(products) == 2 * count
    assert torch.equal(result.hessian, expected.hessian)
    assert result.tokens == 32
