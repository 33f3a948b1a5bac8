"""Products with packed weights on a GPU, by `gpu.matvec` and `gpu.rows`.

Which problems they solve, how weights are laid out for them, and which kernel takes how many rows;
`plane_launches` launches them. Nothing imports triton before a product is asked for, so that the package
works where there is none.

One row takes ``matvec_kernel``, up to `MOST_ROWS` rows take ``rows_kernel``, 16 at a time, and
more decode a slab of the weight at a time for the library's product: beyond that a fused kernel
only repeats the decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from quantforge_kernels.gpu.plane_launches import (
    LaunchShape,
    decode,
    launch,
    least_tile,
    shape_of,
)
from quantforge_kernels.gpu.tiles import configure
from quantforge_kernels.layout import chunk_of, from_planes, to_planes
from quantforge_kernels.lower import narrowed, widened
from quantforge_kernels.problem import Kernel, Packed, Parameters, Problem, Weights, has_triton

MOST_ROWS = 64
SLAB_BYTES = 64 << 20  # of decoded weights, when there are many rows
_NOT_FINITE = {"fp8": 0x7F, "e5m2": 0x7C}  # the least such byte without its sign
_ORDER = ("scales", "d", "zeros", "mins", "dmin", "table")


def prepare(codes: Tensor, parameters: Parameters, problem: Problem) -> Packed:
    """Lay the codes out in planes; parameters stay as they are, but for the lower of two levels (`lower`)."""
    if bool(((codes & 0x7F) >= _NOT_FINITE.get(problem.grid, 0x80)).any()):
        raise ValueError("a float8 weight is not finite")
    planes = to_planes(codes, problem.bits, shape_of(problem).chunk[0])
    held = {name: value.contiguous() for name, value in narrowed(parameters, problem).items()}
    if "table" in held:
        held["table"] = held["table"].clone()  # a tensor of its own is aligned, see `table_value`
    return {f"words{i}": plane for i, plane in enumerate(planes)} | held


def restore(packed: Packed, problem: Problem) -> Weights:
    """Undo `prepare`."""
    chunk, _ = shape_of(problem).chunk
    codes = from_planes(_planes(packed), problem.bits, chunk, problem.in_features)
    parameters = {name: value for name, value in packed.items() if not name.startswith("words")}
    return codes, widened(parameters, problem)


def _planes(packed: Packed) -> list[Tensor]:
    return [packed[f"words{i}"] for i in range(3) if f"words{i}" in packed]


def matmul(x: Tensor, packed: Packed, problem: Problem) -> Tensor:
    """Multiply ``x`` ``[rows, in]``."""
    parameters = [packed[name] for name in _ORDER if name in packed]
    names = [name for name in _ORDER if name in packed]
    y: Tensor = operator()(
        x.contiguous(), _planes(packed), parameters, ",".join(names), problem.out_features,
        problem.grid, problem.bits, problem.group_size, problem.symmetric, problem.tile_rows,
        problem.minima, problem.superblock, problem.lower,
    )  # fmt: skip
    return y


@cache
def operator() -> Callable[..., Tensor]:
    """Register ``quantforge::packed_matmul``, opaque to `torch.compile`, with a shape rule."""
    operation = torch.library.custom_op(
        "quantforge::packed_matmul", _packed_matmul, mutates_args=()
    )
    operation.register_fake(
        lambda x, _planes, _parameters, _names, rows, *_: x.new_empty(x.shape[0], rows)
    )
    return operation


def _packed_matmul(
    x: Tensor,
    planes: Sequence[Tensor],
    parameters: Sequence[Tensor],
    names: str,
    out_features: int,
    grid: str,
    bits: int,
    group: int,
    symmetric: bool,
    tile_rows: int,
    minima: bool,
    superblock: int,
    lower: str,
) -> Tensor:
    shape = LaunchShape(
        grid, bits, out_features, x.shape[1], group, symmetric, tile_rows, minima, superblock, lower
    )
    tensors = dict(zip(names.split(","), parameters, strict=True))
    if len(x) == 0:
        return x.new_empty(0, out_features)
    if len(x) > MOST_ROWS:
        return _by_slabs(x, planes, tensors, shape)
    kernel = "matvec" if len(x) == 1 else "rows"
    least = least_tile(kernel, shape)
    size = (out_features, shape.in_features)
    return launch(
        kernel, x, planes, tensors, shape, configure(kernel, size, bits, group, least, x.device)
    )


def _by_slabs(
    x: Tensor, planes: Sequence[Tensor], tensors: Mapping[str, Tensor], shape: LaunchShape
) -> Tensor:
    result = x.new_empty(len(x), shape.out_features)
    step = SLAB_BYTES // (shape.in_features * x.element_size()) // shape.tile_rows
    step = max(1, step) * shape.tile_rows
    for first in range(0, shape.out_features, step):
        rows = slice(first, first + step)
        scaled = slice(first // shape.tile_rows, -(-(first + step) // shape.tile_rows))
        part = {name: v if name == "table" else v[scaled] for name, v in tensors.items()}
        weight = decode([plane[rows] for plane in planes], part, shape, x.dtype)
        result[:, rows] = x @ weight.T
    return result


def _on_gpu(problem: Problem) -> bool:
    return problem.on_gpu and not problem.activation and has_triton()


def accepts_integers(problem: Problem) -> bool:
    """Return whether a problem is solved: any bits, any group size, one or two levels of scales."""
    return _on_gpu(problem) and problem.grid == "int"


def accepts_tables(problem: Problem) -> bool:
    """Return whether a problem is solved: codebooks of 16 values with any group size."""
    return _on_gpu(problem) and problem.grid == "table" and problem.bits == 4


def accepts_float8(problem: Problem) -> bool:
    """Return whether a problem is solved: float8 with a scale per row or per tile, on any GPU.

    Bytes are decoded with integer operations.
    """
    whole = problem.groups == 1 or chunk_of(8, problem.group_size)[1]
    return _on_gpu(problem) and problem.grid in {"fp8", "e5m2"} and whole


INTEGERS = Kernel("triton-int", accepts_integers, prepare, matmul, restore)
TABLES = Kernel("triton-table", accepts_tables, prepare, matmul, restore)
FLOAT8 = Kernel("triton-fp8", accepts_float8, prepare, matmul, restore)
