"""Compiled CPU products equal the formula for every weight format, instruction set and thread count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge_kernels import fallback
from quantforge_kernels.bit_planes import PLANE_WIDTHS
from quantforge_kernels.cpu import instruction_sets, many_rows, packed_integers
from quantforge_kernels.cpu.lane_layout import choose_column_blocks, pack_lanes
from quantforge_kernels.select import find_kernel_failure, select_kernel
from tests.thorough import parametrize_each_value
from tests.triton_kernels import WEIGHT_FORMATS, make_spec, random_weights

pytestmark = pytest.mark.skipif(
    instruction_sets.best_instruction_set() is None or torch.cuda.is_available(),
    reason="for processors with AVX2",
)
INTEGERS = {name: form for name, form in WEIGHT_FORMATS.items() if form.get("grid", "int") == "int"}


def make(name: str, shape=(21, 768), rows=1, dtype=torch.float16):
    """A problem, packed weights, the weight that they stand for, and activations."""
    weight_format = INTEGERS[name] | ({"group": shape[1]} if name == "int8 per row" else {})
    spec = make_spec(shape=shape, dtype=dtype, **weight_format)
    codes, parameters = random_weights(spec)
    plain = fallback.prepare(codes, parameters, spec)
    weight = fallback.decode_rows(plain, spec, slice(None))
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    return spec, packed_integers.prepare(codes, parameters, spec), weight, x


def error(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    expected = fallback.reference_product(x, weight)
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, rows) for name in INTEGERS for rows in (1, 6, 70)),
        *(("int4", n) for n in (3, 8, 20)),
    ],
)
def test_llvm_products_equal_the_formula(name, rows):
    spec, packed, weight, x = make(name, rows=rows)
    assert packed_integers.accepts(spec)
    y = packed_integers.matmul(x, packed, spec)
    assert y.shape == (rows, 21)
    assert y.dtype == torch.float16
    assert (
        error(y, x, weight) < 6e-4
    )  # float16 keeps 11 bits: 2^-12 of the result, and of decoded weights


@pytest.mark.parametrize("name", ["int4", "q6_k"])
@pytest.mark.parametrize("feature", ["avx2", "avx512bw", "avx512vnni"])
def test_all_instruction_sets_give_the_same_bits(name, feature, monkeypatch):

    if instruction_sets.INSTRUCTION_SETS.index(feature) < instruction_sets.INSTRUCTION_SETS.index(
        instruction_sets.best_instruction_set()
    ):
        pytest.skip("not on this processor")
    _, packed, _, x = make(name, rows=3)
    expected = packed_integers.matmul(x, packed, make(name, rows=3)[0])
    monkeypatch.setattr(packed_integers, "best_instruction_set", lambda: feature)
    packed_integers.get_product_plan.cache_clear()
    spec, packed, _, _ = make(name, rows=3)
    y = packed_integers.matmul(x, packed, spec)
    packed_integers.get_product_plan.cache_clear()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("rows", [1, 70])
def test_threads_do_not_change_a_bit(rows):
    spec, packed, _, x = make("int4", (333, 256), rows, torch.bfloat16)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(packed_integers.matmul(x, packed, spec))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", ["int4", "q4_k"])
def test_row_result_does_not_depend_on_other_rows(name, monkeypatch):
    monkeypatch.setattr(
        many_rows, "_has_native_arithmetic", lambda _dtype: False
    )  # no row is torch's
    # 109 rows: strips of 32, groups of 8 and of 4, and one; threads take pieces of them.
    formula_spec, packed, _, x = make(name, (100, 768), 109, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([packed_integers.matmul(row[None], packed, formula_spec) for row in x])
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(packed_integers.matmul(x, packed, formula_spec), alone)
            assert torch.equal(packed_integers.matmul(x[:47], packed, formula_spec), alone[:47])
    finally:
        torch.set_num_threads(before)


def test_outlier_reduces_precision_only_in_its_block():
    spec, packed, weight, x = make("int4", rows=2)
    x[0] = 0
    x[0, 64:] = x[1, 64:]
    x[1, 5] = 6e4  # beside which the rest of the first block is rounded away
    y = packed_integers.matmul(x, packed, spec)
    block = x[1:, :64].double() @ weight[:, :64].double().T
    rest = y[1].double() - block[0]
    assert error(y[:1], x[:1], weight) < 6e-4
    step = 6e4 / 32767 * float(weight.abs().max()) * 64 / 2  # at most, if all were rounded one way
    assert float((rest - y[0].double()).abs().max()) < step + float(block.abs().max()) * 2**-10


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 70])
def test_nan_and_infinity_stay_non_finite(value, rows):
    spec, packed, _, x = make("int4", rows=rows)
    x[0, 100] = value
    y = packed_integers.matmul(x, packed, spec)
    assert not bool(y[0].isfinite().any())
    assert bool(y[1:].isfinite().all())


def test_zero_and_empty_activations():
    spec, packed, _, x = make("q4_k", rows=2)
    assert not bool(packed_integers.matmul(x * 0, packed, spec).any())
    assert packed_integers.matmul(x[:0], packed, spec).shape == (0, 21)


def from_lanes(planes, widths, rows, columns):
    """The codes ``[rows, columns]`` of `pack_lanes`."""
    codes, low = 0, 0
    for plane, width in zip(planes, widths, strict=True):
        words = plane.transpose(1, 2)
        fields = [
            (words >> (width * field + 8 * octet)) & (2**width - 1)
            for field in range(8 // width)
            for octet in range(4)
        ]
        codes = codes | torch.stack(fields, dim=-1).flatten(2).flatten(0, 1).byte() << low
        low += width
    return codes[:rows, :columns]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8), st.integers(1, 40), st.integers(1, 12), st.sampled_from([16, 32, 48, 80]),
    st.sampled_from([8, 16]),
)  # fmt: skip
def test_lane_layout_is_lossless_and_dense(bits, rows, groups, group, lanes):
    widths = PLANE_WIDTHS[bits]
    blocks = choose_column_blocks(widths, groups * group, group, 0, lanes)
    assert blocks is not None
    assert group % blocks.block_columns == 0
    codes = torch.randint(0, 2**bits, (rows, groups * group), dtype=torch.uint8)
    planes = pack_lanes(codes, widths, blocks)
    assert torch.equal(from_lanes(planes, widths, rows, groups * group), codes)
    filled = (rows + -rows % lanes) * (groups * group + -(groups * group) % blocks.unit_columns)
    assert sum(plane.nbytes for plane in planes) == filled * bits // 8


def test_incomplete_column_units_are_padded():
    spec = make_spec(bits=3, group=48, shape=(16, 144), dtype=torch.float16)  # units of 96 columns
    codes, parameters = random_weights(spec)
    weight = fallback.decode_rows(fallback.prepare(codes, parameters, spec), spec, slice(None))
    for rows in (1, 20):
        x = torch.randn(rows, 144).half()
        y = packed_integers.matmul(x, packed_integers.prepare(codes, parameters, spec), spec)
        assert error(y, x, weight) < 6e-4


def test_selection():
    spec = make_spec(shape=(40, 256), dtype=torch.bfloat16)
    assert select_kernel(spec).name == "llvm-int"
    for changes in (
        {"dtype": torch.float32}, {"group_size": 4}, {"device": "cuda"}, {"grid": "table"},
        {"activation_kind": "int8", "bits": 8},
    ):  # fmt: skip
        assert not packed_integers.accepts(replace(spec, **changes))


def test_compile_error_is_reported_as_kernel_failure(monkeypatch):
    from quantforge_kernels.cpu import compiler

    spec, packed, _, _ = make("int3")
    monkeypatch.setattr(compiler.llvm, "parse_assembly", lambda text: _refuse())
    packed_integers.get_product_plan.cache_clear()
    packed_integers._compile_program.cache_clear()
    assert "no such instruction" in find_kernel_failure(packed_integers.KERNEL, packed, spec)
    packed_integers.get_product_plan.cache_clear()
    packed_integers._compile_program.cache_clear()


def rounded_octets(x: torch.Tensor, block: int) -> torch.Tensor:
    """The activations as 8-bit integers hold them, in float64."""
    parts = x.double().unflatten(1, (-1, block))
    step = parts.abs().amax(2, keepdim=True) / 127
    return ((parts / step).round() * step).flatten(1)


@pytest.mark.parametrize(  # every form on all vectors, of one row or a few or of many in turn
    ("name", "feature", "rows"),
    [
        (name, feature, ((1, 70), (3, 20))[at % 2][place % 2])
        for at, feature in enumerate(instruction_sets.INSTRUCTION_SETS)
        for place, name in enumerate(INTEGERS)
    ],
)
def test_int8_products_equal_the_formula(name, feature, rows, monkeypatch):
    if instruction_sets.INSTRUCTION_SETS.index(feature) < instruction_sets.INSTRUCTION_SETS.index(
        instruction_sets.best_instruction_set()
    ):
        pytest.skip("not on this processor")
    monkeypatch.setattr(packed_integers, "best_instruction_set", lambda: feature)
    packed_integers.get_product_plan.cache_clear()
    spec, packed, weight, x = make(name, rows=rows)
    spec = replace(spec, input_bits=8)
    # Without `vpdpbusd` two products of codes of 8 bits overflow.
    taken = name != "int8 per row" or feature == "avx512vnni"
    assert packed_integers.INT8_KERNEL.accepts(spec) == taken
    y = packed_integers.matmul(x, packed, spec)
    near = (
        rounded_octets(x, packed_integers.column_blocks(spec, feature).block_columns)
        if taken
        else x
    )
    packed_integers.get_product_plan.cache_clear()
    assert error(y, near, weight) < 1e-3
    if taken:  # it is rounded indeed
        assert 1e-3 < error(y, x, weight) < 2e-2


def test_largest_codes_and_activations_do_not_overflow_eight_bits():
    for bits in range(2, 9):
        spec = replace(
            make_spec(bits=bits, group=64, shape=(16, 256), dtype=torch.bfloat16), input_bits=8
        )
        codes = torch.full((16, 256), 2**bits - 1, dtype=torch.uint8)
        _, parameters = random_weights(spec)
        packed = packed_integers.prepare(codes, parameters, spec)
        plain = fallback.prepare(codes, parameters, spec)
        weight = fallback.decode_rows(plain, spec, slice(None))
        for sign in (1, -1):
            x = torch.full((9, 256), 3.0 * sign, dtype=torch.bfloat16)
            assert error(packed_integers.matmul(x, packed, spec), x, weight) < 4e-3


def test_int8_row_result_does_not_depend_on_other_rows():
    # As many as no processor hands to torch: in tiles (AMX) that is faster for more than 64 rows.
    formula_spec, packed, _, x = make("int4", (100, 768), 61, torch.bfloat16)
    formula_spec = replace(formula_spec, input_bits=8)
    alone = torch.cat([packed_integers.matmul(row[None], packed, formula_spec) for row in x])
    assert torch.equal(packed_integers.matmul(x, packed, formula_spec)[:8], alone[:8])


def test_int8_kernel_is_selected_only_where_allowed():
    spec = make_spec(shape=(40, 256), dtype=torch.bfloat16)
    assert select_kernel(spec).name == "llvm-int"
    assert select_kernel(replace(spec, input_bits=8)).name == "llvm-int8"
    assert select_kernel(replace(spec, dtype=torch.float32)).name == "reference"
    assert select_kernel(replace(spec, input_bits=8, dtype=torch.float32)).name == "llvm-int8"


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_activations_in_float32_are_rounded_to_eight_bits_alone(rows):
    spec = replace(make_spec(bits=4, group=64, shape=(40, 256), dtype=torch.float32), input_bits=8)
    codes, parameters = random_weights(spec)
    plain = fallback.prepare(codes, parameters, spec)
    weight = fallback.decode_rows(plain, spec, slice(None))
    unpacked, restored = fallback.unpack_weight(plain, spec)
    assert torch.equal(unpacked, codes)
    packed = packed_integers.prepare(unpacked, restored, spec)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0))
    block = packed_integers.column_blocks(
        spec, instruction_sets.best_instruction_set()
    ).block_columns
    assert error(packed_integers.matmul(x, packed, spec), rounded_octets(x, block), weight) < 1e-5


def _refuse():
    raise RuntimeError("no such instruction")


@parametrize_each_value(
    ("symmetric", [True, False]),
    ("group", [32, 64, 128, 256, 2048]),
)
def test_packed_four_bit_weights_stay_near_file_size(symmetric, group):
    weight_format = {"bits": 4, "group": group, "symmetric": symmetric}
    spec = make_spec(shape=(64, 2048), dtype=torch.bfloat16, **weight_format)
    codes, parameters = random_weights(spec)
    held_bytes = sum(
        tensor.nbytes for tensor in packed_integers.prepare(codes, parameters, spec).values()
    )
    scales = parameters["scales"]
    stored = codes.numel() / 2 + scales.nbytes + (0 if symmetric else scales.numel() / 2)
    assert held_bytes <= 1.1 * stored
