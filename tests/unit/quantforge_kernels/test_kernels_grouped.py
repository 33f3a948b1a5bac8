"""Grouped products equal their float64 definition, row by row: on a GPU where there is one, interpreted elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantforge_kernels import fallback
from quantforge_kernels.cpu import instruction_sets, packed_integers
from quantforge_kernels.grouped import (
    ExpertRouting,
    GroupedMatmulSpec,
    make_looped_kernel,
    prepare_stacked,
    select_matrix,
)
from quantforge_kernels.matmul_spec import MatmulSpec
from quantforge_kernels.select import GROUPED_KERNELS, select_grouped_kernel
from tests.thorough import parametrize_each_value, thorough_case
from tests.triton_kernels import (
    DEVICE,
    WEIGHT_FORMATS,
    make_spec,
    random_weights,
    reference_output,
    relative_error,
)

COUNT, FEW = 6, 3  # matrices
# As those of single products (test_kernels_triton).
ROUNDING = {torch.float32: 2e-6, torch.float16: 1.2e-3, torch.bfloat16: 1.2e-2}


def owned(rows: int, each: int, count: int = COUNT) -> ExpertRouting:
    """Different owners for each row; the last matrix never is one."""
    rng = torch.Generator().manual_seed(rows)
    index = [torch.randperm(count - 1, generator=rng)[:each] for _ in range(rows)]
    return ExpertRouting(torch.stack(index).to(DEVICE), count)


def stacked(spec: MatmulSpec, kernel, count: int = COUNT):
    matrices = [random_weights(spec, seed) for seed in range(count)]
    if "table" in matrices[0][1]:
        matrices = [
            (codes, values | {"table": matrices[0][1]["table"]}) for codes, values in matrices
        ]
    return matrices, prepare_stacked(iter(matrices), GroupedMatmulSpec(spec, count), kernel)


def expected_products(spec: MatmulSpec, matrices, x, routing: ExpertRouting):
    each = len(routing.expert_of_pair) // len(x)
    lines = [
        reference_output(spec, matrices[int(owner)], x[number // each][None])
        for number, owner in enumerate(routing.expert_of_pair)
    ]
    return torch.cat(lines)


def rows_of(spec: MatmulSpec, rows: int):
    rng = torch.Generator().manual_seed(rows)
    return torch.randn(rows, spec.in_features, generator=rng).to(DEVICE, spec.dtype)


def test_expert_routing_sorts_and_counts_pairs():
    routing = ExpertRouting(torch.tensor([[4, 1], [1, 0], [4, 3]]), COUNT)
    assert routing.sorted_pairs.tolist() == [3, 1, 2, 5, 0, 4]
    assert routing.expert_starts.tolist() == [0, 1, 3, 3, 4, 6, 6]
    results = [(number, pairs.tolist()) for number, pairs in routing.pairs_by_expert()]
    assert results == [(0, [3]), (1, [1, 2]), (3, [5]), (4, [0, 4])]


@pytest.mark.parametrize(
    ("weight_format", "rows", "each"),
    [
        *((weight_format, 7, 3) for weight_format in WEIGHT_FORMATS),
        ("int4", 1, 2),
        ("int4", 3, 1),
        ("int4", 0, 2),
    ],
)
def test_looped_grouped_product_equals_the_definition(weight_format, rows, each):
    spec = make_spec(**WEIGHT_FORMATS[weight_format], shape=(5, 256))
    kernel = make_looped_kernel(fallback.KERNEL)
    matrices, packed = stacked(spec, kernel)
    x = rows_of(spec, rows)
    routing = owned(rows, each) if rows else ExpertRouting(torch.zeros(0, each), COUNT)
    y = kernel.matmul(x, routing, packed, GroupedMatmulSpec(spec, COUNT))
    assert y.shape == (rows * each, 5)
    assert (
        not rows
        or relative_error(y, expected_products(spec, matrices, x, routing))
        < ROUNDING[torch.float32]
    )
    codes, values = matrices[3]
    single = fallback.prepare(codes, values, spec)
    assert all(torch.equal(value, single[name]) for name, value in select_matrix(packed, 3).items())


def test_matrices_with_different_parameters_are_not_stacked():
    spec = make_spec(shape=(5, 256))
    kernel = make_looped_kernel(fallback.KERNEL)
    matrices = [random_weights(spec, seed) for seed in range(2)]
    wide = (matrices[1][0], {name: value.float() for name, value in matrices[1][1].items()})
    with pytest.raises(ValueError, match="scales of matrix 1 differs"):
        prepare_stacked(iter([matrices[0], wide]), GroupedMatmulSpec(spec, 2), kernel)
    spec = make_spec(**WEIGHT_FORMATS["nf4"], shape=(5, 256))
    with pytest.raises(ValueError, match="table of matrix 1 is not that of the first"):
        prepare_stacked(
            (random_weights(spec, seed) for seed in range(2)), GroupedMatmulSpec(spec, 2), kernel
        )


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize(("rows", "each"), [(1, 2), thorough_case(25, 1)])
def test_every_weight_format_in_one_launch(weight_format, rows, each):
    """Few pairs one by one; more in strips, the last of each owner not full."""
    pytest.importorskip("triton")
    from quantforge_kernels.gpu import plane_products

    spec = make_spec(**WEIGHT_FORMATS[weight_format], shape=(11, 256))
    matrices, packed = stacked(spec, plane_products.GROUPED_KERNELS[0], FEW)
    x, routing = rows_of(spec, rows), owned(rows, each, FEW)
    y = plane_products.grouped_matmul(x, routing, packed, GroupedMatmulSpec(spec, FEW))
    assert y.shape == (rows * each, 11)
    assert (
        relative_error(y, expected_products(spec, matrices, x, routing)) < ROUNDING[torch.float32]
    )


@parametrize_each_value(
    ("kernel", ["matvec", "rows"]),
    (
        "dtype, weight_format",
        [
            *(
                (torch.float16, weight_format)
                for weight_format in ("int4", "int4 asymmetric", "nf4", "fp8 in tiles", "q4_k")
            ),
            *(
                thorough_case(torch.bfloat16, weight_format)
                for weight_format in ("int4", "fp8 in tiles")
            ),
        ],
    ),
)
def test_sixteen_bit_inputs_in_both_kernels(kernel, dtype, weight_format):
    pytest.importorskip("triton")
    from quantforge_kernels.gpu import plane_products

    spec = make_spec(**WEIGHT_FORMATS[weight_format], shape=(11, 256), dtype=dtype)
    matrices, packed = stacked(spec, plane_products.GROUPED_KERNELS[0], FEW)
    x, routing = rows_of(spec, 3), owned(3, 2, FEW)
    group = GroupedMatmulSpec(spec, FEW)
    y = plane_products.launch_grouped(kernel, x, routing, packed, group)
    assert y.dtype == dtype
    assert relative_error(y, expected_products(spec, matrices, x, routing)) < ROUNDING[dtype]


@pytest.mark.parametrize("pairs", [70, 150, 400])
def test_strips_of_any_width(pairs):
    """16, 32 and 64 pairs of one owner together; one owner has most of them, and several have none."""
    pytest.importorskip("triton")
    from quantforge_kernels.gpu import plane_products

    spec = make_spec("int", 4, 64, False, (7, 128))
    matrices, packed = stacked(spec, plane_products.GROUPED_KERNELS[0])
    index = (torch.arange(pairs) % 7).clamp(max=3)
    index[index == 1] = 3
    x, routing = rows_of(spec, pairs), ExpertRouting(index[:, None].to(DEVICE), COUNT)
    widths = {70: 16, 150: 32, 400: 64}
    assert plane_products.choose_strip_rows(pairs, COUNT) == widths[pairs]
    y = plane_products.launch_grouped("rows", x, routing, packed, GroupedMatmulSpec(spec, COUNT))
    assert (
        relative_error(y, expected_products(spec, matrices, x, routing)) < ROUNDING[torch.float32]
    )


@pytest.mark.parametrize(("out", "tile"), [(140, 128), (30, 8)])
def test_tiles_of_each_matrix_may_be_cut_short(out, tile):
    pytest.importorskip("triton")
    from quantforge_kernels.gpu import plane_products

    spec = make_spec("fp8", 8, 128, True, (out, 256), tile)
    matrices, packed = stacked(spec, plane_products.GROUPED_KERNELS[-1])
    x, routing = rows_of(spec, 2), owned(2, 2)
    for kernel in ("matvec", "rows"):
        y = plane_products.launch_grouped(
            kernel, x, routing, packed, GroupedMatmulSpec(spec, COUNT)
        )
        assert (
            relative_error(y, expected_products(spec, matrices, x, routing))
            < ROUNDING[torch.float32]
        )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "triton-int-grouped"),
        ({"grid": "table"}, "triton-table-grouped"),
        ({"grid": "fp8", "bits": 8}, "triton-fp8-grouped"),
        ({"bits": 8, "activation_kind": "int8", "group_size": 256}, "triton-w8a8"),
        ({"bits": 4, "activation_kind": "int8"}, "reference"),
    ],
)
def test_selection_for_a_gpu(changes, name):
    pytest.importorskip("triton")
    spec = MatmulSpec(48, 256, 4, 128, True, torch.bfloat16, "cuda")
    chosen = select_grouped_kernel(GroupedMatmulSpec(replace(spec, **changes), 8))
    assert chosen.name == name
    assert chosen.needs_host_sync == (chosen not in GROUPED_KERNELS)


VECTORS = [
    {"bits": 4, "group": 128}, {"bits": 4, "group": 32, "symmetric": False},
    {"bits": 3, "group": 64}, {"bits": 8, "group": 256},
    {"bits": 4, "group": 32, "symmetric": False, "has_minima": True, "superblock_size": 256},
    {"bits": 2, "group": 16, "symmetric": False, "has_minima": True, "superblock_size": 256, "lower_encoding": "pairs"},
    {"bits": 2, "group": 256},
]  # fmt: skip


@pytest.mark.skipif(instruction_sets.best_instruction_set() is None, reason="no vectors")
@parametrize_each_value(
    ("weight_format", VECTORS),
    (
        "limit, rows, each",
        [("avx2", 1, 3), ("avx512vnni", 3, 1), ("avx512vnni", 4, 2), ("avx2", 12, 2)],
    ),
)
def test_grouped_product_of_cpu_programs(weight_format, limit, rows, each, monkeypatch):
    """As single products, to the bit; few pairs by one program, more of them gathered."""
    monkeypatch.setenv(instruction_sets.LIMIT_VARIABLE, limit)
    instruction_sets.best_instruction_set.cache_clear()
    packed_integers.get_product_plan.cache_clear()
    try:
        spec = replace(
            make_spec(**weight_format, shape=(37, 512), dtype=torch.bfloat16), device="cpu"
        )
        kernel = select_grouped_kernel(GroupedMatmulSpec(spec, COUNT))
        assert kernel.name == "llvm-int-grouped"
        matrices, packed = stacked(spec, kernel)
        x, routing = rows_of(spec, rows).cpu(), owned(rows, each)
        y = kernel.matmul(x, routing, packed, GroupedMatmulSpec(spec, COUNT))
        assert y.shape == (rows * each, 37)
        for number, owner in enumerate(routing.expert_of_pair.tolist()):
            row = x[number // each][None]
            single = packed_integers.matmul(row, select_matrix(packed, owner), spec)
            assert torch.equal(y[number], single[0])
        assert (
            relative_error(y, expected_products(spec, matrices, x, routing))
            < ROUNDING[torch.bfloat16]
        )
    finally:
        instruction_sets.best_instruction_set.cache_clear()
        packed_integers.get_product_plan.cache_clear()


@pytest.mark.skipif(instruction_sets.best_instruction_set() is None, reason="no vectors")
@pytest.mark.parametrize("rows", [2, 12])
def test_activations_of_eight_bits_in_grouped_products(rows):
    spec = replace(make_spec("int", 4, 64, False, (80, 512), dtype=torch.bfloat16), device="cpu")
    spec = replace(spec, input_bits=8)
    kernel = select_grouped_kernel(GroupedMatmulSpec(spec, COUNT))
    assert kernel.name == "llvm-int8-grouped"
    matrices, packed = stacked(spec, kernel)
    x, routing = rows_of(spec, rows).cpu(), owned(rows, 2)
    y = kernel.matmul(x, routing, packed, GroupedMatmulSpec(spec, COUNT))
    for number, owner in enumerate(routing.expert_of_pair.tolist()):
        single = packed_integers.matmul(x[number // 2][None], select_matrix(packed, owner), spec)
        assert torch.equal(y[number], single[0])
    assert 4e-3 < relative_error(y, expected_products(spec, matrices, x, routing)) < 2e-2


@pytest.mark.skipif(instruction_sets.best_instruction_set() is None, reason="no vectors")
def test_threads_change_no_bit_of_a_grouped_product():
    spec = replace(make_spec("int", 4, 64, False, (80, 512), dtype=torch.bfloat16), device="cpu")
    kernel = select_grouped_kernel(GroupedMatmulSpec(spec, COUNT))
    _, packed = stacked(spec, kernel)
    x, routing, results = rows_of(spec, 2).cpu(), owned(2, 3), []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(kernel.matmul(x, routing, packed, GroupedMatmulSpec(spec, COUNT)))
    torch.set_num_threads(before)
    assert torch.equal(*results)
