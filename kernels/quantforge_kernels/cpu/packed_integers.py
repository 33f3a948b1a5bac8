"""CPU kernels ``llvm-int`` and ``llvm-int8``: products with packed integer weights of 1 to 8 bits.

`prepare` arranges a weight by lanes (`lane_layout`); `matmul` calls the programs of `integer_programs`. For many rows,
where torch is faster (`many_rows`), a program decodes one slab of the weight at a time and torch multiplies.

Activations in bfloat16 or float16 are rounded to 16-bit integers in blocks of at most 64 columns, which is finer than
either type. It would be coarser than float32, which is left to the fallback kernel. If the specification allows it
(`MatmulSpec.input_bits`), ``llvm-int8`` rounds activations, also those in float32, to 8-bit integers: the same layout,
half the instructions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantforge_kernels.bit_planes import PLANE_WIDTHS
from quantforge_kernels.cpu import many_rows
from quantforge_kernels.cpu.instruction_sets import LANES, best_instruction_set
from quantforge_kernels.cpu.lane_layout import (
    FEW_ROWS,
    PARAM_NAMES,
    ColumnBlocks,
    ProgramSpec,
    choose_column_blocks,
    pack_lanes,
    tile_parameter,
)
from quantforge_kernels.grouped import (
    ExpertRouting,
    GroupedMatmulSpec,
    make_grouped_kernel,
    make_looped_kernel,
)
from quantforge_kernels.matmul_spec import (
    Kernel,
    MatmulSpec,
    PackedWeight,
    QuantParams,
    encode_lower_scales,
)

if TYPE_CHECKING:
    from quantforge_kernels.cpu.compiler import Program

PackedDtypes = tuple[tuple[str, torch.dtype], ...]
# Addresses of x, its codes, scales and sums, and of the result
BufferAddresses = tuple[int, int, int, int, int]
INT8_BITS = 8  # bits
MAX_SHARED_ROWS = 8  # rows that share the unpacking of a word
SLAB_WEIGHTS = 1 << 19  # decoded at a time: they stay in the second-level cache
STRIP_ROWS = 32  # rows of which all tiles are computed at a time: rounded, they stay in the second-level cache
FEW_PAIRS = 8  # pairs of a row and an owner, or as many as half of the matrices, that are multiplied one by one
_GROUP_PARAMS = frozenset({"scales", "zeros", "mins"})
# In the order of the words from `lane_layout.ARG_PLANES` on.
_ARG_ORDER = ("codes0", "codes1", "codes2", "scales", "zeros", "mins", "d", "dmin")


def accepts(spec: MatmulSpec) -> bool:
    """Return whether a product has integer codes, 16-bit activations, groups of whole vectors and no float8 scales."""
    return spec.dtype in {torch.bfloat16, torch.float16} and _has_lane_layout(spec)


def _has_lane_layout(spec: MatmulSpec) -> bool:
    """Return whether the weights can be arranged by lanes, whatever the type of activations."""
    return (
        spec.device == "cpu"
        and spec.grid == "int"
        and not spec.activation_kind
        and spec.lower_encoding != "e4m3"
        and spec.dtype in {torch.bfloat16, torch.float16, torch.float32}
        and spec.out_features > 0
        and (best := best_instruction_set()) is not None
        and column_blocks(spec, best) is not None
    )


def accepts_int8(spec: MatmulSpec) -> bool:
    """Return whether activations may be rounded to 8 bits, and integer sums are exact on this CPU.

    Without ``vpdpbusd``, two products with 8-bit codes overflow 16 bits.
    """
    return (
        spec.input_bits == INT8_BITS
        and _has_lane_layout(spec)
        and (spec.bits < INT8_BITS or best_instruction_set() == "avx512vnni")
    )


def column_blocks(spec: MatmulSpec, name: str) -> ColumnBlocks | None:
    """Return how columns are divided for an instruction set, or None if groups are not whole vectors."""
    return choose_column_blocks(
        PLANE_WIDTHS[spec.bits],
        spec.in_features,
        spec.group_size,
        spec.superblock_size,
        LANES[name],
        pairs=spec.lower_encoding == "pairs",
    )


def _best_column_blocks(spec: MatmulSpec) -> ColumnBlocks:
    name = best_instruction_set()
    assert name is not None
    blocks = column_blocks(spec, name)
    assert blocks is not None
    return blocks


def prepare(codes: Tensor, parameters: QuantParams, spec: MatmulSpec) -> PackedWeight:
    """Arrange codes and parameters by tiles."""
    blocks = _best_column_blocks(spec)
    planes = pack_lanes(codes, PLANE_WIDTHS[spec.bits], blocks)
    packed = {f"codes{i}": plane for i, plane in enumerate(planes)}
    for name, value in parameters.items():
        groups = _padded_groups(spec, blocks) if name in _GROUP_PARAMS else value.shape[1]
        packed[name] = tile_parameter(value, blocks.lanes, groups)
    return encode_lower_scales(packed, spec)


def _padded_groups(spec: MatmulSpec, blocks: ColumnBlocks) -> int:
    """Return the number of groups of a row that is padded to whole units."""
    units = -(-spec.in_features // blocks.unit_columns)
    return -(-units * blocks.unit_columns // spec.group_size)


def make_program_spec(spec: MatmulSpec, stored: PackedDtypes, name: str) -> ProgramSpec:
    """Return the specification of the programs for a weight, with one row of activations at a time.

    Args:
        spec: a product that is accepted here.
        stored: names of the packed tensors in order, each with its type.
        name: instruction set.
    """
    blocks = column_blocks(spec, name)
    assert blocks is not None
    zero = "mins" if spec.has_minima else "centre" if spec.symmetric else "zeros"
    parameters = tuple(pair for pair in stored if pair[0] in PARAM_NAMES)
    return ProgramSpec(
        blocks=blocks,
        widths=PLANE_WIDTHS[spec.bits],
        zero_kind=zero,
        center_code=1 << (spec.bits - 1),
        param_dtypes=parameters,
        dtype=spec.dtype,
        shared_rows=1,
        instruction_set=name,
        packed_nibbles=spec.lower_encoding == "pairs",
        input_bits=INT8_BITS if accepts_int8(spec) else 2 * INT8_BITS,
    )


class ProductPlan:
    """Layout sizes and compiled programs that all products with one specification share.

    Args:
        spec: a product that is accepted here.
        stored: names of the packed tensors in order, each with its type.
    """

    def __init__(self, spec: MatmulSpec, stored: PackedDtypes) -> None:
        name, blocks = best_instruction_set(), _best_column_blocks(spec)
        assert name is not None
        self.program_spec = make_program_spec(spec, stored, name)
        units = -(-spec.in_features // blocks.unit_columns)
        self.unit_columns = blocks.unit_columns
        self.padded_columns = units * blocks.unit_columns  # filled up to whole units
        self.lanes = blocks.lanes
        self.tiles = -(-spec.out_features // blocks.lanes)
        self.groups = _padded_groups(spec, blocks)
        self.num_blocks = self.padded_columns // blocks.block_columns
        self.rounded_bytes = self.program_spec.input_bits // 8  # of a rounded activation
        # Rows that are multiplied from packed weights where torch may multiply as well.
        self.max_packed_rows = many_rows.max_packed_rows(
            spec.dtype, blocks.block_columns, self.program_spec.input_bits
        )
        self._programs: dict[tuple[str, int], Program] = {}

    def get_program(self, name: str, rows_at_once: int = 1) -> Program:
        """Return a compiled program of `integer_programs` for ``rows_at_once`` rows that are multiplied together."""
        if (name, rows_at_once) not in self._programs:
            self._programs[name, rows_at_once] = _compile_program(
                name, replace(self.program_spec, shared_rows=rows_at_once)
            )
        return self._programs[name, rows_at_once]

    def make_arguments(
        self,
        packed: PackedWeight,
        work: tuple[int, int],
        rows: int,
        addresses: BufferAddresses,
        tiles: int,
    ) -> list[int]:
        """Return the argument words of a program (see `lane_layout`); ``tiles`` is the number per result row."""
        counts = (
            self.padded_columns,
            self.padded_columns // self.unit_columns,
            self.groups,
            tiles,
            STRIP_ROWS,
        )
        weights = [packed[name].data_ptr() if name in packed else 0 for name in _ARG_ORDER]
        return [*work, torch.get_num_threads(), rows, *addresses, *counts, *weights]


get_product_plan = cache(ProductPlan)


@cache
def _compile_program(name: str, spec: ProgramSpec) -> Program:
    from quantforge_kernels.cpu import compiler, integer_programs

    make = {
        "multiply": integer_programs.build_multiply,
        "grouped": integer_programs.build_grouped_multiply,
        "decode": integer_programs.build_decode,
    }
    return compiler.Program(make[name](spec, compiler.load_openmp()), name)


def matmul(x: Tensor, packed: PackedWeight, spec: MatmulSpec) -> Tensor:
    """Return ``x W^T`` for ``x`` ``[rows, in]``; the result ``[rows, out]`` may be a view of wider rows."""
    rows, columns = x.shape
    plan = get_product_plan(spec, tuple((name, value.dtype) for name, value in packed.items()))
    if not rows:
        return x.new_empty(0, spec.out_features)
    by_torch = rows > plan.max_packed_rows and many_rows.torch_is_fast(x)
    # A step of decoding is recorded, and torch's padding would end that: few rows are multiplied as they are.
    extra_rows = rows % MAX_SHARED_ROWS if rows > STRIP_ROWS and not by_torch else 0
    padding_rows = MAX_SHARED_ROWS - extra_rows if extra_rows > FEW_ROWS else 0
    if padding_rows or columns < plan.padded_columns:
        x = pad(x, (0, plan.padded_columns - columns, 0, padding_rows))
    x = x.contiguous()
    y = x.new_empty(rows + padding_rows, plan.tiles * plan.lanes)
    if by_torch:
        _multiply_by_slabs(x, y, packed, plan)
        return y[:, : spec.out_features]
    first = 0
    for rows_at_once in (MAX_SHARED_ROWS, FEW_ROWS, rows % FEW_ROWS):
        last = len(x) - (len(x) - first) % rows_at_once if rows_at_once else first
        if first < last:
            _multiply_packed(x[first:last], y[first:last], packed, plan, rows_at_once)
        first = last
    return y[:rows, : spec.out_features]


def _multiply_packed(
    x: Tensor, y: Tensor, packed: PackedWeight, plan: ProductPlan, rows_at_once: int
) -> None:
    """Write the product of ``x`` to ``y``; ``rows_at_once`` rows, a divisor of all rows, share the unpacking."""
    _scratch, addresses = allocate_rounded_rows(x, y, plan)  # in use until the program has run
    work = (0, plan.tiles * -(-len(x) // STRIP_ROWS))
    plan.get_program("multiply", rows_at_once)(
        plan.make_arguments(packed, work, len(x), addresses, plan.tiles)
    )


def allocate_rounded_rows(
    x: Tensor, y: Tensor, plan: ProductPlan
) -> tuple[Tensor, BufferAddresses]:
    """Return scratch memory for the rounded rows of ``x``, and the addresses that a program reads and writes."""
    count = len(x) * plan.num_blocks  # of scales, and of sums
    size = plan.rounded_bytes * len(x) * plan.padded_columns
    scratch = torch.empty(size + 8 * count, dtype=torch.uint8)
    codes = scratch.data_ptr()
    scales = codes + size
    return scratch, (x.data_ptr(), codes, scales, scales + 4 * count, y.data_ptr())


def _multiply_by_slabs(x: Tensor, y: Tensor, packed: PackedWeight, plan: ProductPlan) -> None:
    """Write the product of ``x`` to ``y``: decode some tiles at a time, and multiply by them with torch."""
    step = max(1, SLAB_WEIGHTS // (plan.padded_columns * plan.lanes))
    slab = x.new_empty(plan.padded_columns * min(step, plan.tiles) * plan.lanes)
    decode = plan.get_program("decode")
    for first in range(0, plan.tiles, step):
        last = min(first + step, plan.tiles)
        columns = slice(first * plan.lanes, last * plan.lanes)
        # The program counts columns from the first tile of the weight.
        start = slab.data_ptr() - columns.start * slab.element_size()
        decode(plan.make_arguments(packed, (first, last), 0, (0, 0, 0, 0, start), last - first))
        width = columns.stop - columns.start
        y[:, columns] = x @ slab[: plan.padded_columns * width].view(plan.padded_columns, width)


def grouped_matmul(
    x: Tensor, owners: ExpertRouting, packed: PackedWeight, spec: GroupedMatmulSpec
) -> Tensor:
    """Multiply rows ``x`` ``[rows, in]`` by the matrices of their experts; return ``[pairs, out]``.

    For a few pairs, as in decoding, most experts differ, and the program multiplies the pairs one
    after the other from the stacked matrices. For more pairs, those of the same expert are gathered and
    multiplied together, so that they share the unpacking of words. Both give the same bits.
    """
    pairs = len(owners.expert_of_pair)
    if pairs == 0:
        return x.new_empty(0, spec.matrix_spec.out_features)
    if pairs > max(FEW_PAIRS, spec.num_matrices // 2):
        return _LOOPED_KERNEL.matmul(x, owners, packed, spec)
    plan = get_product_plan(
        spec.matrix_spec, tuple((name, value.dtype) for name, value in packed.items())
    )
    if x.shape[1] < plan.padded_columns:
        x = pad(x, (0, plan.padded_columns - x.shape[1]))
    x = x.contiguous()
    y = x.new_empty(pairs, plan.tiles * plan.lanes)
    _scratch, addresses = allocate_rounded_rows(x, y, plan)  # in use until the program has run
    work = (0, pairs * plan.tiles)
    arguments = plan.make_arguments(packed, work, len(x), addresses, plan.tiles)
    plan.get_program("grouped")([*arguments, owners.expert_of_pair.data_ptr(), pairs // len(x)])
    return y[:, : spec.matrix_spec.out_features]


KERNEL = Kernel("llvm-int", accepts, prepare, matmul, row_alignment=16)
INT8_KERNEL = Kernel("llvm-int8", accepts_int8, prepare, matmul, row_alignment=16)
_LOOPED_KERNEL = make_looped_kernel(KERNEL)
GROUPED_KERNELS = (
    make_grouped_kernel(INT8_KERNEL, grouped_matmul),
    make_grouped_kernel(KERNEL, grouped_matmul),
)
