"""Program that multiplies packed integers by activations of 16 bits: one output row per lane of a vector.

A row of activations is cut into blocks, and each block rounded to 16-bit integers under a scale of
its own: an error of at most ``max|x| / 65534`` of its block, a hundredth of what bfloat16 has lost
before. Codes are integers too, so that the sum over a block is exact in 32 bits:

    y_n = sum over blocks of  s_n (sum code x - zero_n sum x) x_scale - low_n sum x

One instruction (``vpdpwssd``, or ``vpmaddwd`` and an addition) multiplies two neighbouring columns of
every row by the same pair of activations. It takes codes of 16 bits. The layout (`lane_layout`) puts the
fields of a word so that a mask, or a shift and a mask, makes such codes of it in their places. Nothing is
summed across lanes, and the order of all sums is fixed. docs/cpu-programs.md explains it step by step.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

from llvmlite import ir

from quantforge_kernels.cpu.emit import F32, I16, I32, I64, ROWS, Emitter, Value
from quantforge_kernels.cpu.integer_form import (
    COLUMNS,
    OUT,
    TILES,
    UNITS,
    X_CODES,
    X_SCALES,
    X_SUMS,
    Form,
    X,
)
from quantforge_kernels.cpu.integer_weights import IntegerWeights
from quantforge_kernels.cpu.parallel_entry import add_entry

MOST = 32767.0  # of a 16-bit activation
TINY = 1e-30  # activations of a block without a larger one are 0
_PAIR = {"avx512vnni": "llvm.x86.avx512.vpdpwssd.512", "avx512bw": "llvm.x86.avx512.pmaddw.d.512",
         "avx2": "llvm.x86.avx2.pmadd.wd"}  # fmt: skip


def multiply(form: Form, parallel: bool) -> ir.Module:
    """Build ``multiply_run``: round all rows of x, and multiply a range of tiles."""
    module = ir.Module()
    quantize(module, form)
    _multiply(module, form)
    add_entry(module, "multiply", before="quantize", parallel=parallel)
    return module


def quantize(module: ir.Module, form: Form) -> None:
    """Round rows ``[first, last)`` of x: codes ``[units, rows, unit]``, scales and sums ``[blocks, rows]``."""
    e = Emitter(module, "quantize", form.blocks.lanes)
    build, block, unit = e.build, form.blocks.block, form.blocks.unit
    x, codes, scales, sums = (e.address(place) for place in (X, X_CODES, X_SCALES, X_SUMS))
    rows, columns, units = e.word(ROWS), e.word(COLUMNS), e.word(UNITS)
    width = form.dtype.itemsize
    vectors = block // e.lanes
    floats, integers = e.vector(F32), e.vector(I32)
    suffix = f"v{e.lanes}"
    with e.loop(e.first, e.last) as (row, _), e.loop(I64(0), units) as (u, _):
        for i in range(unit // block):
            start = build.add(build.mul(row, columns), e.scaled(u, unit, i * block))
            base = build.gep(x, [e.scaled(start, width)])
            values = [e.load_floats(base, I64(part), form.dtype) for part in range(vectors)]
            # Sizes compare like their bits, and those of NaN are larger than any number's.
            most = e.splat(I32, 0)
            for value in values:
                size = build.and_(build.bitcast(value, integers), e.splat(I32, 0x7FFFFFFF))
                most = e.call(f"llvm.umax.{suffix}i32", integers, most, size)
            bits = e.call(f"llvm.vector.reduce.umax.{suffix}i32", I32, most)
            peak = build.bitcast(bits, F32)
            normal = build.fcmp_ordered(">", peak, F32(TINY))
            normal = build.and_(normal, build.fcmp_ordered("<", peak, F32(math.inf)))
            inverse = build.select(normal, build.fdiv(F32(MOST), peak), F32(0.0))
            total = e.splat(I32, 0)
            place = build.add(build.mul(u, rows), row)
            for part, value in enumerate(values):
                near = build.fmul(value, e.spread(inverse))
                near = e.call(f"llvm.nearbyint.{suffix}f32", floats, near)
                number = build.fcmp_ordered("ord", near, near)
                whole = build.fptosi(build.select(number, near, e.splat(F32, 0.0)), integers)
                total = build.add(total, whole)
                offset = e.scaled(place, 2 * unit, 2 * (i * block + part * e.lanes))
                e.store(build.trunc(whole, e.vector(I16)), codes, offset)
            number = build.add(build.mul(e.scaled(u, unit // block, i), rows), row)
            e.store(build.fdiv(peak, F32(MOST)), scales, e.scaled(number, 4))
            e.store(
                e.call(f"llvm.vector.reduce.add.{suffix}i32", I32, total), sums, e.scaled(number, 4)
            )
    build.ret_void()


def _multiply(module: ir.Module, form: Form) -> None:
    """Multiply the tiles ``[first, last)`` with all rows: out ``[rows, tiles, lanes]``."""
    e = Emitter(module, "multiply", form.blocks.lanes)
    build = e.build
    weights = IntegerWeights(e, form)
    out, rows, width = e.address(OUT), e.word(ROWS), e.word(TILES)
    x = (e.address(X_CODES), e.address(X_SCALES), e.address(X_SUMS), rows)
    with (
        e.loop(e.first, e.last) as (tile, _),
        e.loop(I64(0), build.udiv(rows, I64(form.rows))) as (part, _),
    ):
        top = e.scaled(part, form.rows)
        totals = totals_of(e, form, weights, (tile, top), x)
        for r in range(form.rows):
            line = build.add(build.mul(build.add(top, I64(r)), width), tile)
            offset = e.scaled(line, form.dtype.itemsize * e.lanes)
            e.store(e.to_type(totals[r], form.dtype), out, offset)
    build.ret_void()


def totals_of(
    e: Emitter,
    form: Form,
    weights: IntegerWeights,
    at: tuple[Value, Value],
    x: tuple[Value, Value, Value, Value],
) -> list[Value]:
    """Return the products of a tile with some rows of x: a vector of floats for each.

    Args:
        e: writes them.
        form: of the weights.
        weights: of all tiles.
        at: the tile, and the first of the rows.
        x: addresses of the rounded activations, of their scales and sums, and how many rows these have.
    """
    build, (tile, top), (codes, scales, sums, rows) = e.build, at, x
    floats = e.vector(F32)
    with e.loop(I64(0), weights.units, [e.splat(F32, 0.0)] * form.rows) as (unit, totals):
        dots = _dots(e, form, weights, (tile, unit, top), (codes, sums, rows))
        for i in range(len(dots)):
            scale = weights.parameter("scales", tile, unit, i)
            low = None if form.zero == "centre" else weights.parameter(form.zero, tile, unit, i)
            whole = None if form.zero != "zeros" else build.fptosi(low, e.vector(I32))
            number = e.scaled(unit, len(dots), i)
            for r, dot in enumerate(dots[i]):
                line = e.scaled(build.add(build.mul(number, rows), build.add(top, I64(r))), 4)
                step = e.spread(e.load(scales, line, F32))
                value = dot
                if form.zero == "zeros":
                    total = e.spread(e.load(sums, line, I32))
                    value = build.sub(value, build.mul(whole, total))
                value = build.sitofp(value, floats)
                totals[r] = e.fma(value, build.fmul(scale, step), totals[r])
                if form.zero == "mins":
                    total = build.sitofp(e.load(sums, line, I32), F32)
                    shift = build.fmul(e.spread(total), step)
                    totals[r] = e.fma(build.fneg(low), shift, totals[r])
    return totals


def _dots(
    e: Emitter,
    form: Form,
    weights: IntegerWeights,
    at: tuple[Any, Any, Any],
    x: tuple[Any, Any, Any],
) -> list[list[Value]]:
    """Return the sums of code times activation: for each block of a unit and each row, a vector of 32-bit integers.

    Args:
        e: writes them.
        form: of the weights; a code that stands for 0 (``centre``) is taken off.
        weights: of all tiles.
        at: the tile, the unit, the first of the rows.
        x: addresses of the rounded activations and of their sums, and how many rows these have.
    """
    build, blocks = e.build, form.blocks
    tile, unit, top = at
    codes, sums, rows = x
    count = blocks.unit // blocks.block
    chains = max(1, 4 // form.rows)  # independent sums hide the latency of an addition
    bases = []
    for r in range(form.rows):
        line = build.add(build.mul(unit, rows), build.add(top, I64(r)))
        bases.append(build.gep(codes, [e.scaled(line, 2 * blocks.unit)]))
    results: list[list[Value]] = [[None] * form.rows for _ in range(count)]
    low = 0
    for plane, width in enumerate(form.widths):
        parts: list[list[list[Value]]] = [
            [[None] * chains for _ in range(form.rows)] for _ in range(count)
        ]
        for column, both in weights.pairs(plane, tile, unit):
            for r in range(form.rows):
                pair = e.load(bases[r], I64(2 * column), I32)
                chain = parts[column // blocks.block][r]
                place = (column // 2) % chains
                chain[place] = _add_products(e, form, chain[place], both, e.spread(pair))
        for i in range(count):
            for r in range(form.rows):
                total = reduce(build.add, filter(None, parts[i][r]))
                if low:
                    total = build.add(results[i][r], build.shl(total, e.splat(I32, low)))
                results[i][r] = total
        low += width
    if form.zero == "centre":
        for i in range(count):
            number = e.scaled(unit, count, i)
            for r in range(form.rows):
                line = build.add(build.mul(number, rows), build.add(top, I64(r)))
                total = e.load(sums, e.scaled(line, 4), I32)
                shift = build.mul(total, I32(form.centre))
                results[i][r] = build.sub(results[i][r], e.spread(shift))
    return results


def _add_products(e: Emitter, form: Form, total: Value, codes: Value, pair: Value) -> Value:
    """Add the products of two columns with a pair of activations to ``total``, in every lane; None is no sum yet."""
    name, kind = _PAIR[form.feature], e.vector(I32)
    if form.feature == "avx512vnni":
        total = e.splat(I32, 0) if total is None else total
        return e.call(name, kind, total, e.build.bitcast(codes, kind), pair)
    wide = e.build.bitcast(pair, e.vector(I16, 2 * e.lanes))
    products = e.call(name, kind, codes, wide)
    return products if total is None else e.build.add(total, products)
