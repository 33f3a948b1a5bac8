"""Digits of base 3, and the Triton kernels over them: on a GPU where there is one, interpreted elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")
import torch
from hypothesis import given as given_values
from hypothesis import settings
from hypothesis import strategies as st

from quantforge_kernels import base3, reference
from quantforge_kernels.gpu import ternary_products as ternary
from quantforge_kernels.gpu.launching import Configuration
from quantforge_kernels.select import KERNELS, select
from tests.triton_kernels import (
    DEVICE,
    TERNARY,
    activations,
    expected,
    problem,
    relative_error,
    weights,
)

ROUNDING = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 6e-3}


def make(shape=(21, 768), rows=1, dtype=torch.float32, group=256):
    """A problem, packed weights, activations, and the product in float64."""
    task = problem(shape=shape, dtype=dtype, **TERNARY | {"group": group})
    codes, parameters = weights(task)
    x = activations(task, rows)
    return task, ternary.prepare(codes, parameters, task), x, expected(task, (codes, parameters), x)


def test_every_half_of_a_word_is_ten_digits():
    numbers = torch.arange(3**10)
    digits = torch.stack([(numbers // 3**place % 3) for place in range(9, -1, -1)], 1).byte()
    both = torch.stack((digits, digits.flip(0)), 2).flatten(1)
    words = base3.to_words(both)
    assert torch.equal(base3.from_words(words), both)
    assert torch.equal(words & 0xFFFF, ((numbers * 2**16 + 3**10 - 1) // 3**10).int())


def test_digits_come_out_at_the_top():
    """The formula of the module's docstring, which the compiled kernels follow."""
    digits = torch.randint(0, 3, (50, 20), dtype=torch.uint8)
    word = base3.to_words(digits).long() & 0xFFFFFFFF
    for place in range(20):
        half = (word >> (16 * (place % 2))) & 0xFFFF
        found = ((half * 3 ** (place // 2)) % 2**16 * 3) // 2**16
        assert torch.equal(found, digits[:, place].long())


def test_the_reference_packs_twenty_to_a_word():
    task = problem(shape=(7, 512), **TERNARY)
    codes, parameters = weights(task)
    held = reference.prepare(codes, parameters, task)
    assert held["codes0"].shape == (7, 26)
    scales = parameters["scales"].float().repeat_interleave(256, 1)
    weight = (codes.float() - 1) * scales
    assert torch.equal(reference.decode_rows(held, task, slice(2, 5)), weight[2:5])


ROWS = (0, 1, 3, 20, 70)
SHAPES = (((21, 768), 256), ((5, 256), 256), ((9, 96), 32), ((70, 144), 24))
PRODUCTS = [  # every type with every number of rows, and in float32 every shape as well
    *((*shape, rows, torch.float32) for shape in SHAPES for rows in ROWS),
    *((*SHAPES[-1], rows, dtype) for dtype in ROUNDING if dtype != torch.float32 for rows in ROWS),
]


@pytest.mark.parametrize(("shape", "group", "rows", "dtype"), PRODUCTS)
def test_products_equal_the_formula(shape, group, rows, dtype, monkeypatch):
    monkeypatch.setattr(ternary, "SLAB_BYTES", 5 * shape[1] * 4)
    task, packed, x, wanted = make(shape, rows, dtype, group)
    y = ternary.matmul(x, packed, task)
    assert y.shape == (rows, shape[0])
    assert y.dtype == dtype
    if rows:
        assert relative_error(y, wanted) < ROUNDING[dtype] * (1 if rows == 1 else 2)


@settings(max_examples=8, deadline=None)
@given_values(
    st.integers(1, 40), st.integers(1, 4), st.sampled_from([4, 20, 32, 60, 128]), st.integers(1, 4)
)
def test_any_shape(out, groups, group, rows):
    task, packed, x, wanted = make((out, groups * group), rows, torch.float32, group)
    assert relative_error(ternary.matmul(x, packed, task), wanted) < ROUNDING[torch.float32]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("tile", [(8, 128, 1, 1), (16, 32, 2, 2), (16, 64, 4, 3), (32, 16, 1, 7)])
def test_any_tile_and_split_gives_the_same(rows, tile):
    _, packed, x, wanted = make((37, 1536), rows)
    y = ternary.launch(x, packed["words"], packed["scales"], 256, Configuration(*tile))
    assert relative_error(y, wanted) < ROUNDING[torch.float32]


def test_exponents_stand_for_fractions():
    """By the magic numbers and by conversion; on a GPU inline assembly to the bit."""
    _, packed, x, wanted = make(dtype=torch.bfloat16)
    tile = Configuration(8, 128, 1, 1)
    results = [
        ternary.launch(x, packed["words"], packed["scales"], 256, tile, mode)
        for mode in ((0, 1) if DEVICE == "cpu" else (0, 1, 2))
    ]
    assert all(relative_error(y, wanted) < ROUNDING[torch.bfloat16] for y in results)
    assert len(results) == 2 or torch.equal(*results[1:])


@pytest.mark.parametrize("rows", [1, 2, 65])
def test_what_is_no_number_comes_through(rows):
    task, packed, x, _ = make((5, 512), rows)
    x[0, 300] = float("nan")
    y = ternary.matmul(x, packed, task)
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()
    scales = packed["scales"].clone()
    scales[2, 1] = float("nan")
    y = ternary.matmul(activations(task, rows), dict(packed) | {"scales": scales}, task)
    assert y[:, 2].isnan().all()
    assert y[:, [0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize(("shape", "group"), [((7, 768), 256), ((3, 96), 24)])
def test_repacking_is_undone_to_the_bit(shape, group):
    task = problem(shape=shape, **TERNARY | {"group": group})
    codes, parameters = weights(task)
    again, kept = ternary.restore(ternary.prepare(codes, parameters, task), task)
    assert torch.equal(again, codes)
    assert kept.keys() == {"scales"}
    assert torch.equal(kept["scales"], parameters["scales"])


def test_weights_are_as_small_as_the_file():
    task = problem(shape=(64, 2048), **TERNARY)
    codes, parameters = weights(task)
    stored = codes.numel() * 27 / 16 / 8  # TQ1_0: 54 bytes for 256 weights
    for kernel in (ternary.KERNEL, reference.KERNEL):
        held = sum(part.nbytes for part in kernel.prepare(codes, parameters, task).values())
        assert 0.97 * stored < held <= 1.01 * stored


def test_selection():
    task = replace(problem(shape=(40, 512), **TERNARY), device="cuda")
    assert select(task) is ternary.KERNEL
    for changes in (
        {"grid": "int"}, {"activation": "int8"}, {"in_features": 500}, {"device": "cpu"},
    ):  # fmt: skip
        assert not ternary.accepts(replace(task, **changes))
    assert sum(kernel.accepts(task) for kernel in KERNELS) == 2  # and the reference
