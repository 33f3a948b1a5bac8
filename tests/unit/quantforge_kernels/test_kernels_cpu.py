"""The reference kernel on a CPU equals the formula and keeps weights packed."""

from __future__ import annotations

import torch

from quantforge_kernels import fallback
from quantforge_kernels.cpu import packed_integers
from quantforge_kernels.matmul_spec import MatmulSpec
from quantforge_kernels.select import select_kernel
from tests.thorough import parametrize_each_value


def make(problem: MatmulSpec, rows: int = 3):
    """Random codes, scales, zeros, and the weight in float64 that they stand for."""
    rng = torch.Generator().manual_seed(0)
    shape = (problem.out_features, problem.in_features)
    codes = torch.randint(0, 2**problem.bits, shape, generator=rng, dtype=torch.uint8)
    scales = (torch.randn(shape[0], problem.groups_per_row, generator=rng) * 0.01).half()
    zeros = None
    middle = torch.full((shape[0], problem.groups_per_row), 2 ** (problem.bits - 1))
    if not problem.symmetric:
        zeros = middle = torch.randint(0, 2**problem.bits, middle.shape, generator=rng).byte()
    grouped = codes.double().view(shape[0], problem.groups_per_row, -1)
    weight = (grouped - middle.double()[:, :, None]) * scales.double()[:, :, None]
    parameters = {"scales": scales} | ({} if zeros is None else {"zeros": zeros})
    x = torch.randn(rows, shape[1], generator=rng).to(problem.dtype)
    return codes, parameters, weight.view(shape), x


def problem(bits=4, group=128, symmetric=True, dtype=torch.bfloat16, shape=(48, 256)):
    return MatmulSpec(*shape, bits, group, symmetric, dtype, "cpu")


def relative_error(y: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> float:
    expected = x.double() @ weight.T
    return float((y.double() - expected).norm() / expected.norm())


@parametrize_each_value(
    ("bits", range(1, 9)),
    ("columns", [7, 64, 129]),
)
def test_packing_rows_is_lossless_and_dense(bits, columns):
    codes = torch.randint(0, 2**bits, (5, columns), dtype=torch.uint8)
    planes = fallback.pack_byte_planes(codes, bits)
    assert torch.equal(fallback.unpack_byte_planes(planes, bits, columns), codes)
    padded = columns + -columns % 8
    assert sum(plane.numel() for plane in planes) == 5 * padded * bits // 8


@parametrize_each_value(
    ("bits", range(2, 9)),
    (
        "symmetric, shape, group",
        [(True, (5, 24), 8), (False, (70, 120), 120), (True, (600, 512), 64)],
    ),
)
def test_reference_decodes_exactly_and_multiplies(bits, symmetric, shape, group):
    spec = problem(bits, group, symmetric, torch.float32, shape)
    codes, parameters, weight, x = make(spec)
    packed = fallback.prepare(codes, parameters, spec)
    # A float16 scale times a small integer is exact in float32.
    decoded = fallback.decode_rows(packed, spec, slice(None))
    assert torch.equal(decoded.double(), weight)
    assert relative_error(fallback.matmul(x, packed, spec), weight, x) < 1e-6


def test_reference_decodes_in_tiles(monkeypatch):
    spec = problem(dtype=torch.float32, shape=(50, 256))
    codes, parameters, weight, x = make(spec)
    packed = fallback.prepare(codes, parameters, spec)
    tiles = []
    whole = fallback.decode_rows
    monkeypatch.setattr(fallback, "TILE_WEIGHTS", 8 * 256)
    monkeypatch.setattr(
        fallback, "decode_rows", lambda *args: tiles.append(whole(*args)) or tiles[-1]
    )
    y = fallback.matmul(x, packed, spec)
    assert [len(tile) for tile in tiles] == [8] * 6 + [2]
    assert relative_error(y, weight, x) < 1e-6


def test_reference_kernel_is_selected_without_vector_units(monkeypatch):
    monkeypatch.setattr(packed_integers, "best_instruction_set", lambda: None)
    for bits in (3, 4, 8):
        assert select_kernel(problem(bits)) is fallback.KERNEL


@parametrize_each_value(
    ("symmetric", [True, False]),
    ("group", [32, 64, 128, 256, 2048]),
)
def test_packed_four_bit_weights_stay_near_file_size(symmetric, group):
    spec = problem(4, group, symmetric, shape=(64, 2048))
    codes, parameters, _, _ = make(spec)
    held_bytes = sum(tensor.nbytes for tensor in fallback.prepare(codes, parameters, spec).values())
    scales = parameters["scales"]
    stored = codes.numel() / 2 + scales.nbytes + (0 if symmetric else scales.numel() / 2)
    assert held_bytes <= 1.1 * stored
