"""Loops of the lattice types find what an exhaustive search finds."""

from __future__ import annotations

import hashlib

import numpy
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.peers.ggml import quantized
from quantforge.notation import parse
from quantforge.numerics.compiled import (
    broadcast,
    differ_mask,
    first_bit,
    jit,
    lane_max,
    lane_min,
    lane_sum,
    last_bit,
    less_mask,
    load,
    multiply_add,
    select_if_less,
    store,
    vector_max,
    vector_min,
)
from quantforge.packers.ggml.blocks import pack_blocks
from quantforge.packers.lattices import LATTICES, packer
from quantforge.packers.lattices.nearest_loops import round_float16
from quantforge.packers.lattices.packer import nearest_weighted
from quantforge.packers.lattices.points import decode_values, lattice_points
from quantforge.packers.lattices.ternary_loops import find_cuts, sorted_order
from tests.thorough import mark_others_thorough

Array = NDArray[numpy.float32]


@jit
def _operations(a, b, out):  # type: ignore[no-untyped-def]
    first, second = load(a, 1), load(b, 0)
    results = (
        first + second,
        first - second,
        first * second,
        first / second,
        vector_min(first, second),
    )
    for index, value in enumerate(results):
        store(out, 8 * index, value)
    store(out, 40, vector_max(first, second))
    store(out, 48, select_if_less(first, second, second, broadcast(numpy.float32(2))))
    store(out, 56, multiply_add(first, second, second))
    folded = lane_min(first), lane_max(first), lane_sum(first)
    bits = first_bit(numpy.int64(40)), last_bit(numpy.int64(40))
    return folded, less_mask(first, second), differ_mask(first, second), bits


@jit
def _widened(array, out):  # type: ignore[no-untyped-def]
    store(out, 0, load(array, 1))


def test_eight_bytes_are_loaded_as_floats() -> None:
    array, out = numpy.arange(-5, 5, dtype=numpy.int8), numpy.empty(8, numpy.float32)
    _widened(array, out)
    assert numpy.array_equal(out, array[1:9])


def test_eight_floats_are_computed_with_as_single_ones() -> None:
    draw = numpy.random.default_rng(0)
    a, b = draw.normal(size=9).astype("f"), draw.normal(size=8).astype("f")
    b[3], x = a[4], a[1:]
    out = numpy.empty(64, numpy.float32)
    folded, under, other, bit = _operations(a, b, out)
    expected = [x + b, x - b, x * b, x / b, numpy.minimum(x, b), numpy.maximum(x, b)]
    assert numpy.array_equal(out[:48], numpy.concatenate(expected))
    assert numpy.array_equal(out[48:56], numpy.where(x < b, b, numpy.float32(2)))
    assert out[56:] == pytest.approx(x * b + b, rel=1e-5, abs=1e-6)
    assert folded[:2] == (x.min(), x.max())
    assert folded[2] == pytest.approx(x.sum(), rel=1e-5)
    assert [under >> lane & 1 for lane in range(8)] == list(x < b)
    assert [other >> lane & 1 for lane in range(8)] == list(x != b)
    assert bit == (3, 5)


@jit
def _cut(x, w, ways, order, scratch):  # type: ignore[no-untyped-def]
    sorted_order(x, order, numpy.empty(len(x), numpy.float32))
    return find_cuts(x, w, order, ways, scratch)


