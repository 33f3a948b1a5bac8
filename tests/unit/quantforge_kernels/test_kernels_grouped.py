"""Grouped products equal their float64 definition, row by row: on a GPU where there is one, interpreted elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantforge_kernels import fallback
from quantforge_kernels.cpu import features, packed_integers
from quantforge_kernels.grouped import GroupedProblem, Owners, by_matrix, matrix, stack
from quantforge_kernels.problem import Problem
from quantforge_kernels.select import GROUPED, select_grouped
from tests.thorough import each_value, further
from tests.triton_kernels import DEVICE, FORMS, expected, problem, relative_error, weights

COUNT, FEW = 6, 3  # matrices
# As those of single products (test_kernels_triton).
ROUNDING = {torch.float32: 2e-6, torch.float16: 1.2e-3, torch.bfloat16: 1.2e-2}


def owned(rows: int, each: int, count: int = COUNT) -> Owners:
    """Different owners for each row; the last matrix never is one."""
    rng = torch.Generator().manual_seed(rows)
    index = [torch.randperm(count - 1, generator=rng)[:each] for _ in range(rows)]
    return Owners(torch.stack(index).to(DEVICE), count)


def stacked(task: Problem, kernel, count: int = COUNT):
    given = [weights(task, seed) for seed in range(count)]
    if "table" in given[0][1]:
        given = [(codes, values | {"table": given[0][1]["table"]}) for codes, values in given]
    return given, stack(iter(given), GroupedProblem(task, count), kernel)


def wanted(task: Problem, given, x, owners: Owners):
    each = len(owners.pairs) // len(x)
    lines = [
        expected(task, given[int(owner)], x[number // each][None])
        for number, owner in enumerate(owners.pairs)
    ]
    return torch.cat(lines)


def rows_of(task: Problem, rows: int):
    rng = torch.Generator().manual_seed(rows)
    return torch.randn(rows, task.in_features, generator=rng).to(DEVICE, task.dtype)


def test_owners_are_sorted_and_counted():
    owners = Owners(torch.tensor([[4, 1], [1, 0], [4, 3]]), COUNT)
    assert owners.order.tolist() == [3, 1, 2, 5, 0, 4]
    assert owners.starts.tolist() == [0, 1, 3, 3, 4, 6, 6]
    found = [(number, pairs.tolist()) for number, pairs in owners.groups()]
    assert found == [(0, [3]), (1, [1, 2]), (3, [5]), (4, [0, 4])]


@pytest.mark.parametrize(
    ("form", "rows", "each"),
    [*((form, 7, 3) for form in FORMS), ("int4", 1, 2), ("int4", 3, 1), ("int4", 0, 2)],
)
def test_products_one_after_the_other(form, rows, each):
    task = problem(**FORMS[form], shape=(5, 256))
    kernel = by_matrix(fallback.KERNEL)
    given, packed = stacked(task, kernel)
    x = rows_of(task, rows)
    owners = owned(rows, each) if rows else Owners(torch.zeros(0, each), COUNT)
    y = kernel.matmul(x, owners, packed, GroupedProblem(task, COUNT))
    assert y.shape == (rows * each, 5)
    assert not rows or relative_error(y, wanted(task, given, x, owners)) < ROUNDING[torch.float32]
    codes, values = given[3]
    single = fallback.prepare(codes, values, task)
    assert all(torch.equal(value, single[name]) for name, value in matrix(packed, 3).items())


def test_matrices_that_differ_are_not_stacked():
    task = problem(shape=(5, 256))
    kernel = by_matrix(fallback.KERNEL)
    given = [weights(task, seed) for seed in range(2)]
    wide = (given[1][0], {name: value.float() for name, value in given[1][1].items()})
    with pytest.raises(ValueError, match="scales of matrix 1 differs"):
        stack(iter([given[0], wide]), GroupedProblem(task, 2), kernel)
    task = problem(**FORMS["nf4"], shape=(5, 256))
    with pytest.raises(ValueError, match="table of matrix 1 is not that of the first"):
        stack((weights(task, seed) for seed in range(2)), GroupedProblem(task, 2), kernel)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "each"), [(1, 2), further(25, 1)])
def test_every_form_in_one_launch(form, rows, each):
    """Few pairs one by one; more in strips, the last of each owner not full."""
    pytest.importorskip("triton")
    from quantforge_kernels.gpu import plane_products

    task = problem(**FORMS[form], shape=(11, 256))
    given, packed = stacked(task, plane_products.GROUPED[0], FEW)
    x, owners = rows_of(task, rows), owned(rows, each, FEW)
    y = plane_products.grouped_matmul(x, owners, packed, GroupedProblem(task, FEW))
    assert y.shape == (rows * each, 11)
    assert relative_error(y, wanted(task, given, x, owners)) < ROUNDING[torch.float32]


@each_value(
    ("kernel", ["matvec", "rows"]),
    (
        "dtype, form",
        [
            *(
                (torch.float16, form)
                for form in ("int4", "int4 asymmetric", "nf4", "fp8 in tiles", "q4_k")
            ),
            *(further(torch.bfloat16, form) for form in ("int4", "fp8 in tiles")),
        ],
    ),
)
def test_sixteen_bits_by_either_kernel(kernel, dtype, form):
    pytest.importorskip("triton")
    from quantforge_kernels.gpu import plane_products

    task = problem(**FORMS[form], shape=(11, 256), dtype=dtype)
    given, packed = stacked(task, plane_products.GROUPED[0], FEW)
    x, owners = rows_of(task, 3), owned(3, 2, FEW)
    group = GroupedProblem(task, FEW)
    y = plane_products.launch_grouped(kernel, x, owners, packed, group)
    assert y.dtype == dtype
    assert relative_error(y, wanted(task, given, x, owners)) < ROUNDING[dtype]


@pytest.mark.parametrize("pairs", [70, 150, 400])
def test_strips_of_any_width(pairs):
    """16, 32 and 64 pairs of one owner together; one owner has most of them, and several have none."""
    pytest.importorskip("triton")
    from quantforge_kernels.gpu import plane_products

    task = problem("int", 4, 64, False, (7, 128))
    given, packed = stacked(task, plane_products.GROUPED[0])
    index = (torch.arange(pairs) % 7).clamp(max=3)
    index[index == 1] = 3
    x, owners = rows_of(task, pairs), Owners(index[:, None].to(DEVICE), COUNT)
    widths = {70: 16, 150: 32, 400: 64}
    assert plane_products.strip_of(pairs, COUNT) == widths[pairs]
    y = plane_products.launch_grouped("rows", x, owners, packed, GroupedProblem(task, COUNT))
    assert relative_error(y, wanted(task, given, x, owners)) < ROUNDING[torch.float32]


@pytest.mark.parametrize(("out", "tile"), [(140, 128), (30, 8)])
def test_tiles_of_each_matrix_may_be_cut_short(out, tile):
    pytest.importorskip("triton")
    from quantforge_kernels.gpu import plane_products

    task = problem("fp8", 8, 128, True, (out, 256), tile)
    given, packed = stacked(task, plane_products.GROUPED[-1])
    x, owners = rows_of(task, 2), owned(2, 2)
    for kernel in ("matvec", "rows"):
        y = plane_products.launch_grouped(kernel, x, owners, packed, GroupedProblem(task, COUNT))
        assert relative_error(y, wanted(task, given, x, owners)) < ROUNDING[torch.float32]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "triton-int-grouped"),
        ({"grid": "table"}, "triton-table-grouped"),
        ({"grid": "fp8", "bits": 8}, "triton-fp8-grouped"),
        ({"bits": 8, "activation": "int8", "group_size": 256}, "triton-w8a8"),
        ({"bits": 4, "activation": "int8"}, "reference"),
    ],
)
def test_selection_for_a_gpu(changes, name):
    pytest.importorskip("triton")
    task = Problem(48, 256, 4, 128, True, torch.bfloat16, "cuda")
    chosen = select_grouped(GroupedProblem(replace(task, **changes), 8))
    assert chosen.name == name
    assert chosen.waits == (chosen not in GROUPED)


VECTORS = [
    {"bits": 4, "group": 128}, {"bits": 4, "group": 32, "symmetric": False},
    {"bits": 3, "group": 64}, {"bits": 8, "group": 256},
    {"bits": 4, "group": 32, "symmetric": False, "minima": True, "superblock": 256},
    {"bits": 2, "group": 16, "symmetric": False, "minima": True, "superblock": 256, "lower": "pairs"},
    {"bits": 2, "group": 256},
]  # fmt: skip


@pytest.mark.skipif(features.feature() is None, reason="no vectors")
@each_value(
    ("form", VECTORS),
    (
        "limit, rows, each",
        [("avx2", 1, 3), ("avx512vnni", 3, 1), ("avx512vnni", 4, 2), ("avx2", 12, 2)],
    ),
)
def test_programs_of_a_processor(form, limit, rows, each, monkeypatch):
    """As single products, to the bit; few pairs by one program, more of them gathered."""
    monkeypatch.setenv(features.LIMIT, limit)
    features.feature.cache_clear()
    packed_integers.plan_of.cache_clear()
    try:
        task = replace(problem(**form, shape=(37, 512), dtype=torch.bfloat16), device="cpu")
        kernel = select_grouped(GroupedProblem(task, COUNT))
        assert kernel.name == "llvm-int-grouped"
        given, packed = stacked(task, kernel)
        x, owners = rows_of(task, rows).cpu(), owned(rows, each)
        y = kernel.matmul(x, owners, packed, GroupedProblem(task, COUNT))
        assert y.shape == (rows * each, 37)
        for number, owner in enumerate(owners.pairs.tolist()):
            row = x[number // each][None]
            single = packed_integers.matmul(row, matrix(packed, owner), task)
            assert torch.equal(y[number], single[0])
        assert relative_error(y, wanted(task, given, x, owners)) < ROUNDING[torch.bfloat16]
    finally:
        features.feature.cache_clear()
        packed_integers.plan_of.cache_clear()


@pytest.mark.skipif(features.feature() is None, reason="no vectors")
@pytest.mark.parametrize("rows", [2, 12])
def test_activations_of_eight_bits_in_grouped_products(rows):
    task = replace(problem("int", 4, 64, False, (80, 512), dtype=torch.bfloat16), device="cpu")
    task = replace(task, input_bits=8)
    kernel = select_grouped(GroupedProblem(task, COUNT))
    assert kernel.name == "llvm-int8-grouped"
    given, packed = stacked(task, kernel)
    x, owners = rows_of(task, rows).cpu(), owned(rows, 2)
    y = kernel.matmul(x, owners, packed, GroupedProblem(task, COUNT))
    for number, owner in enumerate(owners.pairs.tolist()):
        single = packed_integers.matmul(x[number // 2][None], matrix(packed, owner), task)
        assert torch.equal(y[number], single[0])
    assert 4e-3 < relative_error(y, wanted(task, given, x, owners)) < 2e-2


@pytest.mark.skipif(features.feature() is None, reason="no vectors")
def test_threads_change_no_bit_of_a_grouped_product():
    task = replace(problem("int", 4, 64, False, (80, 512), dtype=torch.bfloat16), device="cpu")
    kernel = select_grouped(GroupedProblem(task, COUNT))
    _, packed = stacked(task, kernel)
    x, owners, found = rows_of(task, 2).cpu(), owned(2, 3), []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(kernel.matmul(x, owners, packed, GroupedProblem(task, COUNT)))
    torch.set_num_threads(before)
    assert torch.equal(*found)
