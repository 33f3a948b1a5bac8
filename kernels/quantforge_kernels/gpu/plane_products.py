"""GPU kernels for packed weights: which products they accept, their layout, and the launches of `plane_kernels`.

Triton is not imported before a product is requested, so that the package works without it.

One row uses ``matvec_kernel``, up to `MAX_FUSED_ROWS` rows use ``matmul_kernel``, 16 at a time, and for more rows a
slab of the weight at a time is decoded for the library's product: beyond that a fused kernel would only repeat the
decoding. Programs that share columns write partial sums, which another kernel adds in a fixed order.

Grouped products use one launch for all matrices, which are stacked as the rows of one
taller matrix. A few pairs are multiplied one by one (``matvec_kernel``) without sorting, because
a single token uses different experts anyway. More pairs are sorted by expert and cut into strips of
one expert (``matmul_kernel``); a program finds its strip in the list of starts. The host never waits, so that a CUDA
graph can capture everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge_kernels.bit_planes import (
    MAX_CHUNK_COLUMNS,
    PLANE_WIDTHS,
    choose_chunk,
    pack_bit_planes,
)
from quantforge_kernels.gpu.launching import launch_kernel
from quantforge_kernels.grouped import ExpertRouting, GroupedMatmulSpec, make_grouped_kernel
from quantforge_kernels.matmul_spec import (
    GRIDS,
    LOWER_SCALE_ENCODINGS,
    Kernel,
    MatmulSpec,
    PackedWeight,
    QuantParams,
    encode_lower_scales,
    has_triton,
    next_power_of_two,
)

MAX_FUSED_ROWS = 64
# Pairs, or as many as a quarter of the matrices: then few of them share an owner
MAX_MATVEC_PAIRS = 16
SLAB_BYTES = 64 << 20  # of decoded weights, when there are many rows
_FIRST_NON_FINITE = {"fp8": 0x7F, "e5m2": 0x7C}  # the least such byte without its sign
TARGET_PROGRAMS = 8 * 132  # wanted: enough warps to keep the memory of a large GPU busy


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program's work: rows and columns of a tile, warps, and how many programs share the columns."""

    block_n: int
    block_k: int
    warps: int
    column_splits: int


def accepts_int(spec: MatmulSpec) -> bool:
    """Return whether a product has integer codes: any bits, any group size, one or two levels of scales."""
    return _runs_on_gpu(spec) and spec.grid == "int"


def accepts_table(spec: MatmulSpec) -> bool:
    """Return whether a product has codebooks of 16 values, with any group size."""
    return _runs_on_gpu(spec) and spec.grid == "table" and spec.bits == 4


def accepts_float8(spec: MatmulSpec) -> bool:
    """Return whether a product has float8 weights with a scale per row or per tile; any GPU will do.

    Bytes are decoded with integer operations.
    """
    word_in_group = spec.groups_per_row == 1 or choose_chunk(8, spec.group_size)[1]
    return _runs_on_gpu(spec) and spec.grid in {"fp8", "e5m2"} and word_in_group


def _runs_on_gpu(spec: MatmulSpec) -> bool:
    return spec.on_gpu and not spec.activation_kind and has_triton()


def prepare(codes: Tensor, parameters: QuantParams, spec: MatmulSpec) -> PackedWeight:
    """Pack the codes into bit planes and encode the lower level of scales (`encode_lower_scales`)."""
    if bool(((codes & 0x7F) >= _FIRST_NON_FINITE.get(spec.grid, 0x80)).any()):
        raise ValueError("a float8 weight is not finite")
    planes = pack_bit_planes(codes, spec.bits, choose_chunk_columns(spec)[0])
    packed = {
        name: value.contiguous() for name, value in encode_lower_scales(parameters, spec).items()
    }
    if "table" in packed:
        packed["table"] = packed[
            "table"
        ].clone()  # a tensor of its own is aligned, see `table_value`
    return {f"words{i}": plane for i, plane in enumerate(planes)} | packed


