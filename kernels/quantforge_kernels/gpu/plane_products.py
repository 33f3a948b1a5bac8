"""Products with packed weights on a GPU, by `gpu.plane_kernels`, of one matrix or of the owners of rows.

Which problems they solve, how weights are laid out for them, which kernel takes how many rows, and the launches.
Nothing imports triton before a product is asked for, so that the package works where there is none.

One row takes ``matvec_kernel``, up to `MOST_ROWS` rows take ``rows_kernel``, 16 at a time, and
more decode a slab of the weight at a time for the library's product: beyond that a fused kernel
only repeats the decoding. Programs that share columns write partial sums, which one more kernel adds in a fixed order.

Grouped products take one launch for all matrices, whose planes and parameters lie one after the other, as rows of one
taller matrix. Few pairs are multiplied one by one, each by the rows of its owner (``matvec_kernel``): nothing has to be
sorted, and one token is sent to different experts anyhow. More pairs are sorted by their owners and cut into strips of
one owner (``rows_kernel``); a program finds its strip in the list of starts. The host waits for nothing, so that a CUDA
graph holds it all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge_kernels.gpu.launching import launch_kernel
from quantforge_kernels.grouped import GroupedProblem, Owners, grouped_form
from quantforge_kernels.layout import LARGEST_CHUNK, WIDTHS, chunk_of, to_planes
from quantforge_kernels.problem import (
    GRIDS,
    LOWER,
    Kernel,
    Packed,
    Parameters,
    Problem,
    has_triton,
    narrowed,
    power_of_two,
)

MOST_ROWS = 64
ONE_BY_ONE = 16  # pairs, or as many as a quarter of the matrices: then few of them share an owner
SLAB_BYTES = 64 << 20  # of decoded weights, when there are many rows
_NOT_FINITE = {"fp8": 0x7F, "e5m2": 0x7C}  # the least such byte without its sign
PROGRAMS = 8 * 132  # wanted: enough warps to keep the memory of a large GPU busy


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns that a program works off at a time, its warps, and how many programs share the columns."""

    block_n: int
    block_k: int
    warps: int
    split: int


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


def _on_gpu(problem: Problem) -> bool:
    return problem.on_gpu and not problem.activation and has_triton()


def prepare(codes: Tensor, parameters: Parameters, problem: Problem) -> Packed:
    """Lay the codes out in planes; parameters stay as they are, but for the lower of two levels (`narrowed`)."""
    if bool(((codes & 0x7F) >= _NOT_FINITE.get(problem.grid, 0x80)).any()):
        raise ValueError("a float8 weight is not finite")
    planes = to_planes(codes, problem.bits, chunk(problem)[0])
    held = {name: value.contiguous() for name, value in narrowed(parameters, problem).items()}
    if "table" in held:
        held["table"] = held["table"].clone()  # a tensor of its own is aligned, see `table_value`
    return {f"words{i}": plane for i, plane in enumerate(planes)} | held


def matmul(x: Tensor, packed: Packed, problem: Problem) -> Tensor:
    """Multiply ``x`` ``[rows, in]``."""
    if len(x) == 0:
        return x.new_empty(0, problem.out_features)
    if len(x) > MOST_ROWS:
        return _by_slabs(x, packed, problem)
    kernel = "matvec" if len(x) == 1 else "rows"
    return launch(kernel, x.contiguous(), packed, problem, tile_of(kernel, problem))


