"""Random problems for kernels, which run on a GPU if there is one and interpreted (see conftest) if not."""

from __future__ import annotations

import torch

from quantforge_kernels import fallback
from quantforge_kernels.problem import Problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(grid="int", bits=4, group=128, symmetric=True, shape=(5, 256), tile_rows=1,
            dtype=torch.float32, activation="", minima=False, superblock=0, lower=""):  # fmt: skip
    return Problem(
        *shape, bits, group, symmetric, dtype, DEVICE, grid, tile_rows, activation, minima,
        superblock, lower,
    )  # fmt: skip


# Forms of weights as files hold them, as arguments of `problem`.
FORMS = {
    "int4": {"bits": 4, "group": 128},
    "int4 asymmetric": {"bits": 4, "group": 32, "symmetric": False},
    "int3": {"bits": 3, "group": 64, "symmetric": False},
    "int8 per row": {"bits": 8, "group": 256},
    "nf4": {"grid": "table", "bits": 4, "group": 64},
    "fp8": {"grid": "fp8", "bits": 8, "group": 256},
    "fp8 in tiles": {"grid": "fp8", "bits": 8, "group": 128, "tile_rows": 128},
    "q4_1": {"bits": 4, "group": 32, "symmetric": False, "minima": True},
    "fp8 e5m2": {"grid": "e5m2", "bits": 8, "group": 256},
    "nvfp4": {"grid": "table", "bits": 4, "group": 16, "superblock": 256, "lower": "e4m3"},
    "q2_k": {
        "bits": 2,
        "group": 16,
        "symmetric": False,
        "minima": True,
        "superblock": 256,
        "lower": "pairs",
    },
    "q3_k": {"bits": 3, "group": 16, "superblock": 256},
    "q4_k": {"bits": 4, "group": 32, "symmetric": False, "minima": True, "superblock": 256},
    "q5_k": {"bits": 5, "group": 32, "symmetric": False, "minima": True, "superblock": 256},
    "q6_k": {"bits": 6, "group": 16, "superblock": 256},
}


def weights(task: Problem, seed: int = 0):
    """Random codes over their whole range, and parameters as `Kernel.prepare` takes them."""
    rng = torch.Generator().manual_seed(seed)
    shape = (task.out_features, task.in_features)
    size = (-(-shape[0] // task.tile_rows), task.groups)

    def integers(low, high, shape, kind=torch.uint8):
        return torch.randint(low, high, shape, generator=rng).to(kind)

    def halves(*shape):
        return (torch.randn(shape, generator=rng) * 0.01).half()

    codes = integers(0, 2**task.bits, shape)
    if task.grid in fallback.FLOAT8:
        codes = torch.randn(shape, generator=rng).to(fallback.FLOAT8[task.grid]).view(torch.uint8)
    parameters = {"scales": halves(*size)}
    most = 16 if task.lower == "pairs" else 64
    if task.lower == "e4m3":
        parameters["scales"] = torch.rand(size, generator=rng).mul(448).to(torch.float8_e4m3fn)
    elif task.superblock:
        kind = torch.uint8 if task.minima else torch.int8
        parameters["scales"] = integers(0 if task.minima else -128, most, size, kind)
    if task.superblock:
        parameters["d"] = halves(shape[0], shape[1] // task.superblock)
    if task.minima:
        parameters["mins"] = integers(0, most, size) if task.superblock else halves(*size)
        if task.superblock:
            parameters["dmin"] = halves(shape[0], shape[1] // task.superblock)
    elif not task.symmetric:
        parameters["zeros"] = integers(0, 2**task.bits, size)
    if task.grid == "table":
        parameters["table"] = torch.randn(16, generator=rng).sort().values
    return codes.to(DEVICE), {name: value.to(DEVICE) for name, value in parameters.items()}


def activations(task: Problem, rows: int = 1, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed + 1)
    return torch.randn(rows, task.in_features, generator=rng).to(DEVICE, task.dtype)


def expected(task: Problem, given, x: torch.Tensor) -> torch.Tensor:
    """The product in float64 of what the codes stand for."""
    packed = fallback.prepare(*given, task)
    weight = fallback.decode_rows(packed, task, slice(None))
    return fallback.product(x, weight, task.activation)


def relative_error(y: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())
