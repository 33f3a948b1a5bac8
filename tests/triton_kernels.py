"""Random problems for kernels, which run on a GPU if there is one and interpreted (see conftest) if not."""

from __future__ import annotations

import torch

from quantforge_kernels import fallback
from quantforge_kernels.matmul_spec import MatmulSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_spec(grid="int", bits=4, group=128, symmetric=True, shape=(5, 256), tile_rows=1,
            dtype=torch.float32, activation_kind="", has_minima=False, superblock_size=0,
            lower_encoding=""):  # fmt: skip
    return MatmulSpec(
        *shape, bits, group, symmetric, dtype, DEVICE, grid, tile_rows, activation_kind, has_minima,
        superblock_size, lower_encoding,
    )  # fmt: skip


# Forms of weights as files hold them, as arguments of `make_spec`.
WEIGHT_FORMATS = {
    "int4": {"bits": 4, "group": 128},
    "int4 asymmetric": {"bits": 4, "group": 32, "symmetric": False},
    "int3": {"bits": 3, "group": 64, "symmetric": False},
    "int8 per row": {"bits": 8, "group": 256},
    "nf4": {"grid": "table", "bits": 4, "group": 64},
    "fp8": {"grid": "fp8", "bits": 8, "group": 256},
    "fp8 in tiles": {"grid": "fp8", "bits": 8, "group": 128, "tile_rows": 128},
    "q4_1": {"bits": 4, "group": 32, "symmetric": False, "has_minima": True},
    "fp8 e5m2": {"grid": "e5m2", "bits": 8, "group": 256},
    "nvfp4": {
        "grid": "table",
        "bits": 4,
        "group": 16,
        "superblock_size": 256,
        "lower_encoding": "e4m3",
    },
    "q2_k": {
        "bits": 2,
        "group": 16,
        "symmetric": False,
        "has_minima": True,
        "superblock_size": 256,
        "lower_encoding": "pairs",
    },
    "q3_k": {"bits": 3, "group": 16, "superblock_size": 256},
    "q4_k": {
        "bits": 4,
        "group": 32,
        "symmetric": False,
        "has_minima": True,
        "superblock_size": 256,
    },
    "q5_k": {
        "bits": 5,
        "group": 32,
        "symmetric": False,
        "has_minima": True,
        "superblock_size": 256,
    },
    "q6_k": {"bits": 6, "group": 16, "superblock_size": 256},
}


def random_weights(spec: MatmulSpec, seed: int = 0):
    """Random codes over their whole range, and parameters as `Kernel.prepare` takes them."""
    rng = torch.Generator().manual_seed(seed)
    shape = (spec.out_features, spec.in_features)
    size = (-(-shape[0] // spec.tile_rows), spec.groups_per_row)

    def integers(low, high, shape, kind=torch.uint8):
        return torch.randint(low, high, shape, generator=rng).to(kind)

    def halves(*shape):
        return (torch.randn(shape, generator=rng) * 0.01).half()

    codes = integers(0, 2**spec.bits, shape)
    if spec.grid in fallback.FLOAT8_DTYPES:
        codes = (
            torch.randn(shape, generator=rng)
            .to(fallback.FLOAT8_DTYPES[spec.grid])
            .view(torch.uint8)
        )
    parameters = {"scales": halves(*size)}
    most = 16 if spec.lower_encoding == "pairs" else 64
    if spec.lower_encoding == "e4m3":
        parameters["scales"] = torch.rand(size, generator=rng).mul(448).to(torch.float8_e4m3fn)
    elif spec.superblock_size:
        kind = torch.uint8 if spec.has_minima else torch.int8
        parameters["scales"] = integers(0 if spec.has_minima else -128, most, size, kind)
    if spec.superblock_size:
        parameters["d"] = halves(shape[0], shape[1] // spec.superblock_size)
    if spec.has_minima:
        parameters["mins"] = integers(0, most, size) if spec.superblock_size else halves(*size)
        if spec.superblock_size:
            parameters["dmin"] = halves(shape[0], shape[1] // spec.superblock_size)
    elif not spec.symmetric:
        parameters["zeros"] = integers(0, 2**spec.bits, size)
    if spec.grid == "table":
        parameters["table"] = torch.randn(16, generator=rng).sort().values
    return codes.to(DEVICE), {name: value.to(DEVICE) for name, value in parameters.items()}


def random_activations(spec: MatmulSpec, rows: int = 1, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed + 1)
    return torch.randn(rows, spec.in_features, generator=rng).to(DEVICE, spec.dtype)


def reference_output(spec: MatmulSpec, given, x: torch.Tensor) -> torch.Tensor:
    """The product in float64 of what the codes stand for."""
    packed = fallback.prepare(*given, spec)
    weight = fallback.decode_rows(packed, spec, slice(None))
    return fallback.reference_product(x, weight, spec.activation_kind)


def relative_error(y: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())
