"""Products of packed integers on a processor with vectors: the kernel ``llvm-int``, of 1 to 8 bits.

`prepare` lays a weight out by lanes (`lane_layout`); `matmul` calls the programs of `integer_programs`. Many rows are
torch's where it is faster (`many_rows`), by a slab of the weight at a time that one of them has decoded.

Activations are bfloat16 or float16, and are rounded to 16-bit integers in blocks of at most 64 columns: that is finer
than either type. It would be coarser than float32, which is therefore left to the fallback kernel. Where a problem
allows it (`Problem.input_bits`), ``llvm-int8`` rounds them to 8-bit integers instead, those in float32 too: the same
layout, half the instructions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantforge_kernels.cpu import many_rows
from quantforge_kernels.cpu.features import LANES, feature
from quantforge_kernels.cpu.lane_layout import (
    FEW,
    PARAMETERS,
    Blocks,
    Form,
    cut,
    tiled,
    to_lanes,
)
from quantforge_kernels.grouped import GroupedProblem, Owners, by_matrix, grouped_form
from quantforge_kernels.layout import WIDTHS
from quantforge_kernels.problem import (
    Kernel,
    Packed,
    Parameters,
    Problem,
    narrowed,
)

if TYPE_CHECKING:
    from quantforge_kernels.cpu.compiler import Program

Stored = tuple[tuple[str, torch.dtype], ...]
Addresses = tuple[int, int, int, int, int]  # of x, its codes, scales and sums, and of the result
OCTET = 8  # bits
TOGETHER = 8  # rows that share the unpacking of a word
SLAB_WEIGHTS = 1 << 19  # decoded at a time: they stay in the second-level cache
STRIP = 32  # rows of which all tiles are computed at a time: rounded, they stay in the second-level cache
FEW_PAIRS = 8  # pairs of a row and an owner, or as many as half of the matrices, that are multiplied one by one
_PER_GROUP = frozenset({"scales", "zeros", "mins"})
# In the order of the words from `lane_layout.CODES` on.
_PLACES = ("codes0", "codes1", "codes2", "scales", "zeros", "mins", "d", "dmin")


def accepts(problem: Problem) -> bool:
    """Return whether a problem is of integers in 16-bit types, with groups of whole vectors and no scales in float8."""
    return problem.dtype in {torch.bfloat16, torch.float16} and _lies_in_lanes(problem)


def _lies_in_lanes(problem: Problem) -> bool:
    """Return whether there is a layout for the weights, in whatever type activations are."""
    return (
        problem.device == "cpu"
        and problem.grid == "int"
        and not problem.activation
        and problem.lower != "e4m3"
        and problem.dtype in {torch.bfloat16, torch.float16, torch.float32}
        and problem.out_features > 0
        and (best := feature()) is not None
        and blocks_of(problem, best) is not None
    )


def accepts_octets(problem: Problem) -> bool:
    """Return whether activations may be rounded to 8 bits, and products of such are exact here.

    Without ``vpdpbusd``, two products of a code of 8 bits do not fit 16.
    """
    return (
        problem.input_bits == OCTET
        and _lies_in_lanes(problem)
        and (problem.bits < OCTET or feature() == "avx512vnni")
    )


def blocks_of(problem: Problem, name: str) -> Blocks | None:
    """Return the sizes into which the columns are cut for a feature, or None where groups fill no vector."""
    return cut(
        WIDTHS[problem.bits],
        problem.in_features,
        problem.group_size,
        problem.superblock,
        LANES[name],
        pairs=problem.lower == "pairs",
    )


def _cut(problem: Problem) -> Blocks:
    name = feature()
    assert name is not None
    blocks = blocks_of(problem, name)
    assert blocks is not None
    return blocks


def prepare(codes: Tensor, parameters: Parameters, problem: Problem) -> Packed:
    """Lay codes and parameters out by tiles."""
    blocks = _cut(problem)
    planes = to_lanes(codes, WIDTHS[problem.bits], blocks)
    packed = {f"codes{i}": plane for i, plane in enumerate(planes)}
    for name, value in parameters.items():
        groups = _groups(problem, blocks) if name in _PER_GROUP else value.shape[1]
        packed[name] = tiled(value, blocks.lanes, groups)
    return narrowed(packed, problem)


def _groups(problem: Problem, blocks: Blocks) -> int:
    """Return the groups of a row that is filled up to whole units."""
    units = -(-problem.in_features // blocks.unit)
    return -(-units * blocks.unit // problem.group_size)


def form_of(problem: Problem, stored: Stored, name: str) -> Form:
    """Return the form of weights that programs are made for, with a feature; one row of activations at a time.

    Args:
        problem: accepted here.
        stored: the packed tensors in their order, each with its type.
        name: of the feature.
    """
    blocks = blocks_of(problem, name)
    assert blocks is not None
    zero = "mins" if problem.minima else "centre" if problem.symmetric else "zeros"
    parameters = tuple(pair for pair in stored if pair[0] in PARAMETERS)
    return Form(
        blocks=blocks,
        widths=WIDTHS[problem.bits],
        zero=zero,
        centre=1 << (problem.bits - 1),
        stored=parameters,
        dtype=problem.dtype,
        rows=1,
        feature=name,
        pairs=problem.lower == "pairs",
        input_bits=OCTET if accepts_octets(problem) else 2 * OCTET,
    )


class ProductPlan:
    """Sizes of the layout, and programs, that all products of a problem have in common.

    Args:
        problem: accepted here.
        stored: the packed tensors in their order, each with its type.
    """

    def __init__(self, problem: Problem, stored: Stored) -> None:
        name, blocks = feature(), _cut(problem)
        assert name is not None
        self._form = form_of(problem, stored, name)
        units = -(-problem.in_features // blocks.unit)
        self.unit = blocks.unit
        self.columns = units * blocks.unit  # filled up to whole units
        self.lanes = blocks.lanes
        self.tiles = -(-problem.out_features // blocks.lanes)
        self.groups = _groups(problem, blocks)
        self.blocks = self.columns // blocks.block
        self.input_bytes = self._form.input_bits // 8  # of a rounded activation
        # Rows that are multiplied from packed weights where torch may multiply as well.
        self.most = many_rows.most_packed(problem.dtype, blocks.block, self._form.input_bits)
        self._programs: dict[tuple[str, int], Program] = {}

    def program(self, name: str, together: int = 1) -> Program:
        """Return a program of `integer_programs`, by its name, for so many rows that are multiplied together."""
        if (name, together) not in self._programs:
            self._programs[name, together] = _compiled(name, replace(self._form, rows=together))
        return self._programs[name, together]

    def words(
        self, packed: Packed, work: tuple[int, int], rows: int, addresses: Addresses, tiles: int
    ) -> list[int]:
        """Return the argument of a program, see `lane_layout`; ``tiles`` are those of a row of the result."""
        counts = (self.columns, self.columns // self.unit, self.groups, tiles, STRIP)
        weights = [packed[name].data_ptr() if name in packed else 0 for name in _PLACES]
        return [*work, torch.get_num_threads(), rows, *addresses, *counts, *weights]


plan_of = cache(ProductPlan)


@cache
def _compiled(name: str, form: Form) -> Program:
    from quantforge_kernels.cpu import compiler, integer_programs

    make = {
        "multiply": integer_programs.multiply,
        "grouped": integer_programs.grouped,
        "decode": integer_programs.decode,
    }
    return compiler.Program(make[name](form, compiler.openmp()), name)


def matmul(x: Tensor, packed: Packed, problem: Problem) -> Tensor:
    """Return ``x W^T`` of ``x`` ``[rows, in]``, of which ``[rows, out]`` may be a view of wider rows."""
    rows, columns = x.shape
    plan = plan_of(problem, tuple((name, value.dtype) for name, value in packed.items()))
    if not rows:
        return x.new_empty(0, problem.out_features)
    by_torch = rows > plan.most and many_rows.computes(x)
    # A step of decoding is recorded, and torch's padding would end that: few rows are multiplied as they are.
    over = rows % TOGETHER if rows > STRIP and not by_torch else 0
    more = TOGETHER - over if over > FEW else 0
    if more or columns < plan.columns:
        x = pad(x, (0, plan.columns - columns, 0, more))
    x = x.contiguous()
    y = x.new_empty(rows + more, plan.tiles * plan.lanes)
    if by_torch:
        _by_slabs(x, y, packed, plan)
        return y[:, : problem.out_features]
    first = 0
    for together in (TOGETHER, FEW, rows % FEW):
        last = len(x) - (len(x) - first) % together if together else first
        if first < last:
            _from_packed(x[first:last], y[first:last], packed, plan, together)
        first = last
    return y[:rows, : problem.out_features]


def _from_packed(x: Tensor, y: Tensor, packed: Packed, plan: ProductPlan, together: int) -> None:
    """Write the product of ``x`` to ``y``; so many rows ``together`` (they divide all) share the unpacking of words."""
    _scratch, addresses = rounded(x, y, plan)  # in use until the program has run
    work = (0, plan.tiles * -(-len(x) // STRIP))
    plan.program("multiply", together)(plan.words(packed, work, len(x), addresses, plan.tiles))


def rounded(x: Tensor, y: Tensor, plan: ProductPlan) -> tuple[Tensor, Addresses]:
    """Return memory for the rounded rows of ``x``, and the addresses of all that a program reads and writes."""
    count = len(x) * plan.blocks  # of scales, and of sums
    size = plan.input_bytes * len(x) * plan.columns
    scratch = torch.empty(size + 8 * count, dtype=torch.uint8)
    codes = scratch.data_ptr()
    scales = codes + size
    return scratch, (x.data_ptr(), codes, scales, scales + 4 * count, y.data_ptr())


def _by_slabs(x: Tensor, y: Tensor, packed: Packed, plan: ProductPlan) -> None:
    """Write the product of ``x`` to ``y``: some tiles at a time are decoded, and torch multiplies by them."""
    step = max(1, SLAB_WEIGHTS // (plan.columns * plan.lanes))
    slab = x.new_empty(plan.columns * min(step, plan.tiles) * plan.lanes)
    decode = plan.program("decode")
    for first in range(0, plan.tiles, step):
        last = min(first + step, plan.tiles)
        columns = slice(first * plan.lanes, last * plan.lanes)
        # The program counts columns from the first tile of the weight.
        start = slab.data_ptr() - columns.start * slab.element_size()
        decode(plan.words(packed, (first, last), 0, (0, 0, 0, 0, start), last - first))
        width = columns.stop - columns.start
        y[:, columns] = x @ slab[: plan.columns * width].view(plan.columns, width)


def grouped_matmul(x: Tensor, owners: Owners, packed: Packed, problem: GroupedProblem) -> Tensor:
    """Multiply rows ``x`` ``[rows, in]`` by the matrices of their owners; return ``[pairs, out]``.

    Decoding sends a token to some experts: every pair has an owner of its own, and the program multiplies them one
    after the other, from the matrices as they lie. Of more pairs several have one owner; they are gathered and
    multiplied together, so that they share the unpacking of words. The bits of a row are the same either way.
    """
    pairs = len(owners.pairs)
    if pairs == 0:
        return x.new_empty(0, problem.each.out_features)
    if pairs > max(FEW_PAIRS, problem.matrices // 2):
        return _GATHERED.matmul(x, owners, packed, problem)
    plan = plan_of(problem.each, tuple((name, value.dtype) for name, value in packed.items()))
    if x.shape[1] < plan.columns:
        x = pad(x, (0, plan.columns - x.shape[1]))
    x = x.contiguous()
    y = x.new_empty(pairs, plan.tiles * plan.lanes)
    _scratch, addresses = rounded(x, y, plan)  # in use until the program has run
    work = (0, pairs * plan.tiles)
    words = plan.words(packed, work, len(x), addresses, plan.tiles)
    plan.program("grouped")([*words, owners.pairs.data_ptr(), pairs // len(x)])
    return y[:, : problem.each.out_features]


KERNEL = Kernel("llvm-int", accepts, prepare, matmul, rows_apart=16)
OF_OCTETS = Kernel("llvm-int8", accepts_octets, prepare, matmul, rows_apart=16)
_GATHERED = by_matrix(KERNEL)
GROUPED = (grouped_form(OF_OCTETS, grouped_matmul), grouped_form(KERNEL, grouped_matmul))
