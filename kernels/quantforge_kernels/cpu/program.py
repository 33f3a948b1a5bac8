"""Programs of a processor: integers of a few bits times activations of 16 bits, one output row per lane.

A row of activations is cut into blocks, and each block rounded to 16-bit integers under a scale of
its own: an error of at most ``max|x| / 65534`` of its block, a hundredth of what bfloat16 has lost
before. Codes are unsigned integers as well, so that a block's sum is exact in 32 bits:

    y_n = sum over blocks of  s_n (sum code x - zero_n sum x) x_scale - low_n sum x

One instruction (``vpdpwssd``, or ``vpmaddwd`` and an addition) multiplies two neighbouring columns
of every row by the same pair of activations. It wants 16-bit codes, which a mask, or a shift and a
mask, makes of a word of several fields; the layout (`quantforge_kernels.cpu.lane_layout`) puts them where
nothing else has to be moved. Nothing is summed across lanes, and the order of all sums is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from llvmlite import ir

from quantforge_kernels.cpu.emit import (
    F32,
    I8,
    I16,
    I32,
    I64,
    ROWS,
    Emitter,
    Value,
    add_entry,
)
from quantforge_kernels.cpu.lane_layout import TERNARY, Blocks, fields_of, words_of
from quantforge_kernels.lower import LOWER_LEVEL

# Words of the argument, by place, after FIRST, LAST, THREADS and ROWS.
X, X_CODES, X_SCALES, X_SUMS, OUT = range(4, 9)  # addresses
COLUMNS, UNITS, GROUPS, TILES = range(9, 13)  # counts; tiles of a row of OUT
CODES = 13  # addresses of up to three planes
SCALES = 16  # addresses of the parameters, in the order of PARAMETERS
PARAMETERS = ("scales", "zeros", "mins", "d", "dmin")

_ABOVE = {"scales": "d", "mins": "dmin"}  # the upper level

MOST = 32767.0  # of a 16-bit activation
TINY = 1e-30  # activations of a block without a larger one are 0
AHEAD = 4096  # bytes that are fetched before they are needed
_PAIR = {"avx512vnni": "llvm.x86.avx512.vpdpwssd.512", "avx512bw": "llvm.x86.avx512.pmaddw.d.512",
         "avx2": "llvm.x86.avx2.pmadd.wd"}  # fmt: skip
_SHUFFLE = {16: "llvm.x86.avx512.pshuf.b.512", 8: "llvm.x86.avx2.pshuf.b"}  # by lanes


@dataclass(frozen=True, slots=True)
class Form:
    """Form for which a program is made.

    Attributes:
        blocks: how columns are cut.
        widths: of the planes of a code, see `lane_layout`.
        zero: ``centre``, ``zeros`` or ``mins``.
        centre: the code that stands for 0 where ``zero`` says so.
        stored: types of `PARAMETERS`, as far as they are there.
        dtype: of activations and results.
        rows: of activations that are multiplied at a time.
        feature: a key of `_PAIR`.
        pairs: the lower level is two integers of 4 bits to a byte.
    """

    blocks: Blocks
    widths: tuple[int, ...]
    zero: str
    centre: int
    stored: tuple[tuple[str, torch.dtype], ...]
    dtype: torch.dtype
    rows: int
    feature: str
    pairs: bool = False


def multiply(form: Form, parallel: bool) -> ir.Module:
    """Build ``multiply_run``: round all rows of x, and multiply a range of tiles."""
    module = ir.Module()
    _quantize(module, form)
    _multiply(module, form)
    add_entry(module, "multiply", before="quantize", parallel=parallel)
    return module


def decode(form: Form, parallel: bool) -> ir.Module:
    """Build ``decode_run``: decode a range of tiles."""
    module = ir.Module()
    _decode(module, form)
    add_entry(module, "decode", parallel=parallel)
    return module


def _quantize(module: ir.Module, form: Form) -> None:
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


class _Weights:
    """Codes and parameters of a tile, block by block."""

    def __init__(self, e: Emitter, form: Form) -> None:
        self.e = e
        self.form = form
        self.planes = [e.address(CODES + i) for i in range(len(form.widths))]
        self.stored = dict(form.stored)
        self.parameters = {
            name: e.address(SCALES + i) for i, name in enumerate(PARAMETERS) if name in self.stored
        }
        self.units, self.groups = e.word(UNITS), e.word(GROUPS)

    def words(self, plane: int, tile: Value, unit: Value, ahead: bool = True) -> Iterator[Value]:
        """Yield the words of a unit of columns in one plane, each read where it is asked for.

        Reads and prefetches in a bunch would wait for each other.
        """
        e, count = self.e, words_of(self.form.widths[plane], self.form.blocks.unit)
        start = e.scaled(e.build.add(e.build.mul(tile, self.units), unit), 4 * count * e.lanes)
        for j in range(count):
            offset = e.build.add(start, I64(4 * j * e.lanes))
            word = e.load(self.planes[plane], offset, e.vector(I32))
            if ahead:
                e.fetch(e.build.gep(self.planes[plane], [e.build.add(offset, I64(AHEAD))]))
            yield word

    def pairs(
        self, plane: int, tile: Value, unit: Value, ahead: bool = True
    ) -> Iterator[tuple[int, Value]]:
        """Yield every second column of a unit, with its field and the next one in one plane, in 16 bits each."""
        column = 0
        for word in self.words(plane, tile, unit, ahead):
            for both in _fields(self.e, word, self.form.widths[plane]):
                if column < self.form.blocks.unit:
                    yield column, both
                column += 2

    def parameter(self, name: str, tile: Value, unit: Value, i: int) -> Value:
        """Return a parameter of block ``i`` of a unit, times that of the level above if there is one."""
        value = self._one(name, tile, unit, i, self.form.blocks.in_group)
        above = _ABOVE.get(name)
        if above in self.parameters:
            upper = self._one(above, tile, unit, i, self.form.blocks.in_super)
            value = self.e.build.fmul(value, upper)
        return value

    def _one(self, name: str, tile: Value, unit: Value, i: int, shared: int) -> Value:
        if self.form.pairs and name in LOWER_LEVEL:
            return self._half(name, tile, unit, i)
        e, blocks = self.e, self.form.blocks
        number = e.scaled(unit, blocks.unit // blocks.block, i)
        count = self.groups
        if name in {"d", "dmin"}:
            count = e.build.udiv(count, I64(blocks.in_super // blocks.in_group))
        index = e.build.udiv(number, I64(shared)) if shared else I64(0)
        place = e.build.add(e.build.mul(tile, count), index)
        return e.load_floats(self.parameters[name], place, self.stored[name])

    def _half(self, name: str, tile: Value, unit: Value, i: int) -> Value:
        """Load an integer of 4 bits; a block is a group, and a unit holds whole pairs of them."""
        e, blocks = self.e, self.form.blocks
        first = e.build.mul(tile, e.build.udiv(self.groups, I64(2)))
        place = e.build.add(first, e.scaled(unit, blocks.unit // blocks.block // 2, i // 2))
        both = e.load(self.parameters[name], e.scaled(place, e.lanes), e.vector(I8))
        wide = e.build.zext(both, e.vector(I32))
        half = (
            e.build.lshr(wide, e.splat(I32, 4)) if i % 2 else e.build.and_(wide, e.splat(I32, 15))
        )
        return e.build.sitofp(half, e.vector(F32))


def _multiply(module: ir.Module, form: Form) -> None:
    """Multiply the tiles ``[first, last)`` with all rows: out ``[rows, tiles, lanes]``."""
    e = Emitter(module, "multiply", form.blocks.lanes)
    build = e.build
    weights = _Weights(e, form)
    codes, scales, sums = (e.address(place) for place in (X_CODES, X_SCALES, X_SUMS))
    out, rows, width = e.address(OUT), e.word(ROWS), e.word(TILES)
    floats = e.vector(F32)
    with (
        e.loop(e.first, e.last) as (tile, _),
        e.loop(I64(0), build.udiv(rows, I64(form.rows))) as (part, _),
    ):
        top = e.scaled(part, form.rows)
        with e.loop(I64(0), weights.units, [e.splat(F32, 0.0)] * form.rows) as (unit, totals):
            dots = _dots(e, form, weights, (tile, unit, top), (codes, sums, rows))
            for i in range(len(dots)):
                scale = weights.parameter("scales", tile, unit, i)
                low = None if form.zero == "centre" else weights.parameter(form.zero, tile, unit, i)
                whole = None if form.zero != "zeros" else build.fptosi(low, e.vector(I32))
                number = e.scaled(unit, len(dots), i)
                for r, dot in enumerate(dots[i]):
                    at = e.scaled(build.add(build.mul(number, rows), build.add(top, I64(r))), 4)
                    step = e.spread(e.load(scales, at, F32))
                    value = dot
                    if form.zero == "zeros":
                        total = e.spread(e.load(sums, at, I32))
                        value = build.sub(value, build.mul(whole, total))
                    value = build.sitofp(value, floats)
                    totals[r] = e.fma(value, build.fmul(scale, step), totals[r])
                    if form.zero == "mins":
                        total = build.sitofp(e.load(sums, at, I32), F32)
                        shift = build.fmul(e.spread(total), step)
                        totals[r] = e.fma(build.fneg(low), shift, totals[r])
        for r in range(form.rows):
            line = build.add(build.mul(build.add(top, I64(r)), width), tile)
            offset = e.scaled(line, form.dtype.itemsize * e.lanes)
            e.store(e.to_type(totals[r], form.dtype), out, offset)
    build.ret_void()


def _dots(
    e: Emitter, form: Form, weights: _Weights, at: tuple[Any, Any, Any], x: tuple[Any, Any, Any]
) -> list[list[Value]]:
    """Sum code times activation in 32 bits, by block of the unit and row."""
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


def _fields(e: Emitter, word: Value, width: int) -> Iterator[Value]:
    """Yield the fields of every half of a word, one after the other, as numbers of 16 bits."""
    build, kind, count = e.build, I16, 2 * e.lanes
    halves = build.bitcast(word, e.vector(kind, count))
    if width == TERNARY:
        yield from _digits(e, halves)
        return
    for field in range(fields_of(width)):
        value = halves
        if field:
            value = build.lshr(value, e.splat(kind, field * width, count))
        if field < 16 // width - 1:
            value = build.and_(value, e.splat(kind, (1 << width) - 1, count))
        yield value


def _digits(e: Emitter, halves: Value) -> Iterator[Value]:
    """Yield the digits of `base3`. Two come out at a time, below 9, and a table parts them: products are scarcer."""
    build, count = e.build, 2 * e.lanes
    narrow, wide, octets = e.vector(I16, count), e.vector(I32, count), e.vector(I8, 2 * count)
    tables = [
        ir.Constant(octets, (digits + [0] * 7) * (2 * count // 16))
        for digits in ([two // 3 for two in range(9)], [two % 3 for two in range(9)])
    ]
    for place in range(0, fields_of(TERNARY), 2):
        rest = build.mul(halves, e.splat(I16, 3**place, count))
        product = build.mul(build.zext(rest, wide), e.splat(I32, 9, count))
        two = build.trunc(build.lshr(product, e.splat(I32, 16, count)), narrow)
        index = build.bitcast(two, octets)  # its upper bytes are 0, and stay 0
        for table in tables:
            yield build.bitcast(e.call(_SHUFFLE[e.lanes], octets, table, index), narrow)


def _add_products(e: Emitter, form: Form, total: Value, codes: Value, pair: Value) -> Value:
    """Add the products of two columns, per lane."""
    name, kind = _PAIR[form.feature], e.vector(I32)
    if form.feature == "avx512vnni":
        total = e.splat(I32, 0) if total is None else total
        return e.call(name, kind, total, e.build.bitcast(codes, kind), pair)
    wide = e.build.bitcast(pair, e.vector(I16, 2 * e.lanes))
    products = e.call(name, kind, codes, wide)
    return products if total is None else e.build.add(total, products)


def _decode(module: ir.Module, form: Form) -> None:
    """Decode the tiles ``[first, last)`` to ``[columns, tiles, lanes]``: the weight, transposed."""
    e = Emitter(module, "decode", form.blocks.lanes)
    build, blocks = e.build, form.blocks
    weights = _Weights(e, form)
    out, tiles = e.address(OUT), e.word(TILES)
    with e.loop(e.first, e.last) as (tile, _), e.loop(I64(0), weights.units) as (unit, _):
        codes: dict[int, Value] = {}
        low = 0
        for plane, width in enumerate(form.widths):
            for column, both in weights.pairs(plane, tile, unit, ahead=False):
                moved = build.shl(both, e.splat(I16, low, 2 * e.lanes))
                codes[column] = build.or_(codes[column], moved) if low else both
            low += width
        above, below = e.splat(I32, 16), e.splat(I32, 0xFFFF)
        for i in range(blocks.unit // blocks.block):
            scale = weights.parameter("scales", tile, unit, i)
            lows = None if form.zero == "centre" else weights.parameter(form.zero, tile, unit, i)
            for column in range(i * blocks.block, (i + 1) * blocks.block):
                both = build.bitcast(codes[column & -2], e.vector(I32))
                code = build.lshr(both, above) if column % 2 else build.and_(both, below)
                value = build.sitofp(code, e.vector(F32))
                if form.zero == "centre":
                    value = build.fsub(value, e.splat(F32, form.centre))
                elif form.zero == "zeros":
                    value = build.fsub(value, lows)
                value = build.fmul(value, scale)
                if form.zero == "mins":
                    value = build.fsub(value, lows)
                line = build.mul(e.scaled(unit, blocks.unit, column), tiles)
                offset = e.scaled(build.add(line, tile), form.dtype.itemsize * e.lanes)
                e.store(e.to_type(value, form.dtype), out, offset)
    build.ret_void()
