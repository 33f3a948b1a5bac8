"""Program that multiplies packed integers by rounded activations: one output row per lane of a vector.

A row of activations is cut into blocks, and each block rounded to 16-bit integers under a scale of its own: an error of
at most ``max|x| / 65534`` of its block, a hundredth of what bfloat16 has lost before; where 8 bits are allowed,
``max|x| / 254``. Codes are integers too, so that the sum over a block is exact in 32 bits:

    y_n = sum over blocks of  s_n (sum code x - zero_n sum x) x_scale - low_n sum x

One instruction multiplies two or four columns of every row by the same activations (`integer_sums`). The layout
(`lane_layout`) puts the fields of a word so that a mask, or a shift and a mask, makes such codes of it in their places.
Nothing is summed across lanes, and the order of all sums is fixed. docs/cpu-programs.md explains it step by step.
"""

from __future__ import annotations

import math
from functools import reduce

from llvmlite import ir

from quantforge_kernels.cpu.emit import F32, I32, I64, ROWS, Emitter, Value
from quantforge_kernels.cpu.integer_form import (
    COLUMNS,
    FEW,
    OUT,
    STRIP,
    TILES,
    UNITS,
    X_CODES,
    X_SCALES,
    X_SUMS,
    Form,
    X,
)
from quantforge_kernels.cpu.integer_sums import MOST, SUMS
from quantforge_kernels.cpu.integer_weights import IntegerWeights
from quantforge_kernels.cpu.lane_layout import TERNARY, in_pairs
from quantforge_kernels.cpu.parallel_entry import add_entry, add_taking_entry

TINY = 1e-30  # activations of a block without a larger one are 0


def multiply(form: Form, parallel: bool) -> ir.Module:
    """Build ``multiply_run``: round all rows of x, and multiply a range of tiles."""
    module = ir.Module()
    quantize(module, form)
    _multiply(module, form)
    if form.rows > FEW:
        add_taking_entry(module, "multiply", before="quantize", parallel=parallel)
    else:
        add_entry(module, "multiply", before="quantize", parallel=parallel)
    return module


