"""Products with weights that are not quantized, for a few rows on a processor with vectors.

``y = x W^T + bias``, W ``[out, in]`` as it lies. A number of y is a sum along a row of W, in float32, whose
lanes are added up at the end. For one or two rows of x, W is read from its first byte to its last, and
sums of vectors in turn hide how long an addition takes; for more, rows of W are read side by side,
so that what is loaded of x serves all of them. More rows than there are registers for pass in strips, all of
them one tile of W after the other, which is so read from memory once.
"""

from __future__ import annotations

from functools import reduce

import torch
from llvmlite import ir

from quantforge_kernels.cpu.emit import F32, I32, I64, ROWS, Emitter, Value, add_entry

# Words of the argument, by place, after FIRST, LAST, THREADS and ROWS: addresses, then vectors of a row of x, of y, and
# strips, of which the last ends with the last row: it may begin in the one before, and compute the same again.
X, WEIGHT, BIAS, OUT, VECTORS, WIDTH, STRIPS = range(4, 11)
AHEAD = 4096  # bytes that are fetched before they are needed
_CHAINS = 4  # sums of one row of W, at most
# By lanes (with 16 and 32 registers), and whether in float32, where what is loaded of x needs no register: rows of x
# that are one strip, at most; rows of each of several strips; sums.
_REGISTERS = {
    (8, False): (5, 4, 12),
    (8, True): (5, 4, 16),
    (16, False): (8, 6, 28),
    (16, True): (8, 8, 32),
}


def strip(rows: int, dtype: torch.dtype, lanes: int) -> int:
    """Return how many rows of x are multiplied together; they are cut into as few and as equal strips as that makes."""
    alone, each, _ = _REGISTERS[lanes, dtype == torch.float32]
    return rows if rows <= alone else -(-rows // -(-rows // each))


def cut(rows: int, columns: int, dtype: torch.dtype, lanes: int) -> tuple[int, int]:
    """Return how many rows of W are read side by side, and how many sums of vectors each of them has in turn.

    With ``rows`` of x, a strip, that makes as many sums as registers hold.
    """
    if rows > 2:
        return (4 if 4 * rows <= _REGISTERS[lanes, dtype == torch.float32][2] else 2), 1
    return 1, next(size for size in range(_CHAINS, 0, -1) if columns % (size * lanes) == 0)


def linear(
    dtype: torch.dtype, rows: int, parts: tuple[int, int], bias: bool, lanes: int, parallel: bool
) -> ir.Module:
    """Build ``linear_run``: a range of columns of y, as many as there are lanes at a time.

    ``rows`` are those of a `strip`; ``parts``: see `cut`.
    """
    module = ir.Module()
    e = Emitter(module, "linear", lanes)
    build = e.build
    out, width, strips = e.address(OUT), e.word(WIDTH), e.word(STRIPS)
    final = build.sub(e.word(ROWS), I64(rows))
    with e.loop(e.first, e.last) as (tile, _), e.loop(I64(0), strips) as (number, _):
        start = e.scaled(number, rows)
        start = build.select(build.icmp_signed("<", start, final), start, final)
        blank = [ir.Constant(e.vector(F32), ir.Undefined)] * rows
        with e.loop(I64(0), I64(lanes // parts[0]), blank) as (group, results):
            first = e.scaled(group, parts[0])
            at = (start, build.add(e.scaled(tile, lanes), first))
            for place, total in enumerate(_sums(e, dtype, rows, parts, at)):
                n, r = divmod(place, rows)
                lane = build.trunc(build.add(first, I64(n)), I32)
                results[r] = build.insert_element(results[r], total, lane)
        more = e.load_floats(e.address(BIAS), tile, dtype) if bias else None
        for r, total in enumerate(results):
            value = build.fadd(total, more) if bias else total
            line = build.mul(build.add(start, I64(r)), width)
            e.store_floats(value, out, build.add(line, tile), dtype)
    build.ret_void()
    add_entry(module, "linear", parallel=parallel)
    return module


def _sums(
    e: Emitter, dtype: torch.dtype, rows: int, parts: tuple[int, int], at: tuple[Value, Value]
) -> list[Value]:
    """Sum the products of each row of a strip of x with rows of W; ``at``: the first of either."""
    build, vectors, (side, steps), (start, first) = e.build, e.word(VECTORS), parts, at
    size = dtype.itemsize * e.lanes
    x = build.gep(e.address(X), [e.scaled(build.mul(start, vectors), size)])
    lines = [
        build.gep(e.address(WEIGHT), [e.scaled(build.mul(build.add(first, I64(n)), vectors), size)])
        for n in range(side)
    ]
    zeros = [e.splat(F32, 0.0)] * (side * rows * steps)
    with e.loop(I64(0), build.udiv(vectors, I64(steps)), zeros) as (block, sums):
        for step in range(steps):
            i = e.scaled(block, steps, step)
            given = [
                e.load_floats(x, build.add(build.mul(I64(r), vectors), i), dtype)
                for r in range(rows)
            ]
            for n, line in enumerate(lines):
                weight = e.load_floats(line, i, dtype)
                ahead = e.scaled(i, size, AHEAD)
                if side > 1:  # the same place of the rows that follow
                    ahead = e.scaled(build.add(i, e.scaled(vectors, side)), size)
                e.fetch(build.gep(line, [ahead]))
                for r in range(rows):
                    place = (n * rows + r) * steps + step
                    sums[place] = e.fma(weight, given[r], sums[place])
    return [
        e.total(reduce(build.fadd, sums[place : place + steps]))
        for place in range(0, len(sums), steps)
    ]