def _by_slabs(x: Tensor, packed: Packed, problem: Problem) -> Tensor:
    result = x.new_empty(len(x), problem.out_features)
    step = SLAB_BYTES // (problem.in_features * x.element_size()) // problem.tile_rows
    step = max(1, step) * problem.tile_rows
    for first in range(0, problem.out_features, step):
        rows = slice(first, first + step)
        scaled = slice(first // problem.tile_rows, -(-(first + step) // problem.tile_rows))
        part = {
            name: value[rows if name.startswith("words") else scaled]
            for name, value in packed.items()
            if name != "table"
        }
        part |= {"table": packed["table"]} if "table" in packed else {}
        result[:, rows] = x @ decode(part, problem, x.dtype).T
    return result


def grouped_matmul(x: Tensor, owners: Owners, packed: Packed, problem: GroupedProblem) -> Tensor:
    """Multiply rows ``x`` ``[rows, in]`` by the matrices of their owners; return ``[pairs, out]``."""
    pairs, task = len(owners.pairs), problem.each
    if pairs == 0:
        return x.new_empty(0, task.out_features)
    few = pairs <= max(ONE_BY_ONE, owners.matrices // 4)
    kernel = "matvec" if few else "rows"
    return launch_grouped(kernel, x, owners, packed, problem)


def launch_grouped(
    kernel: str, x: Tensor, owners: Owners, packed: Packed, problem: GroupedProblem
) -> Tensor:
    """Launch one of the two kernels, with the tile that is configured for it."""
    pairs, task = len(owners.pairs), problem.each
    strips = pairs if kernel == "matvec" else -(-pairs // strip_of(pairs, owners.matrices))
    tile = tile_of(kernel, task, strips)
    return launch(kernel, x.contiguous(), flat(packed), task, tile, owners=owners)


def flat(packed: Packed) -> dict[str, Tensor]:
    """Return the matrices as one taller matrix."""
    return {
        name: value.flatten(0, 1) if value.dim() > 2 else value for name, value in packed.items()
    }


def strip_of(pairs: int, matrices: int) -> int:
    """Return the pairs of one owner that a program multiplies together, by how many an owner has in the mean."""
    return 16 if pairs <= 16 * matrices else 32 if pairs <= 32 * matrices else 64


def chunk(problem: Problem) -> tuple[int, bool]:
    """Return the columns of a chunk of the layout, and whether no word of it spans two groups."""
    if problem.group_size >= problem.in_features:  # there is one group
        return LARGEST_CHUNK, True
    return chunk_of(problem.bits, problem.group_size)


def constants_of(problem: Problem) -> dict[str, object]:
    """Return the arguments that a kernel is compiled for.

    ``WIDTH0`` to ``WIDTH2``: bits of each plane, 0 where there is none. ``CHUNK``: columns of a chunk (`layout`).
    ``GROUP``: columns of a group. ``CENTRE``: the code of a symmetric integer that stands for 0. ``ZERO``: 0 where
    there is nothing to take off, 1 for zero points, 2 for minima. ``LEVELS``: of scales, see `fields.parameter`.
    ``SUPER``: groups of a superblock. ``DECODE``: the grid, by its place in `GRIDS`. ``TILE_ROWS``: rows that share
    their parameters.
    """
    widths = (*WIDTHS[problem.bits], 0, 0)
    centred = problem.grid == "int" and problem.symmetric
    return {
        **{f"WIDTH{i}": widths[i] for i in range(3)},
        "CHUNK": chunk(problem)[0],
        "GROUP": problem.group_size,
        "CENTRE": 1 << (problem.bits - 1) if centred else 0,
        "ZERO": 2 if problem.minima else int(not problem.symmetric),
        "LEVELS": 2 + LOWER.index(problem.lower) if problem.superblock else 1,
        "SUPER": problem.superblock // problem.group_size if problem.superblock else 1,
        "DECODE": GRIDS.index(problem.grid),
        "TILE_ROWS": problem.tile_rows,
    }


def least_tile(kernel: str, problem: Problem) -> int:
    """Return the least columns of a tile: a chunk; for ``rows`` 16 words of every plane too, for the tensor cores."""
    columns, _ = chunk(problem)
    return columns if kernel == "matvec" else max(columns, 16 * 32 // min(WIDTHS[problem.bits]))


def tile_of(kernel: str, problem: Problem, strips: int = 1) -> Tile:
    """Return the tile of a program: small ones, so that a layer makes several programs for each multiprocessor.

    The columns of a narrow layer are split among programs.

    Args:
        kernel: ``matvec`` or ``rows``.
        problem: the product with one matrix.
        strips: of a grouped product, the pairs or the strips of pairs that are multiplied beside each other.
    """
    least, columns = least_tile(kernel, problem), problem.in_features
    block_n, warps, widest = (8, 1, 1024) if kernel == "matvec" else (64, 2, 128)
    block_k = max(least, min(widest, power_of_two(columns)))
    inside = min(widest, problem.group_size & -problem.group_size)  # in one group: the cheapest
    if kernel == "rows" and least <= inside:
        block_k = inside
    alone = -(-problem.out_features // block_n) * warps * strips
    split = max(1, min(PROGRAMS // alone, -(-columns // block_k)))
    return Tile(block_n, block_k, warps, split)


def mode_of(dtype: torch.dtype, device: torch.device) -> int:
    """Return the ``MODE`` in which kernels make numbers of fields, see `gpu.fields`."""
    if dtype == torch.float32:
        return 0  # the biases of the others would cost digits that float32 has
    return 2 if device.type == "cuda" and torch.version.hip is None else 1


def launch(
    kernel: str,
    x: Tensor,
    packed: Packed,
    problem: Problem,
    tile: Tile,
    mode: int | None = None,
    owners: Owners | None = None,
) -> Tensor:
    """Launch ``matvec`` or ``rows`` and add up the splits.

    Args:
        kernel: which of the two.
        x: rows ``[tokens, in]``.
        packed: the weight; of several matrices, see `flat`.
        problem: the product, of one row or many.
        tile: sizes of a program's tile, and how many programs share the columns.
        mode: of `mode_of` when left out.
        owners: of the rows, where there are several matrices.

    Returns:
        ``[tokens, out]``, or ``[pairs, out]``, in the type of ``x``.
    """
    from quantforge_kernels.gpu.plane_kernels import matvec_kernel, rows_kernel

    tokens, columns = x.shape
    pairs = tokens if owners is None else len(owners.pairs)
    each = 0 if owners is None else pairs // tokens
    rows, (step, whole) = problem.out_features, chunk(problem)
    share = -(-columns // (tile.block_k * tile.split))
    out = x.new_empty(
        (tile.split, pairs, rows), dtype=x.dtype if tile.split == 1 else torch.float32
    )
    pointers = _pointers(packed)
    sizes = (rows, columns, problem.groups, *_quads(packed), share)
    chosen = mode_of(x.dtype, x.device) if mode is None else mode
    constants = constants_of(problem) | {"MODE": chosen, "EACH": each}
    programs = -(-rows // tile.block_n)
    if kernel == "matvec":
        launch_kernel(
            matvec_kernel, (programs, pairs, tile.split),
            x, *pointers, out, x if owners is None else owners.pairs, *sizes, **constants, WHOLE=whole,
            EVEN=columns % tile.block_k == 0 and columns % step == 0,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.warps,
        )  # fmt: skip
    else:
        # With minima the sum of x would be needed too: scales go to the codes instead.
        after = whole and not problem.minima and problem.group_size % tile.block_k == 0
        strip = 16 if owners is None else strip_of(pairs, owners.matrices)
        lists = (x, x) if owners is None else (owners.order, owners.starts)
        matrices = 0 if owners is None else owners.matrices
        strips = -(-pairs // strip) if owners is None else pairs // strip + min(pairs, matrices)
        launch_kernel(
            rows_kernel, (programs, strips, tile.split),
            x, *pointers, out, *lists, tokens, pairs, matrices, *sizes, **constants, WHOLE=whole,
            AFTER=after, WIDEN=x.dtype == torch.bfloat16 and x.device.type == "cpu",
            BLOCK_E=power_of_two(max(1, matrices)), BLOCK_M=strip, BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k, num_warps=tile.warps,
        )  # fmt: skip
    return add_splits(out, x.dtype)


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


def decode(packed: Packed, problem: Problem, dtype: torch.dtype) -> Tensor:
    """Return the weight of some rows, by `plane_kernels.decode_kernel`."""
    from quantforge_kernels.gpu.plane_kernels import decode_kernel

    rows, device = len(packed["words0"]), packed["words0"].device
    out = torch.empty(rows, problem.in_features, dtype=dtype, device=device)
    grid = (-(-rows // 8), -(-problem.in_features // 512))
    launch_kernel(
        decode_kernel, grid,
        *_pointers(packed), out, rows, problem.in_features, problem.groups, *_quads(packed),
        **constants_of(problem), MODE=mode_of(dtype, device), BLOCK_N=8, BLOCK_K=512, num_warps=4,
    )  # fmt: skip
    return out


def _quads(packed: Packed) -> list[int]:
    """Return by how many times four words the rows of each plane are apart; 0 where there is no plane."""
    names = (f"words{i}" for i in range(3))
    return [packed[name].shape[1] // 4 if name in packed else 0 for name in names]


def _pointers(packed: Packed) -> list[Tensor]:
    """Return planes, table, scales and zeros in the order of the kernels; what is not there is not read."""
    words = [packed.get(f"words{i}", packed["words0"]) for i in range(3)]
    names = ("table", "scales", "d", "mins" if "mins" in packed else "zeros", "dmin")
    return [*words, *(packed.get(name, packed["scales"]) for name in names)]


INTEGERS = Kernel("triton-int", accepts_integers, prepare, matmul)
TABLES = Kernel("triton-table", accepts_tables, prepare, matmul)
FLOAT8 = Kernel("triton-fp8", accepts_float8, prepare, matmul)
GROUPED = tuple(grouped_form(kernel, grouped_matmul) for kernel in (INTEGERS, TABLES, FLOAT8))
