"""Hadamard rotations: orthogonal, with the right entries, and reproducible bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from quantforge.numerics import hadamard
from quantforge.numerics.hadamard import Rotation, has_hadamard

SIZES = [1, 2, 4, 16, 64, 12, 20, 28, 36, 44, 60, 84, 96, 112, 160, 180, 576, 896, 2880]


def matrix(rotation: Rotation) -> torch.Tensor:
    value = torch.eye(rotation.size)
    rotation.rotate_axis(value, 1)
    return value.double()


@pytest.mark.parametrize("size", SIZES)
def test_rotation_is_a_signed_hadamard_matrix(size: int) -> None:
    result = matrix(Rotation(size, "any"))
    assert torch.equal(result.abs(), torch.full((size, size), size**-0.5).double())
    torch.testing.assert_close(
        result @ result.T, torch.eye(size, dtype=torch.float64), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("size", [3, 6, 18, 92, 100, 11008])
def test_sizes_without_a_hadamard_matrix(size: int) -> None:
    assert not has_hadamard(size)


def test_common_model_sizes_have_a_hadamard_matrix() -> None:
    hidden = (576, 896, 960, 1024, 1152, 1536, 2048, 2304, 2560, 2880, 3072, 3584, 3840, 4096, 5120)
    assert all(map(has_hadamard, (*hidden, 5376, 6144, 7168, 8192, 12288, 16384, 18432)))
    assert all(map(has_hadamard, (64, 80, 96, 112, 128, 160, 192, 256)))


def test_signs_depend_only_on_the_seed() -> None:
    assert torch.sign(matrix(Rotation(8, "residual stream 0"))[:, 0]).tolist() == [
        1,
        1,
        -1,
        1,
        1,
        -1,
        -1,
        1,
    ]
    first, second = matrix(Rotation(64, "a")), matrix(Rotation(64, "b"))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("shape", "axis"), [((40, 7), 0), ((5, 60), 1), ((2, 40, 3), 1), ((40,), 0)]
)
def test_rotation_multiplies_each_run_along_an_axis(shape: tuple[int, ...], axis: int) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(shape, generator=generator)
    rotation = Rotation(20, "x")
    lines = value.double().movedim(axis, -1).unflatten(-1, (-1, 20)) @ matrix(rotation)
    rotation.rotate_axis(value, axis)
    torch.testing.assert_close(
        value.double(), lines.flatten(-2).movedim(-1, axis), atol=1e-5, rtol=0
    )


def test_tile_size_does_not_change_rotated_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(48, 72, generator=torch.Generator().manual_seed(1))
    for axis, size in ((0, 48), (1, 24)):
        first, second = value.clone(), value.clone()
        Rotation(size, "x").rotate_axis(first, axis)
        with monkeypatch.context() as patch:
            patch.setattr(hadamard, "TILE", 5 * size)
            torch.set_num_threads(2)
            Rotation(size, "x").rotate_axis(second, axis)
            torch.set_num_threads(1)
        assert torch.equal(first, second)
    assert math.isclose(float(first.norm()), float(value.norm()), rel_tol=1e-6)