def _tried_one_by_one(
    x: Array, w: Array, order: NDArray[numpy.int64], ways: int
) -> tuple[float, int, int, int]:
    """Return the best of all ways in the arithmetic and order of ggml."""
    size, one, eighth = len(x), numpy.float32(1), numpy.float32(0.125)
    sumx, sumw = numpy.zeros(size + 1, numpy.float32), numpy.zeros(size + 1, numpy.float32)
    for j, i in enumerate(order):
        sumx[j + 1], sumw[j + 1] = sumx[j] + w[i] * x[i], sumw[j] + w[i]
    best, result = numpy.finfo(numpy.float32).min, (numpy.float32(0), -1, -1, -1)
    for i1 in range(size + 1):
        for i2 in range(i1, size + 1):
            for k in range(ways):
                if ways == 2:
                    middle = -eighth if k else eighth
                    levels = (middle - one, middle, middle + one)
                    cuts = (0, i1, i2, size)
                    runs = [
                        (sums[cuts[n + 1]] - sums[cuts[n]])
                        for sums in (sumx, sumw)
                        for n in (0, 1, 2)
                    ]
                    product = runs[0] * levels[0] + runs[1] * levels[1] + runs[2] * levels[2]
                    square = runs[3] * levels[0] * levels[0] + runs[4] * levels[1] * levels[1]
                    square += runs[5] * levels[2] * levels[2]
                else:
                    product, square = numpy.float32(0), numpy.float32(0)
                    for j, i in enumerate(order):
                        lowered = k >> 1 if i < size // 2 else k & 1
                        value = numpy.float32((j >= i1) + (j >= i2) - 1) + (
                            -eighth if lowered else eighth
                        )
                        product += w[i] * value * x[i]
                        square += w[i] * value * value
                if square > 0 and product * product > best * square:
                    best = product / square * product
                    result = (product / square, i1, i2, k)
    return result


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("ways", [2, 4])
def test_group_partition_equals_exhaustive_search(ways: int) -> None:
    size, draw = 64 // ways, numpy.random.default_rng(ways)
    halves = numpy.empty((2, 4 * size + 16), numpy.float32)
    wide = numpy.empty((2, 8 * size + 8), numpy.float32)
    sums = (numpy.empty(size + 1, numpy.float32), numpy.empty(size + 1, numpy.float32))
    scratch = (sums, halves[0], halves[1], wide[0], wide[1])
    order = numpy.empty(size, numpy.int64)
    for kind in range(8):
        x = draw.normal(size=size).astype("f")
        w = (draw.random(size) ** 2 + 0.01).astype("f")
        if kind == 1:
            x = numpy.round(x * 2).astype("f") / 2  # ties
        elif kind == 2:
            x, w = numpy.sign(x), numpy.ones_like(w)
        elif kind == 3:
            w[: size // 2] = 0
        elif kind == 4:
            x = abs(x)
        elif kind == 5:
            x *= numpy.float32(1e-12)  # sums so small that all ways are tried one by one
            w *= numpy.float32(1e-12)
        elif kind == 6:
            x[1:] = 0
        elif kind == 7:
            w = w**8
        result = _cut(x, w, ways, order, scratch)
        assert numpy.array_equal(order, numpy.argsort(x, kind="stable"))
        assert tuple(result) == _tried_one_by_one(x, w, order, ways)


@pytest.mark.parametrize("grid", sorted(LATTICES))
def test_chosen_point_is_nearest_under_weighted_squares(grid: str) -> None:
    lattice, draw = LATTICES[grid], torch.Generator().manual_seed(0)
    x, w = torch.randn(8, 64, generator=draw), torch.rand(8, 64, generator=draw) ** 2
    step = torch.rand(8, 64, generator=draw) + 2.5
    step = step.view(8, -1, 8)[..., :1].expand(8, 8, 8).reshape(8, 64) / max(lattice.magnitudes)
    shift = torch.full_like(x, -lattice.shift_size) if grid == "iq1_s" else None
    codes = nearest_weighted(x, step, shift, grid, w)
    result = decode_values(codes, grid) + (0 if shift is None else shift)
    width = lattice.width
    mine = ((x - result * step).square() * w).view(-1, width).sum(1)
    target = x.abs() if lattice.signs else x
    if lattice.signs == "even":
        odd = (x < 0).view(-1, 8).sum(1) % 2
        cheapest = (w * x * x).view(-1, 8).argmin(1)
        rows = odd.nonzero()[:, 0]
        target.view(-1, 8)[rows, cheapest[rows]] *= -1
    shifts = {
        "iq1_s": [-lattice.shift_size],
        "iq1_m": [lattice.shift_size, -lattice.shift_size],
    }.get(grid, [0.0])
    best = torch.full_like(mine, torch.inf)
    u, scale, weights = (part.reshape(-1, 1, width) for part in (target, step, w))
    for moved in shifts:
        every = (torch.from_numpy(lattice_points(grid)) + moved).unsqueeze(0)
        best = torch.minimum(best, ((u - every * scale).square() * weights).sum(2).amin(1))
    assert torch.allclose(mine, best, rtol=1e-4, atol=1e-6)


def test_columns_not_a_multiple_of_eight_are_encoded() -> None:
    draw = torch.Generator().manual_seed(1)
    x, step = torch.randn(3, 24, generator=draw), torch.full((3, 24), 0.2)
    whole = nearest_weighted(x, step, None, "iq3_s", torch.ones_like(x))
    part = nearest_weighted(x[:, 4:16], step[:, 4:16], None, "iq3_s", torch.ones(3, 12))
    assert torch.equal(part, whole[:, 1:4])


@jit
def _halves_of(values):  # type: ignore[no-untyped-def]
    return numpy.array([round_float16(value) for value in values])


def test_units_are_rounded_as_float16() -> None:
    values = torch.rand(4000, generator=torch.Generator().manual_seed(7)).mul(40).sub(28).exp2()
    values = torch.cat([values, torch.tensor([0.0, 2**-14, 2**-24, 2**-25, 1 + 2**-11, 65504.0])])
    result = torch.from_numpy(_halves_of(values.numpy()))
    assert torch.equal(result, values.half().float())


def even_rows() -> tuple[Tensor, Tensor]:
    """Return rows in which scales and points tie: few values, equal importances, one weight alone, tiny ones."""
    draw = torch.Generator().manual_seed(6)
    x = torch.round(torch.randn(12, 512, generator=draw) * 2) / 4
    x[4:6] = torch.sign(x[4:6] + 0.1)
    x[6], x[7, 1:] = 0.5, 0
    x[8] *= 1e-9
    x[9] *= 1e-16
    x[10] = torch.where(torch.rand(512, generator=draw) < 0.9, 0.0, 1.0)
    return x, torch.ones(512)


# sha256 of ggml's blocks of them; of IQ1_M of ours, since where its ways tie ggml's sums, in another order, part them.
TIES = {
    "iq1_m": "b4e17cf6b2e22cdf1810cbd97a803d97",
    "iq1_s": "3f1e7f571ba9ec011f066ddf8550f54e",
    "iq2_s": "fa945e8bd4eac52d4adb9ea17ab01976",
    "iq2_xs": "1a377157d2339d8001399116f3fd270c",
}


@pytest.mark.parametrize("grid", mark_others_thorough(sorted(LATTICES), *sorted(LATTICES)[::2]))
def test_ties_break_as_in_ggml(grid: str) -> None:
    x, importance = even_rows()
    mine = pack_blocks(packer.encode_rows(x, parse(grid), importance))
    if grid in TIES:
        assert hashlib.sha256(mine.numpy().tobytes()).hexdigest()[:32] == TIES[grid]
    else:
        assert torch.equal(mine, quantized(x, grid, importance))
