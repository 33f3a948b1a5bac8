"""Triton kernels equal their float64 definitions: on a GPU where there is one, interpreted elsewhere."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import torch
from hypothesis import given as given_values
from hypothesis import settings
from hypothesis import strategies as st

from quantforge_kernels import fallback
from quantforge_kernels.bit_planes import PLANE_WIDTHS, choose_chunk, pack_bit_planes
from quantforge_kernels.gpu import plane_products, w8a8_products
from quantforge_kernels.matmul_spec import MatmulSpec
from quantforge_kernels.select import KERNELS, select_kernel
from tests.thorough import parametrize_each_value
from tests.triton_kernels import (
    DEVICE,
    WEIGHT_FORMATS,
    make_spec,
    random_activations,
    random_weights,
    reference_output,
    relative_error,
)

# What rounding to a type costs, relative to the norm of the result: of the result alone, and of the
# weights as well, which the kernels for several rows round to the type of x. The interpreter cuts
# bfloat16 off.
ROUNDING = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 6e-3}


def run(spec: MatmulSpec, rows: int = 1):
    matrices = random_weights(spec)
    x = random_activations(spec, rows)
    y = plane_products.matmul(x, plane_products.prepare(*matrices, spec), spec)
    assert y.shape == (rows, spec.out_features)
    assert y.dtype == spec.dtype
    return relative_error(y, reference_output(spec, matrices, x))


def from_planes(planes, bits, chunk, columns):
    """The codes ``[out, columns]`` of `pack_bit_planes`."""
    rows, chunks, codes, low = len(planes[0]), -(-columns // chunk), 0, 0
    for plane, width in zip(planes, PLANE_WIDTHS[bits], strict=True):
        part = plane[:, : chunks * chunk * width // 32].view(rows, chunks, -1)
        values = [(part >> (width * field)) & (2**width - 1) for field in range(32 // width)]
        codes = codes | torch.stack(values, dim=2).view(rows, -1).byte() << low
        low += width
    return codes[:, :columns]


@parametrize_each_value(
    ("bits", range(1, 9)),
    ("columns, group", [(1, 8), (31, 32), (128, 96), (200, 128)]),
)
def test_bit_planes_are_lossless_and_dense(bits, columns, group):
    codes = torch.randint(0, 2**bits, (3, columns), dtype=torch.uint8)
    chunk, _ = choose_chunk(bits, group)
    planes = pack_bit_planes(codes, bits, chunk)
    assert torch.equal(from_planes(planes, bits, chunk, columns), codes)
    padded = columns + -columns % chunk
    least = 3 * padded * bits // 32
    assert least <= sum(plane.numel() for plane in planes) < least + 3 * 4 * len(planes)


def test_word_layout_matches_its_definition():
    codes = torch.arange(256, dtype=torch.uint8)[None] % 16
    (words,) = pack_bit_planes(codes, 4, 128)
    assert words.shape == (1, 32)
    for chunk, j, field in ((0, 0, 0), (0, 3, 5), (1, 15, 7)):
        column = chunk * 128 + field * 16 + j
        assert (int(words[0, chunk * 16 + j]) >> (4 * field)) & 15 == column % 16


BITS = (2, 3, 4, 8)
# All of one shape; of the others every number of bits, in turn of one row and of several, symmetric and not.
INTEGERS = [
    *((rows, bits, symmetric, (5, 256), 128) for rows in (1, 3) for bits in BITS for symmetric in (True, False)),
    *(((1, 3)[(at + place) % 2], bits, place == 1, *shape)
      for at, bits in enumerate(BITS)
      for place, shape in enumerate((((9, 96), 32), ((3, 72), 24), ((17, 100), 100)))),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "bits", "symmetric", "shape", "group"), INTEGERS)
def test_integer_products_equal_the_definition(rows, bits, symmetric, shape, group):
    assert run(make_spec("int", bits, group, symmetric, shape), rows) < ROUNDING[torch.float32]


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 65])
def test_every_weight_format_equals_the_definition(weight_format, rows, monkeypatch):
    """One row, a few, and so many that slabs of the weight are decoded."""
    monkeypatch.setattr(plane_products, "SLAB_BYTES", 5 * 256 * 4)
    spec = make_spec(**WEIGHT_FORMATS[weight_format], shape=(11, 256))
    assert run(spec, rows) < ROUNDING[torch.float32]


SIXTEEN = ["int4", "int3", "int8 per row", "nf4", "nvfp4", "fp8 e5m2", "q2_k", "q4_k"]


@pytest.mark.parametrize(  # every weight_format with each type and each number of rows
    ("rows", "dtype", "weight_format"),
    [
        (rows, (torch.float16, torch.bfloat16)[(rows + at) // 2 % 2], weight_format)
        for rows in (1, 3)
        for at, weight_format in enumerate(SIXTEEN)
    ],
)
def test_sixteen_bit_inputs_stay_within_rounding(rows, dtype, weight_format):
    """The magic numbers of one row stay as exact as the type; so do weights rounded to it."""
    error = run(make_spec(**WEIGHT_FORMATS[weight_format], shape=(24, 256), dtype=dtype), rows)
    assert ROUNDING[dtype] / 40 < error < ROUNDING[dtype] * (1 if rows == 1 else 2)


@pytest.mark.parametrize(("shape", "group"), [((6, 72), 8), ((7, 100), 100)])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("grid", ["table", "fp8"])
def test_odd_groups(grid, shape, group, rows):
    bits = 4 if grid == "table" else 8
    assert run(make_spec(grid, bits, group, True, shape), rows) < ROUNDING[torch.float32]


@parametrize_each_value(
    ("shape, tile_rows", [((130, 256), 128), ((140, 200), 128), ((30, 300), 8)]),
    ("rows", [1, 66]),
)
def test_tiles_may_be_cut_short(shape, tile_rows, rows):
    assert run(make_spec("fp8", 8, 128, True, shape, tile_rows), rows) < ROUNDING[torch.float32]


@pytest.mark.parametrize(("grid", "least"), [("fp8", 0x7F), ("e5m2", 0x7C)])
def test_every_float8_is_decoded_and_what_is_not_finite_is_refused(grid, least):
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).to(DEVICE)
    spec = make_spec(grid, 8, 128, shape=(2, 128))
    scales = {"scales": torch.ones(2, 1, device=DEVICE)}
    for row in range(2):
        for index in range(least, 128):
            single = torch.zeros_like(codes)
            single[row, index] = codes[row, index]
            with pytest.raises(ValueError, match="not finite"):
                plane_products.prepare(single, scales, spec)
    codes[:, least:] = 0
    packed = plane_products.prepare(codes, scales, spec)
    output = plane_products.decode_weight(packed, spec, torch.float32)
    assert torch.equal(output, codes.view(fallback.FLOAT8_DTYPES[grid]).float())


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_repacked_weights_are_as_small_as_the_file(weight_format):
    spec = make_spec(**WEIGHT_FORMATS[weight_format], shape=(256, 2048))
    codes, parameters = random_weights(spec)
    held_bytes = sum(
        part.nbytes for part in plane_products.prepare(codes, parameters, spec).values()
    )
    small = {"zeros": 8 / spec.bits} | (
        {"scales": 8 / 6, "mins": 8 / 6} if spec.superblock_size else {}
    )
    if weight_format == "q2_k":
        small = dict.fromkeys(("scales", "mins"), 2.0)
    if weight_format == "nvfp4":
        small = {}
    if weight_format == "q6_k":
        small = {}
    stored = codes.numel() * spec.bits / 8 + sum(
        value.nbytes / small.get(name, 1) for name, value in parameters.items()
    )
    assert held_bytes <= 1.1 * stored


@pytest.mark.parametrize("rows", [0, 1, 3, 70])
def test_empty_inputs_give_empty_outputs(rows):
    spec = make_spec(shape=(4, 128))
    matrices, x = random_weights(spec), random_activations(spec, rows)
    y = plane_products.matmul(x, plane_products.prepare(*matrices, spec), spec)
    assert y.shape == (rows, 4)


@parametrize_each_value(
    ("dtype", [torch.float32, torch.bfloat16]),
    ("rows", [1, 2, 65]),
)
def test_nan_inputs_and_scales_propagate(dtype, rows):
    spec = make_spec(shape=(5, 256), dtype=dtype)
    matrices, x = random_weights(spec), random_activations(spec, rows)
    x[0, 200] = float("nan")
    packed = plane_products.prepare(*matrices, spec)
    y = plane_products.matmul(x, packed, spec)
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()
    scales = matrices[1]["scales"].clone()
    scales[2, 1] = float("nan")
    packed = plane_products.prepare(matrices[0], {"scales": scales}, spec)
    y = plane_products.matmul(random_activations(spec, rows), packed, spec)
    assert y[:, 2].isnan().all()
    assert y[:, [0, 1, 3, 4]].isfinite().all()


@parametrize_each_value(
    ("kernel", ["matvec", "rows"]),
    ("tile", [(8, 512, 1, 1), (16, 512, 2, 3), (16, 1024, 4, 2), (32, 512, 1, 7)]),
)
def test_any_tile_and_split_gives_the_same(kernel, tile):
    spec = make_spec("int", 4, 64, False, (37, 1600))
    matrices, x = random_weights(spec), random_activations(spec, 1 if kernel == "matvec" else 5)
    packed = plane_products.prepare(*matrices, spec)
    y = plane_products.launch(kernel, x, packed, spec, plane_products.Tile(*tile))
    assert relative_error(y, reference_output(spec, matrices, x)) < ROUNDING[torch.float32]


@parametrize_each_value(
    ("bits", [2, 3, 4, 8]),
    ("symmetric", [True, False]),
)
def test_decoding_modes_agree_on_all_codes(bits, symmetric):
    """All codes, by the magic numbers and by conversion; on a GPU inline assembly to the bit."""
    spec = make_spec("int", bits, 128, symmetric, (16, 256), dtype=torch.bfloat16)
    matrices, x = random_weights(spec), random_activations(spec)
    packed = plane_products.prepare(*matrices, spec)
    results = [
        plane_products.launch(
            "matvec",
            x,
            packed,
            spec,
            plane_products.Tile(8, 256, 1, 2),
            mode,
        )
        for mode in ((0, 1) if DEVICE == "cpu" else (0, 1, 2))
    ]
    reference = reference_output(spec, matrices, x)
    assert all(relative_error(y, reference) < ROUNDING[torch.bfloat16] for y in results)
    assert results[1:] == results[1:2] * (len(results) - 1) or torch.equal(*results[1:])


@settings(max_examples=8, deadline=None)
@given_values(
    bits=st.integers(1, 8),
    group=st.sampled_from([1, 3, 8, 16, 24, 32, 40, 64]),
    groups=st.integers(1, 2),
    out=st.integers(1, 9),
    rows=st.integers(1, 4),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_integer_products_equal_the_definition(
    bits, group, groups, out, rows, symmetric, seed
):
    spec = make_spec("int", bits, group, symmetric, (out, group * groups))
    matrices, x = random_weights(spec, seed), random_activations(spec, rows, seed)
    y = plane_products.matmul(x, plane_products.prepare(*matrices, spec), spec).double()
    reference = reference_output(spec, matrices, x)
    spread = (
        x.double().abs().sum(1, keepdim=True) * matrices[1]["scales"].double().abs().max() * 2**bits
    )
    assert ((y - reference).abs() <= 1e-6 * spread).all()


@pytest.mark.parametrize("rows", [0, 1, 17])
@pytest.mark.parametrize(
    ("grid", "shape", "group", "tile_rows"),
    [("int", (70, 100), 100, 1), ("fp8", (9, 72), 72, 1), ("fp8", (200, 256), 128, 128)],
)
def test_eight_bit_products(rows, grid, shape, group, tile_rows):
    kind = "int8" if grid == "int" else "fp8"
    spec = make_spec(grid, 8, group, True, shape, tile_rows, activation_kind=kind)
    matrices, x = random_weights(spec), random_activations(spec, rows)
    packed = w8a8_products.prepare(*matrices, spec)
    y = w8a8_products.matmul(x, packed, spec)
    assert y.shape == (rows, shape[0])
    if rows:
        assert relative_error(y, reference_output(spec, matrices, x)) < ROUNDING[torch.float32]
        unquantized = reference_output(
            make_spec(grid, 8, group, True, shape, tile_rows), matrices, x
        )
        assert relative_error(y, unquantized) > 1e-3  # x was quantized


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "triton-int"),
        ({"bits": 3, "group_size": 24, "symmetric": False}, "triton-int"),
        ({"grid": "table"}, "triton-table"),
        ({"grid": "fp8", "bits": 8}, "triton-fp8"),
        ({"grid": "fp8", "bits": 8, "group_size": 6, "in_features": 48}, "reference"),
        (
            {"group_size": 32, "symmetric": False, "has_minima": True, "superblock_size": 256},
            "triton-int",
        ),
        (
            {"group_size": 24, "in_features": 48, "symmetric": False, "has_minima": True},
            "triton-int",
        ),
        ({"bits": 8, "activation_kind": "int8", "group_size": 256}, "triton-w8a8"),
        (
            {"bits": 8, "activation_kind": "int8", "group_size": 256, "symmetric": False},
            "reference",
        ),
        ({"bits": 4, "activation_kind": "int8"}, "reference"),
    ],
)
def test_selection_for_a_gpu(changes, name):
    from dataclasses import replace

    spec = MatmulSpec(48, 256, 4, 128, True, torch.bfloat16, "cuda")
    assert select_kernel(replace(spec, **changes)).name == name


def test_no_operator_of_the_cpu_takes_another_grid_or_activation():
    for grid, activation_kind in (("table", ""), ("fp8", ""), ("int", "int8")):
        spec = MatmulSpec(48, 256, 4, 128, True, torch.bfloat16, "cpu", grid, 1, activation_kind)
        assert select_kernel(spec).name == "reference"
    assert KERNELS[-1] is fallback.KERNEL


@parametrize_each_value(
    ("kernel", ["matvec", "rows"]),
    ("shape", [(1, 1), (1024, 4096), (128256, 4096), (4096, 14336)]),
)
def test_chosen_tiles_are_valid(kernel, shape):
    chosen = plane_products.choose_tile(kernel, make_spec("int", 4, 128, True, shape))
    assert chosen.block_k >= 128
    assert chosen.block_k & (chosen.block_k - 1) == 0
    assert 1 <= chosen.column_splits <= max(1, -(-shape[1] // chosen.block_k))
