"""Launches of the kernels over bit planes (`gpu.matvec`, `gpu.rows`): their arguments, sizes and constants.

Nothing here imports triton before a launch, so that the package works where there is none. Programs that share columns
write partial sums, which one more kernel adds in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge_kernels.gpu.launching import launch_kernel
from quantforge_kernels.gpu.tiles import Configuration
from quantforge_kernels.grouped import OwnedRows
from quantforge_kernels.layout import LARGEST_CHUNK, WIDTHS, chunk_of
from quantforge_kernels.problem import GRIDS, LOWER, Problem, power_of_two


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Facts of a problem that a launch needs: all but rows, type and device, which the tensors have."""

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
        """Return the arguments that a kernel is compiled for.

        ``WIDTH0`` to ``WIDTH2``: bits of each plane, 0 where there is none. ``CHUNK``: columns of a chunk (`layout`).
        ``GROUP``: columns of a group. ``CENTRE``: the code of a symmetric integer that stands for 0. ``ZERO``: 0 where
        there is nothing to take off, 1 for zero points, 2 for minima. ``LEVELS``: of scales, see `fields.parameter`.
        ``SUPER``: groups of a superblock. ``DECODE``: the grid, by its place in `GRIDS`. ``TILE_ROWS``: rows that share
        their parameters.
        """
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
    """Return the facts of a problem that a launch needs."""
    return LaunchShape(
        problem.grid, problem.bits, problem.out_features, problem.in_features, problem.group_size,
        problem.symmetric, problem.tile_rows, problem.minima, problem.superblock,
        problem.lower,
    )  # fmt: skip


def least_tile(kernel: str, shape: LaunchShape) -> int:
    """Return the least columns of a tile: a chunk; for ``rows`` 16 words of every plane too, for the tensor cores."""
    chunk, _ = shape.chunk
    return chunk if kernel == "matvec" else max(chunk, 16 * 32 // min(WIDTHS[shape.bits]))


def mode_of(dtype: torch.dtype, device: torch.device) -> int:
    """Return the ``MODE`` in which kernels make numbers of fields, see `gpu.fields`."""
    if dtype == torch.float32:
        return 0  # the biases of the others would cost digits that float32 has
    return 2 if device.type == "cuda" and torch.version.hip is None else 1


def launch(
    kernel: str,
    given: Tensor | OwnedRows,
    planes: Sequence[Tensor],
    tensors: Mapping[str, Tensor],
    shape: LaunchShape,
    tile: Configuration,
    mode: int | None = None,
) -> Tensor:
    """Launch ``matvec`` or ``rows`` and add up the splits.

    Args:
        kernel: which of the two.
        given: rows ``[tokens, in]``; with owners, ``planes`` and ``tensors`` are those of several matrices.
        planes: of the codes.
        tensors: the parameters by their names.
        shape: of the weight.
        tile: sizes of a program's tile, and how many programs share the columns.
        mode: of `mode_of` when left out.

    Returns:
        ``[tokens, out]``, or ``[pairs, out]``, in the type of ``x``.
    """
    from quantforge_kernels.gpu.matvec import matvec_kernel
    from quantforge_kernels.gpu.rows import rows_kernel

    x, owners = (given.x, given.owners) if isinstance(given, OwnedRows) else (given, None)
    tokens, columns = x.shape
    pairs = tokens if owners is None else len(owners.pairs)
    each = 0 if owners is None else pairs // tokens
    rows, chunk = shape.out_features, shape.chunk[0]
    share = -(-columns // (tile.block_k * tile.split))
    out = x.new_empty(
        (tile.split, pairs, rows), dtype=x.dtype if tile.split == 1 else torch.float32
    )
    pointers = _pointers(planes, tensors)
    sizes = (rows, columns, _groups(shape), *_quads(planes), share)
    chosen = mode_of(x.dtype, x.device) if mode is None else mode
    constants = shape.constants | {"MODE": chosen, "EACH": each}
    programs = -(-rows // tile.block_n)
    if kernel == "matvec":
        launch_kernel(
            matvec_kernel, (programs, pairs, tile.split),
            x, *pointers, out, x if owners is None else owners.pairs, *sizes, **constants, WHOLE=shape.chunk[1],
            EVEN=columns % tile.block_k == 0 and columns % chunk == 0,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.warps,
        )  # fmt: skip
    else:
        # With minima the sum of x would be needed too: scales go to the codes instead.
        after = shape.chunk[1] and not shape.minima and shape.group % tile.block_k == 0
        strip = 16 if owners is None else strip_of(pairs, owners.matrices)
        lists = (x, x) if owners is None else (owners.order, owners.starts)
        matrices = 0 if owners is None else owners.matrices
        strips = -(-pairs // strip) if owners is None else pairs // strip + min(pairs, matrices)
        launch_kernel(
            rows_kernel, (programs, strips, tile.split),
            x, *pointers, out, *lists, tokens, pairs, matrices, *sizes, **constants, WHOLE=shape.chunk[1],
            AFTER=after, WIDEN=x.dtype == torch.bfloat16 and x.device.type == "cpu",
            BLOCK_E=power_of_two(max(1, matrices)), BLOCK_M=strip, BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k, num_warps=tile.warps,
        )  # fmt: skip
    return add_splits(out, x.dtype)


def strip_of(pairs: int, matrices: int) -> int:
    """Return the pairs of one owner that a program multiplies together, by how many an owner has in the mean."""
    return 16 if pairs <= 16 * matrices else 32 if pairs <= 32 * matrices else 64


def add_splits(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of ``[splits, rows, out]``, in float32 where there are several, in a type."""
    from quantforge_kernels.gpu.layer_kernels import splits_kernel

    if len(parts) == 1:
        return parts[0]
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    programs = -(-out.numel() // 512)
    launch_kernel(
        splits_kernel, (programs,), parts, out, out.numel(), len(parts), BLOCK=512, num_warps=4
    )
    return out


def decode(
    planes: Sequence[Tensor], tensors: Mapping[str, Tensor], shape: LaunchShape, dtype: torch.dtype
) -> Tensor:
    """Return the weight of some rows, by `gpu.rows.decode_kernel`."""
    from quantforge_kernels.gpu.rows import decode_kernel

    rows = len(planes[0])
    out = torch.empty(rows, shape.in_features, dtype=dtype, device=planes[0].device)
    grid = (-(-rows // 8), -(-shape.in_features // 512))
    launch_kernel(
        decode_kernel, grid,
        *_pointers(planes, tensors), out, rows, shape.in_features, _groups(shape), *_quads(planes),
        **shape.constants, MODE=mode_of(dtype, out.device), BLOCK_N=8, BLOCK_K=512, num_warps=4,
    )  # fmt: skip
    return out


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