def matmul(x: Tensor, packed: PackedWeight, spec: MatmulSpec) -> Tensor:
    """Multiply ``x`` ``[rows, in]`` by the weight."""
    if len(x) == 0:
        return x.new_empty(0, spec.out_features)
    if len(x) > MAX_FUSED_ROWS:
        return _multiply_by_slabs(x, packed, spec)
    kernel = "matvec" if len(x) == 1 else "rows"
    return launch(kernel, x.contiguous(), packed, spec, choose_tile(kernel, spec))


def _multiply_by_slabs(x: Tensor, packed: PackedWeight, spec: MatmulSpec) -> Tensor:
    result = x.new_empty(len(x), spec.out_features)
    step = SLAB_BYTES // (spec.in_features * x.element_size()) // spec.tile_rows
    step = max(1, step) * spec.tile_rows
    for first in range(0, spec.out_features, step):
        rows = slice(first, first + step)
        scale_rows = slice(first // spec.tile_rows, -(-(first + step) // spec.tile_rows))
        slab = {
            name: value[rows if name.startswith("words") else scale_rows]
            for name, value in packed.items()
            if name != "table"
        }
        slab |= {"table": packed["table"]} if "table" in packed else {}
        result[:, rows] = x @ decode_weight(slab, spec, x.dtype).T
    return result


def grouped_matmul(
    x: Tensor, routing: ExpertRouting, packed: PackedWeight, spec: GroupedMatmulSpec
) -> Tensor:
    """Multiply rows ``x`` ``[rows, in]`` by the matrices of their experts; return ``[pairs, out]``."""
    pairs, matrix_spec = len(routing.expert_of_pair), spec.matrix_spec
    if pairs == 0:
        return x.new_empty(0, matrix_spec.out_features)
    use_matvec = pairs <= max(MAX_MATVEC_PAIRS, routing.num_matrices // 4)
    kernel = "matvec" if use_matvec else "rows"
    return launch_grouped(kernel, x, routing, packed, spec)


def launch_grouped(
    kernel: str, x: Tensor, routing: ExpertRouting, packed: PackedWeight, spec: GroupedMatmulSpec
) -> Tensor:
    """Launch ``matvec`` or ``rows`` for grouped products, with the tile that `choose_tile` returns."""
    pairs, matrix_spec = len(routing.expert_of_pair), spec.matrix_spec
    strips = (
        pairs if kernel == "matvec" else -(-pairs // choose_strip_rows(pairs, routing.num_matrices))
    )
    tile = choose_tile(kernel, matrix_spec, strips)
    return launch(
        kernel, x.contiguous(), flatten_matrices(packed), matrix_spec, tile, routing=routing
    )


def flatten_matrices(packed: PackedWeight) -> dict[str, Tensor]:
    """View stacked matrices as one taller matrix."""
    return {
        name: value.flatten(0, 1) if value.dim() > 2 else value for name, value in packed.items()
    }


def choose_strip_rows(pairs: int, num_matrices: int) -> int:
    """Return how many pairs of one expert a program multiplies together, by the mean number of pairs per expert."""
    return 16 if pairs <= 16 * num_matrices else 32 if pairs <= 32 * num_matrices else 64


def choose_chunk_columns(spec: MatmulSpec) -> tuple[int, bool]:
    """Return the columns of a chunk of the layout, and whether every word lies within one group."""
    if spec.group_size >= spec.in_features:  # there is one group
        return MAX_CHUNK_COLUMNS, True
    return choose_chunk(spec.bits, spec.group_size)


def kernel_constants(spec: MatmulSpec) -> dict[str, object]:
    """Return the compile-time constants of a kernel.

    ``WIDTH0`` to ``WIDTH2``: bits of each plane, 0 if there is none. ``CHUNK``: columns of a chunk (`bit_planes`).
    ``GROUP``: columns of a group. ``CENTER``: the code of 0 of symmetric integers. ``ZERO_KIND``: 0 if
    nothing is subtracted, 1 for zero points, 2 for minima. ``SCALE_LEVELS``: see `packed_fields.load_parameter`.
    ``GROUPS_PER_SUPERBLOCK``: groups of a superblock. ``GRID``: the grid, by its index in `GRIDS`. ``TILE_ROWS``: rows
    that share their parameters.
    """
    widths = (*PLANE_WIDTHS[spec.bits], 0, 0)
    is_centered = spec.grid == "int" and spec.symmetric
    return {
        **{f"WIDTH{i}": widths[i] for i in range(3)},
        "CHUNK": choose_chunk_columns(spec)[0],
        "GROUP": spec.group_size,
        "CENTER": 1 << (spec.bits - 1) if is_centered else 0,
        "ZERO_KIND": 2 if spec.has_minima else int(not spec.symmetric),
        "SCALE_LEVELS": 2 + LOWER_SCALE_ENCODINGS.index(spec.lower_encoding)
        if spec.superblock_size
        else 1,
        "GROUPS_PER_SUPERBLOCK": spec.superblock_size // spec.group_size
        if spec.superblock_size
        else 1,
        "GRID": GRIDS.index(spec.grid),
        "TILE_ROWS": spec.tile_rows,
    }


def min_tile_columns(kernel: str, spec: MatmulSpec) -> int:
    """Return the minimum columns of a tile: a chunk; for ``rows`` (tensor cores) at least 16 words of every plane."""
    columns, _ = choose_chunk_columns(spec)
    return columns if kernel == "matvec" else max(columns, 16 * 32 // min(PLANE_WIDTHS[spec.bits]))


def choose_tile(kernel: str, spec: MatmulSpec, strips: int = 1) -> Tile:
    """Return the tile of a program, small enough that a layer makes several programs per multiprocessor.

    The columns of a narrow layer are split among programs.

    Args:
        kernel: ``matvec`` or ``rows``.
        spec: the product with one matrix.
        strips: for grouped products, the number of pairs or strips of pairs.
    """
    min_columns, columns = min_tile_columns(kernel, spec), spec.in_features
    block_n, warps, widest = (8, 1, 1024) if kernel == "matvec" else (64, 2, 128)
    block_k = max(min_columns, min(widest, next_power_of_two(columns)))
    in_group = min(widest, spec.group_size & -spec.group_size)  # in one group: the cheapest
    if kernel == "rows" and min_columns <= in_group:
        block_k = in_group
    programs_without_split = -(-spec.out_features // block_n) * warps * strips
    split = max(1, min(TARGET_PROGRAMS // programs_without_split, -(-columns // block_k)))
    return Tile(block_n, block_k, warps, split)


def choose_field_mode(dtype: torch.dtype, device: torch.device) -> int:
    """Return the ``FIELD_MODE`` with which kernels decode fields, see `gpu.packed_fields`."""
    if dtype == torch.float32:
        return 0  # the biases of the others would cost digits that float32 has
    return 2 if device.type == "cuda" and torch.version.hip is None else 1


def launch(
    kernel: str,
    x: Tensor,
    packed: PackedWeight,
    spec: MatmulSpec,
    tile: Tile,
    mode: int | None = None,
    routing: ExpertRouting | None = None,
) -> Tensor:
    """Launch ``matvec`` or ``rows`` and add up the splits.

    Args:
        kernel: which of the two.
        x: rows ``[tokens, in]``.
        packed: the weight; for several matrices, see `flatten_matrices`.
        spec: the product with one matrix.
        tile: sizes of a program's tile, and how many programs share the columns.
        mode: ``FIELD_MODE``; by default that of `choose_field_mode`.
        routing: experts of the rows, if there are several matrices.

    Returns:
        ``[tokens, out]``, or ``[pairs, out]``, in the type of ``x``.
    """
    from quantforge_kernels.gpu.plane_kernels import matmul_kernel, matvec_kernel

    tokens, columns = x.shape
    pairs = tokens if routing is None else len(routing.expert_of_pair)
    experts_per_row = 0 if routing is None else pairs // tokens
    rows, (step, word_in_group) = spec.out_features, choose_chunk_columns(spec)
    tiles_per_split = -(-columns // (tile.block_k * tile.column_splits))
    out = x.new_empty(
        (tile.column_splits, pairs, rows),
        dtype=x.dtype if tile.column_splits == 1 else torch.float32,
    )
    pointers = _kernel_tensors(packed)
    sizes = (rows, columns, spec.groups_per_row, *_row_strides(packed), tiles_per_split)
    field_mode = choose_field_mode(x.dtype, x.device) if mode is None else mode
    constants = kernel_constants(spec) | {"FIELD_MODE": field_mode, "TOP_K": experts_per_row}
    programs = -(-rows // tile.block_n)
    if kernel == "matvec":
        launch_kernel(
            matvec_kernel, (programs, pairs, tile.column_splits),
            x, *pointers, out, x if routing is None else routing.expert_of_pair, *sizes, **constants,
            WORD_IN_GROUP=word_in_group,
            UNMASKED=columns % tile.block_k == 0 and columns % step == 0,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.warps,
        )  # fmt: skip
    else:
        # With minima the sum of x would be needed too: scales go to the codes instead.
        scale_after_dot = (
            word_in_group and not spec.has_minima and spec.group_size % tile.block_k == 0
        )
        strip = 16 if routing is None else choose_strip_rows(pairs, routing.num_matrices)
        routing_tensors = (
            (x, x) if routing is None else (routing.sorted_pairs, routing.expert_starts)
        )
        num_matrices = 0 if routing is None else routing.num_matrices
        strips = (
            -(-pairs // strip) if routing is None else pairs // strip + min(pairs, num_matrices)
        )
        launch_kernel(
            matmul_kernel, (programs, strips, tile.column_splits),
            x, *pointers, out, *routing_tensors, tokens, pairs, num_matrices, *sizes, **constants,
            WORD_IN_GROUP=word_in_group,
            SCALE_AFTER_DOT=scale_after_dot, DOT_IN_FLOAT32=x.dtype == torch.bfloat16 and x.device.type == "cpu",
            BLOCK_E=next_power_of_two(max(1, num_matrices)), BLOCK_M=strip, BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k, num_warps=tile.warps,
        )  # fmt: skip
    return add_splits(out, x.dtype)


def add_splits(split_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum partial results ``[splits, rows, out]`` and convert the sum to ``dtype``."""
    from quantforge_kernels.gpu.layer_kernels import add_splits_kernel

    if len(split_sums) == 1:
        return split_sums[0]
    out = split_sums.new_empty(split_sums.shape[1:], dtype=dtype)
    programs = -(-out.numel() // 512)
    launch_kernel(
        add_splits_kernel,
        (programs,),
        split_sums,
        out,
        out.numel(),
        len(split_sums),
        BLOCK=512,
        num_warps=4,
    )
    return out


def decode_weight(packed: PackedWeight, spec: MatmulSpec, dtype: torch.dtype) -> Tensor:
    """Decode the weight of some rows with ``decode_kernel``."""
    from quantforge_kernels.gpu.plane_kernels import decode_kernel

    rows, device = len(packed["words0"]), packed["words0"].device
    out = torch.empty(rows, spec.in_features, dtype=dtype, device=device)
    grid = (-(-rows // 8), -(-spec.in_features // 512))
    launch_kernel(
        decode_kernel, grid,
        *_kernel_tensors(packed), out, rows, spec.in_features, spec.groups_per_row, *_row_strides(packed),
        **kernel_constants(spec), FIELD_MODE=choose_field_mode(dtype, device), BLOCK_N=8, BLOCK_K=512, num_warps=4,
    )  # fmt: skip
    return out


def _row_strides(packed: PackedWeight) -> list[int]:
    """Return the row stride of each plane in units of four words; 0 if there is no such plane."""
    names = (f"words{i}" for i in range(3))
    return [packed[name].shape[1] // 4 if name in packed else 0 for name in names]


def _kernel_tensors(packed: PackedWeight) -> list[Tensor]:
    """Return planes, table, scales and zeros in the order of kernel arguments; missing ones are not read."""
    word_planes = [packed.get(f"words{i}", packed["words0"]) for i in range(3)]
    names = ("table", "scales", "d", "mins" if "mins" in packed else "zeros", "dmin")
    return [*word_planes, *(packed.get(name, packed["scales"]) for name in names)]


INT_KERNEL = Kernel("triton-int", accepts_int, prepare, matmul)
TABLE_KERNEL = Kernel("triton-table", accepts_table, prepare, matmul)
FLOAT8_KERNEL = Kernel("triton-fp8", accepts_float8, prepare, matmul)
GROUPED_KERNELS = tuple(
    make_grouped_kernel(kernel, grouped_matmul)
    for kernel in (INT_KERNEL, TABLE_KERNEL, FLOAT8_KERNEL)
)
