"""Kernels on a CPU: each equals the formula, keeps the weights small, and is chosen as declared."""

from __future__ import annotations

import pytest
import torch

from quantforge_kernels import reference
from quantforge_kernels.cpu import packed_integers, torch_operators
from quantforge_kernels.problem import Problem
from quantforge_kernels.select import KERNELS, select


def make(problem: Problem, rows: int = 3):
    """Random codes, scales, zeros, and the weight in float64 that they stand for."""
    rng = torch.Generator().manual_seed(0)
    shape = (problem.out_features, problem.in_features)
    codes = torch.randint(0, 2**problem.bits, shape, generator=rng, dtype=torch.uint8)
    scales = (torch.randn(shape[0], problem.groups, generator=rng) * 0.01).half()
    zeros = None
    middle = torch.full((shape[0], problem.groups), 2 ** (problem.bits - 1))
    if not problem.symmetric:
        zeros = middle = torch.randint(0, 2**problem.bits, middle.shape, generator=rng).byte()
    grouped = codes.double().view(shape[0], problem.groups, -1)
    weight = (grouped - middle.double()[:, :, None]) * scales.double()[:, :, None]
    parameters = {"scales": scales} | ({} if zeros is None else {"zeros": zeros})
    x = torch.randn(rows, shape[1], generator=rng).to(problem.dtype)
    return codes, parameters, weight.view(shape), x


def problem(bits=4, group=128, symmetric=True, dtype=torch.bfloat16, shape=(48, 256)):
    return Problem(*shape, bits, group, symmetric, dtype, "cpu")


def relative_error(y: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> float:
    expected = x.double() @ weight.T
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("columns", [1, 7, 8, 64, 129])
def test_packing_rows_is_lossless_and_dense(bits, columns):
    codes = torch.randint(0, 2**bits, (5, columns), dtype=torch.uint8)
    planes = reference.pack_rows(codes, bits)
    assert torch.equal(reference.unpack_rows(planes, bits, columns), codes)
    padded = columns + -columns % 8
    assert sum(plane.numel() for plane in planes) == 5 * padded * bits // 8


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("shape", "group"), [((5, 24), 8), ((70, 120), 120), ((600, 512), 64)])
def test_reference_decodes_exactly_and_multiplies(bits, symmetric, shape, group):
    task = problem(bits, group, symmetric, torch.float32, shape)
    codes, parameters, weight, x = make(task)
    packed = reference.prepare(codes, parameters, task)
    # A float16 scale times a small integer is exact in float32.
    decoded = reference.decode_rows(packed, task, slice(None))
    assert torch.equal(decoded.double(), weight)
    assert relative_error(reference.matmul(x, packed, task), weight, x) < 1e-6


def test_reference_decodes_in_tiles(monkeypatch):
    task = problem(dtype=torch.float32, shape=(50, 256))
    codes, parameters, weight, x = make(task)
    packed = reference.prepare(codes, parameters, task)
    tiles = []
    whole = reference.decode_rows
    monkeypatch.setattr(reference, "TILE_WEIGHTS", 8 * 256)
    monkeypatch.setattr(
        reference, "decode_rows", lambda *args: tiles.append(whole(*args)) or tiles[-1]
    )
    y = reference.matmul(x, packed, task)
    assert [len(tile) for tile in tiles] == [8] * 6 + [2]
    assert relative_error(y, weight, x) < 1e-6


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 512])
@pytest.mark.parametrize(("out", "rows"), [(16, 1), (48, 3), (80, 70)])
def test_int4_operator_equals_the_formula(symmetric, group, out, rows):
    task = problem(4, group, symmetric, shape=(out, 512))
    codes, parameters, weight, x = make(task, rows)
    packed = torch_operators.INT4.prepare(codes, parameters, task)
    y = torch_operators.INT4.matmul(x, packed, task)
    assert y.dtype == torch.bfloat16
    assert y.shape == (rows, out)
    assert relative_error(y, weight, x) < 5e-3  # bfloat16 keeps 8 significant bits: 2^-9 = 2e-3
    # With scales that bfloat16 holds, only the result is rounded.
    scales = parameters["scales"]
    coarse = scales.bfloat16()
    exact = weight * (coarse.double() / scales.double()).repeat_interleave(group, dim=1)
    if symmetric:
        y = torch_operators.INT4.matmul(
            x, torch_operators.INT4.prepare(codes, {"scales": coarse}, task), task
        )
        assert relative_error(y, exact, x) < 2.5e-3


@pytest.mark.parametrize(("shape", "rows"), [((1, 16), 1), ((48, 256), 3), ((65, 112), 40)])
def test_int8_operator_equals_the_formula(shape, rows):
    task = problem(8, shape[1], shape=shape)
    codes, parameters, weight, x = make(task, rows)
    assert torch_operators.INT8.accepts(task)
    y = torch_operators.INT8.matmul(x, torch_operators.INT8.prepare(codes, parameters, task), task)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, weight, x) < 5e-3


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "torch-int4"),
        ({"symmetric": False, "group": 32}, "torch-int4"),
        ({"group": 256, "shape": (48, 512)}, "torch-int4"),
        ({"group": 1024, "shape": (48, 1024)}, "torch-int4"),  # a row of a multiple of 256
        ({"group": 16}, "reference"),
        ({"group": 96, "shape": (48, 192)}, "reference"),
        ({"shape": (40, 256)}, "reference"),  # the operator wants a multiple of 16 rows
        ({"dtype": torch.float32}, "reference"),  # a scalar loop there
        ({"dtype": torch.float16}, "reference"),
        ({"bits": 3}, "reference"),
        ({"bits": 8}, "reference"),
        ({"bits": 8, "group": 256}, "torch-int8"),
        ({"bits": 8, "group": 256, "symmetric": False}, "reference"),
        ({"bits": 8, "group": 120, "shape": (48, 120)}, "reference"),  # would read past the end
        ({"bits": 8, "group": 256, "dtype": torch.float32}, "reference"),
    ],
)
def test_selection_without_vectors(changes, name, monkeypatch):
    monkeypatch.setattr(packed_integers, "feature", lambda: None)
    assert select(problem(**changes)).name == name


def test_no_cpu_operator_on_another_device():
    task = Problem(48, 256, 4, 128, True, torch.bfloat16, "cuda")
    assert select(task).name not in {"torch-int4", "torch-int8"}
    assert KERNELS[-1] is reference.KERNEL


@pytest.mark.parametrize(
    "kernel", [torch_operators.INT4, reference.KERNEL], ids=lambda kernel: kernel.name
)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 2048])
def test_four_bits_stay_within_a_tenth_of_the_file(kernel, symmetric, group):
    task = problem(4, group, symmetric, shape=(64, 2048))
    codes, parameters, _, _ = make(task)
    held = sum(tensor.nbytes for tensor in kernel.prepare(codes, parameters, task).values())
    scales = parameters["scales"]
    stored = codes.numel() / 2 + scales.nbytes + (0 if symmetric else scales.numel() / 2)
    assert held <= 1.1 * stored
