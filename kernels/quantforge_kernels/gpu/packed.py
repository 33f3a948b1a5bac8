"""Products with packed weights on a GPU, by `gpu.matvec` and `gpu.rows`.

Declarations and launchers. Nothing here imports triton before a product is asked for, so that the
package works where there is none.

One row takes ``matvec_kernel``, up to `MOST_ROWS` rows take ``rows_kernel``, 16 at a time, and
more decode a slab of the weight at a time for the library's product: beyond that a fused kernel
only repeats the decoding. Programs that share columns write partial sums, added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from quantforge_kernels.gpu.tiles import Configuration, configure
from quantforge_kernels.layout import LARGEST_CHUNK, WIDTHS, chunk_of, from_planes, to_planes
from quantforge_kernels.lower import narrowed, widened
from quantforge_kernels.problem import GRIDS, LOWER, Kernel, Packed, Parameters, Problem, Weights

MOST_ROWS = 64
SLAB_BYTES = 64 << 20  # of decoded weights, when there are many rows
_NOT_FINITE = {"fp8": 0x7F, "e5m2": 0x7C}  # the least such byte without its sign
_ORDER = ("scales", "d", "zeros", "mins", "dmin", "table")


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Layout as the kernels have to know it: a `Problem` without what may change per product."""

    grid: str
    bits: int
    out_features: int
    in_features: int
    group: int
    symmetric: bool
    tile_rows: int
    minima: bool
    superblock: int
    lower: str

    @property
    def chunk(self) -> tuple[int, bool]:
        """Return the columns of a chunk of the layout, and whether no word of it spans two groups."""
        if self.group >= self.in_features:  # there is one group
            return LARGEST_CHUNK, True
        return chunk_of(self.bits, self.group)

    @property
    def constants(self) -> dict[str, object]:
        """Return the arguments that a kernel is compiled for; see those of `gpu.matvec`."""
        widths = (*WIDTHS[self.bits], 0, 0)
        centred = self.grid == "int" and self.symmetric
        return {
            **{f"WIDTH{i}": widths[i] for i in range(3)},
            "CHUNK": self.chunk[0],
            "GROUP": self.group,
            "CENTRE": 1 << (self.bits - 1) if centred else 0,
            "ZERO": 2 if self.minima else int(not self.symmetric),
            "LEVELS": 2 + LOWER.index(self.lower) if self.superblock else 1,
            "SUPER": self.superblock // self.group if self.superblock else 1,
            "DECODE": GRIDS.index(self.grid),
            "TILE_ROWS": self.tile_rows,
        }


def shape_of(problem: Problem) -> LaunchShape:
    """Return the layout of a problem."""
    return LaunchShape(
        problem.grid, problem.bits, problem.out_features, problem.in_features, problem.group_size,
        problem.symmetric, problem.tile_rows, problem.minima, problem.superblock,
        problem.lower,
    )  # fmt: skip


def prepare(codes: Tensor, parameters: Parameters, problem: Problem) -> Packed:
    """Lay the codes out in planes; of parameters only the lower of two levels is held otherwise."""
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


def _packed_matmul(  # noqa: PLR0913, PLR0917 (schemas of operators know no records)
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


def least_tile(kernel: str, shape: LaunchShape) -> int:
    """Return the columns that a tile holds at least: a chunk; 16 words of every plane for the tensor cores."""
    chunk, _ = shape.chunk
    return chunk if kernel == "matvec" else max(chunk, 16 * 32 // min(WIDTHS[shape.bits]))


def mode_of(dtype: torch.dtype, device: torch.device) -> int:
    """Return the ``MODE`` in which `gpu.matvec` makes numbers of fields."""
    if dtype == torch.float32:
        return 0  # the biases of the others would cost digits that float32 has
    return 2 if device.type == "cuda" and torch.version.hip is None else 1


def launch(
    kernel: str,
    x: Tensor,
    planes: Sequence[Tensor],
    tensors: Mapping[str, Tensor],
    shape: LaunchShape,
    tile: Configuration,
    mode: int | None = None,
) -> Tensor:
    """Launch one of the two fused kernels and add up the splits."""
    from quantforge_kernels.gpu.matvec import matvec_kernel
    from quantforge_kernels.gpu.rows import rows_kernel

    tokens, columns = x.shape
    rows, chunk = shape.out_features, shape.chunk[0]
    tiles = -(-columns // tile.block_k)
    share = -(-tiles // tile.split)
    out = x.new_empty(
        (tile.split, tokens, rows), dtype=x.dtype if tile.split == 1 else torch.float32
    )
    pointers = _pointers(planes, tensors)
    sizes = (rows, columns, _groups(shape), *_quads(planes), share)
    constants = shape.constants | {"MODE": mode_of(x.dtype, x.device) if mode is None else mode}
    programs = -(-rows // tile.block_n)
    if kernel == "matvec":
        matvec_kernel[(programs, tokens, tile.split)](
            x, *pointers, out, *sizes, **constants, WHOLE=shape.chunk[1],
            EVEN=columns % tile.block_k == 0 and columns % chunk == 0,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.warps,
        )  # fmt: skip
    else:
        # With minima the sum of x would be needed too: scales go to the codes instead.
        after = shape.chunk[1] and not shape.minima and shape.group % tile.block_k == 0
        rows_kernel[(programs, -(-tokens // 16), tile.split)](
            x, *pointers, out, tokens, *sizes, **constants, WHOLE=shape.chunk[1], AFTER=after,
            WIDEN=x.dtype == torch.bfloat16 and x.device.type == "cpu",
            BLOCK_M=16, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.warps,
        )  # fmt: skip
    return add_splits(out, x.dtype)


def add_splits(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of ``[splits, rows, out]``, in float32 where there are several, in a type."""
    from quantforge_kernels.gpu.layer_kernels import splits_kernel

    if len(parts) == 1:
        return parts[0]
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    programs = -(-out.numel() // 512)
    splits_kernel[(programs,)](parts, out, out.numel(), len(parts), BLOCK=512, num_warps=4)
    return out


def decode(
    planes: Sequence[Tensor], tensors: Mapping[str, Tensor], shape: LaunchShape, dtype: torch.dtype
) -> Tensor:
    """Return the weight of some rows, by `gpu.rows.decode_kernel`."""
    from quantforge_kernels.gpu.rows import decode_kernel

    rows = len(planes[0])
    out = torch.empty(rows, shape.in_features, dtype=dtype, device=planes[0].device)
    grid = (-(-rows // 8), -(-shape.in_features // 512))
    decode_kernel[grid](
        *_pointers(planes, tensors), out, rows, shape.in_features, _groups(shape), *_quads(planes),
        **shape.constants, MODE=mode_of(dtype, out.device), BLOCK_N=8, BLOCK_K=512, num_warps=4,
    )  # fmt: skip
    return out


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


def _groups(shape: LaunchShape) -> int:
    return -(-shape.in_features // shape.group)


def _quads(planes: Sequence[Tensor]) -> tuple[int, int, int]:
    quads = [plane.shape[1] // 4 for plane in planes]
    return tuple((*quads, 0, 0)[:3])  # type: ignore[return-value]


def _pointers(planes: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return planes, table, scales and zeros in the order of the kernels; what is not there is not read."""
    words = [*planes, planes[0], planes[0]][:3]
    lows = "mins" if "mins" in tensors else "zeros"
    names = ("table", "scales", "d", lows, "dmin")
    return [*words, *(tensors.get(name, tensors["scales"]) for name in names)]


def _on_gpu(problem: Problem) -> bool:
    return problem.device == "cuda" and not problem.activation and find_spec("triton") is not None


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