def quantize(module: ir.Module, form: Form) -> None:
    """Round rows ``[first, last)`` of x, for every `Form.rows` rows that are multiplied together.

    Such a group has codes ``[units, rows, unit]``, in the order in which words give columns (`lane_layout`), and scales
    and sums ``[blocks, rows]``. Of the sums is kept what `totals_of` adds: times ``-centre``, times the scale (float32,
    where there are ``mins``), or as they are.
    """
    e = Emitter(module, "quantize", form.blocks.lanes)
    build, block, unit = e.build, form.blocks.block, form.blocks.unit
    x, codes, scales, sums = (e.address(place) for place in (X, X_CODES, X_SCALES, X_SUMS))
    columns, units = e.word(COLUMNS), e.word(UNITS)
    width, octets, most_code = form.dtype.itemsize, form.input_bits // 8, MOST[form.input_bits]
    order = in_pairs(e.lanes) if octets == 2 and form.widths != (TERNARY,) else range(e.lanes)
    vectors = block // e.lanes
    floats, integers = e.vector(F32), e.vector(I32)
    suffix = f"v{e.lanes}"
    with e.loop(e.first, e.last) as (row, _), e.loop(I64(0), units) as (u, _):
        group, r = build.udiv(row, I64(form.rows)), build.urem(row, I64(form.rows))
        place = build.add(build.mul(group, units), u)
        place = build.add(e.scaled(place, form.rows), r)
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
            inverse = build.select(normal, build.fdiv(F32(most_code), peak), F32(0.0))
            total = e.splat(I32, 0)
            for part, value in enumerate(values):
                near = build.fmul(value, e.spread(inverse))
                near = e.call(f"llvm.nearbyint.{suffix}f32", floats, near)
                number = build.fcmp_ordered("ord", near, near)
                whole = build.fptosi(build.select(number, near, e.splat(F32, 0.0)), integers)
                total = build.add(total, whole)
                offset = e.scaled(place, octets * unit, octets * (i * block + part * e.lanes))
                near = build.trunc(whole, e.vector(ir.IntType(form.input_bits)))
                e.store(e.reordered(near, order), codes, offset)
            number = build.add(build.mul(group, units), u)
            number = build.add(e.scaled(number, unit // block * form.rows, i * form.rows), r)
            step = build.fdiv(peak, F32(most_code))
            e.store(step, scales, e.scaled(number, 4))
            whole = e.call(f"llvm.vector.reduce.add.{suffix}i32", I32, total)
            if form.zero == "centre":
                whole = build.mul(whole, I32(-form.centre))
            elif form.zero == "mins":
                whole = build.fmul(build.sitofp(whole, F32), step)
            e.store(whole, sums, e.scaled(number, 4))
    build.ret_void()


def _multiply(module: ir.Module, form: Form) -> None:
    """Multiply tiles with all rows: out ``[rows, tiles, lanes]``.

    The range counts the tiles of every strip of `STRIP` rows, so that threads share both; rows of a strip pass a
    tile in groups of `Form.rows`.
    """
    e = Emitter(module, "multiply", form.blocks.lanes)
    build = e.build
    weights = IntegerWeights(e, form)
    out, rows, width, strip = e.address(OUT), e.word(ROWS), e.word(TILES), e.word(STRIP)
    x = (e.address(X_CODES), e.address(X_SCALES), e.address(X_SUMS))
    with e.loop(e.first, e.last) as (place, _):
        tile = build.urem(place, width)
        start = build.mul(build.udiv(place, width), strip)
        stop = build.add(start, strip)
        stop = build.select(build.icmp_unsigned("<", stop, rows), stop, rows)
        groups = [build.udiv(row, I64(form.rows)) for row in (start, stop)]
        with e.loop(*groups) as (group, _):
            totals = totals_of(e, form, weights, (tile, group), x)
            for r in range(form.rows):
                line = build.add(build.mul(e.scaled(group, form.rows, r), width), tile)
                offset = e.scaled(line, form.dtype.itemsize * e.lanes)
                e.store(e.to_type(totals[r], form.dtype), out, offset)
    build.ret_void()


def totals_of(
    e: Emitter,
    form: Form,
    weights: IntegerWeights,
    at: tuple[Value, Value],
    x: tuple[Value, Value, Value],
) -> list[Value]:
    """Return the products of a tile with a group of rows of x: a vector of floats for each.

    Args:
        e: writes them.
        form: of the weights.
        weights: of all tiles.
        at: the tile, and the group of `Form.rows` rows.
        x: addresses of the rounded activations, of their scales and sums, see `quantize`.
    """
    build, (tile, group), (codes, scales, sums) = e.build, at, x
    floats, rows, blocks = e.vector(F32), form.rows, form.blocks
    before = build.mul(group, weights.units)
    with e.loop(I64(0), weights.units, [e.splat(F32, 0.0)] * rows) as (unit, totals):
        place = build.add(before, unit)
        base = build.gep(codes, [e.scaled(place, form.input_bits // 8 * blocks.unit * rows)])
        count = blocks.unit // blocks.block
        lines = [
            [e.scaled(place, 4 * count * rows, 4 * (i * rows + r)) for r in range(rows)]
            for i in range(count)
        ]
        starts = None
        if form.zero == "centre":
            starts = [[e.spread(e.load(sums, line, I32)) for line in row] for row in lines]
        dots = _dots(e, form, weights, (tile, unit), base, starts)
        for i in range(count):
            scale = weights.parameter("scales", tile, unit, i)
            low = None if form.zero == "centre" else weights.parameter(form.zero, tile, unit, i)
            whole = None if form.zero != "zeros" else build.fptosi(low, e.vector(I32))
            for r, dot in enumerate(dots[i]):
                step = e.spread(e.load(scales, lines[i][r], F32))
                value = dot
                if form.zero == "zeros":
                    total = e.spread(e.load(sums, lines[i][r], I32))
                    value = build.sub(value, build.mul(whole, total))
                value = build.sitofp(value, floats)
                totals[r] = e.fma(value, build.fmul(scale, step), totals[r])
                if form.zero == "mins":
                    shift = e.spread(e.load(sums, lines[i][r], F32))
                    totals[r] = e.fma(build.fneg(low), shift, totals[r])
    return totals


def _dots(
    e: Emitter,
    form: Form,
    weights: IntegerWeights,
    at: tuple[Value, Value],
    base: Value,
    starts: list[list[Value]] | None,
) -> list[list[Value]]:
    """Return the sums of code times activation: for each block of a unit and each row, a vector of 32-bit integers.

    Args:
        e: writes them.
        form: of the weights.
        weights: of all tiles.
        at: the tile and the unit.
        base: address of the rounded activations of that unit.
        starts: for each block and row, what the sum begins with, or None.
    """
    build, blocks, rows, octets = e.build, form.blocks, form.rows, form.input_bits // 8
    chains = max(1, 4 // rows)  # independent sums hide the latency of an addition
    made = blocks.unit // blocks.block
    parts = [
        [[SUMS[form.input_bits](e, form) for _ in range(chains)] for _ in range(rows)]
        for _ in range(made)
    ]
    for given, start in zip(parts, starts or [], strict=False):
        for chain, value in zip(given, start, strict=True):
            chain[0].total = value
    for before, codes in weights.codes(*at, form.input_bits, ahead=rows <= FEW):
        place, part = before * octets // 4 % chains, parts[before // blocks.block]
        sums = [chain[place] for chain in part]
        for r, one in enumerate(sums):
            word = e.load(base, I64(octets * (r * blocks.unit + before)), I32)
            one.add(codes, e.spread(word))
        if rows >= FEW:
            for one, total in zip(sums, e.pinned([one.latest for one in sums]), strict=True):
                one.latest = total
    ended = [[[one.ended() for one in chain] for chain in part] for part in parts]
    return [[reduce(build.add, filter(None, chain)) for chain in part] for part in ended]
