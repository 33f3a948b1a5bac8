"""CPU program for products of a few rows with unquantized weights.

``y = x W^T + bias`` with W ``[out, in]`` as stored. An element of y is a sum along a row of W, in float32, whose
lanes are added at the end. For one or two rows of x, W is read sequentially, and several
accumulators per row hide the latency of additions; for more, several rows of W are read side by side,
so that a loaded part of x serves all of them. If there are more rows than registers, they are cut into strips, and all
strips are multiplied by one tile of W before the next one, so that W is read from memory once.
"""

from __future__ import annotations

from functools import reduce

import torch
from llvmlite import ir

from quantforge_kernels.cpu.llvm_emitter import (
    ARG_ROWS,
    F32,
    I32,
    I64,
    Emitter,
    Value,
    add_entry_point,
)

# Words of the argument, by place, after FIRST, LAST, THREADS and ROWS: addresses, then vectors of a row of x, of y, and
# strips, of which the last ends with the last row: it may begin in the one before, and compute the same again.
ARG_X, ARG_WEIGHT, ARG_BIAS, ARG_OUT, ARG_VECTORS, ARG_WIDTH, ARG_STRIPS = range(4, 11)
PREFETCH_BYTES = 4096  # bytes that are fetched before they are needed
_MAX_SUMS_PER_ROW = 4  # sums of one row of W, at most
# By lanes (with 16 and 32 registers), and whether in float32, where what is loaded of x needs no register: rows of x
# that are one strip, at most; rows of each of several strips; sums.
_REGISTER_BUDGET = {
    (8, False): (5, 4, 12),
    (8, True): (5, 4, 16),
    (16, False): (8, 6, 28),
    (16, True): (8, 8, 32),
}


def choose_strip_rows(rows: int, dtype: torch.dtype, lanes: int) -> int:
    """Return how many rows of x form a strip, so that strips are few and of nearly equal size."""
    max_single_strip, max_strip, _ = _REGISTER_BUDGET[lanes, dtype == torch.float32]
    return rows if rows <= max_single_strip else -(-rows // -(-rows // max_strip))


def choose_unrolling(rows: int, columns: int, dtype: torch.dtype, lanes: int) -> tuple[int, int]:
    """Return how many rows of W are read side by side, and how many accumulators each of them has.

    ``rows`` is the number of rows of x in a strip; together they need as many accumulators as there are registers.
    """
    if rows > 2:
        return (4 if 4 * rows <= _REGISTER_BUDGET[lanes, dtype == torch.float32][2] else 2), 1
    return 1, next(
        size for size in range(_MAX_SUMS_PER_ROW, 0, -1) if columns % (size * lanes) == 0
    )


def build_linear(
    dtype: torch.dtype,
    rows: int,
    unrolling: tuple[int, int],
    bias: bool,
    lanes: int,
    parallel: bool,
) -> ir.Module:
    """Build ``linear_run``, which computes a range of tiles of columns of y; a tile has one column per lane.

    ``rows`` comes from `choose_strip_rows`, ``unrolling`` from `choose_unrolling`.
    """
    module = ir.Module()
    e = Emitter(module, "linear", lanes)
    builder = e.builder
    out, width, strips = e.load_address(ARG_OUT), e.load_word(ARG_WIDTH), e.load_word(ARG_STRIPS)
    last_start = builder.sub(e.load_word(ARG_ROWS), I64(rows))
    with e.loop(e.first, e.last) as (tile, _), e.loop(I64(0), strips) as (strip, _):
        start = e.scale_index(strip, rows)
        start = builder.select(builder.icmp_signed("<", start, last_start), start, last_start)
        undefined = [ir.Constant(e.vector_type(F32), ir.Undefined)] * rows
        with e.loop(I64(0), I64(lanes // unrolling[0]), undefined) as (group, results):
            first = e.scale_index(group, unrolling[0])
            start_rows = (start, builder.add(e.scale_index(tile, lanes), first))
            for index, dot in enumerate(_emit_dot_products(e, dtype, rows, unrolling, start_rows)):
                n, r = divmod(index, rows)
                lane = builder.trunc(builder.add(first, I64(n)), I32)
                results[r] = builder.insert_element(results[r], dot, lane)
        bias_value = e.load_floats(e.load_address(ARG_BIAS), tile, dtype) if bias else None
        for r, dot in enumerate(results):
            value = builder.fadd(dot, bias_value) if bias else dot
            offset = builder.mul(builder.add(start, I64(r)), width)
            e.store_floats(value, out, builder.add(offset, tile), dtype)
    builder.ret_void()
    add_entry_point(module, "linear", parallel=parallel)
    return module


def _emit_dot_products(
    e: Emitter,
    dtype: torch.dtype,
    rows: int,
    unrolling: tuple[int, int],
    start_rows: tuple[Value, Value],
) -> list[Value]:
    """Write code for the dot products of a strip of x with some rows of W; ``start_rows`` are the first row of each."""
    builder, vectors, (weight_rows, sums_per_row), (start, first) = (
        e.builder,
        e.load_word(ARG_VECTORS),
        unrolling,
        start_rows,
    )
    size = dtype.itemsize * e.lanes
    x = builder.gep(e.load_address(ARG_X), [e.scale_index(builder.mul(start, vectors), size)])
    row_addresses = [
        builder.gep(
            e.load_address(ARG_WEIGHT),
            [e.scale_index(builder.mul(builder.add(first, I64(n)), vectors), size)],
        )
        for n in range(weight_rows)
    ]
    zeros = [e.splat(F32, 0.0)] * (weight_rows * rows * sums_per_row)
    with e.loop(I64(0), builder.udiv(vectors, I64(sums_per_row)), zeros) as (block, sums):
        for step in range(sums_per_row):
            i = e.scale_index(block, sums_per_row, step)
            x_values = [
                e.load_floats(x, builder.add(builder.mul(I64(r), vectors), i), dtype)
                for r in range(rows)
            ]
            for n, row_address in enumerate(row_addresses):
                weight = e.load_floats(row_address, i, dtype)
                prefetch_offset = e.scale_index(i, size, PREFETCH_BYTES)
                if weight_rows > 1:  # the same place of the rows that follow
                    prefetch_offset = e.scale_index(
                        builder.add(i, e.scale_index(vectors, weight_rows)), size
                    )
                e.prefetch(builder.gep(row_address, [prefetch_offset]))
                for r in range(rows):
                    index = (n * rows + r) * sums_per_row + step
                    sums[index] = e.fma(weight, x_values[r], sums[index])
    return [
        e.sum_lanes(reduce(builder.fadd, sums[index : index + sums_per_row]))
        for index in range(0, len(sums), sums_per_row)
    ]
