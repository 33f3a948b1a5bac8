"""The quadratic form of a symmetric matrix takes half of the products."""

from __future__ import annotations

import pytest
import torch

from quantforge.quantizers.awq import HESSIAN_PANEL, QuadraticForm


@pytest.mark.parametrize("size", [1, HESSIAN_PANEL, 2 * HESSIAN_PANEL + 17])
def test_quadratic_form_equals_the_full_product(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x, error = (torch.randn(rows, size, generator=generator) for rows in (40, 12))
    hessian = x.T @ x
    before = hessian.clone()
    expected = float(((error.double() @ hessian.double()) * error).sum())
    assert QuadraticForm(hessian)(error) == pytest.approx(expected, rel=1e-5)
    assert torch.equal(hessian, before)
