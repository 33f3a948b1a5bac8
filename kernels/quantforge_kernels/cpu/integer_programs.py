"""Programs for packed integers: multiply by them, multiply rows by the matrices of their owners, and decode them.

`multiply` multiplies packed integers by rounded activations, one output row per lane of a vector.
A row of activations is cut into blocks, and each block rounded to 16-bit integers under a scale of its own: an error of
at most ``max|x| / 65534`` of its block, a hundredth of what bfloat16 has lost before; where 8 bits are allowed,
``max|x| / 254``. Codes are integers too, so that the sum over a block is exact in 32 bits:

    y_n = sum over blocks of  s_n (sum code x - zero_n sum x) x_scale - low_n sum x

One instruction multiplies two or four columns of every row by the same activations (`PairSum`, `OctetSum`). The layout
(`lane_layout`) puts the fields of a word so that a mask, or a shift and a mask, makes such codes of it in their places
(`IntegerWeights`). Nothing is summed across lanes, and the order of all sums is fixed. docs/cpu-programs.md explains it
step by step. `grouped` multiplies in the same way pairs of a row and one of several matrices; `decode` writes weights
in the type of activations, for products of many rows by torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce

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
    add_taking_entry,
)
from quantforge_kernels.cpu.lane_layout import (
    CODES,
    COLUMNS,
    EACH,
    FEW,
    GROUPS,
    OUT,
    OWNERS,
    PARAMETERS,
    SCALES,
    STRIP,
    TILES,
    UNITS,
    X_CODES,
    X_SCALES,
    X_SUMS,
    Form,
    X,
    in_pairs,
    pair_of,
    words_of,
)
from quantforge_kernels.problem import LOWER_LEVEL

TINY = 1e-30  # activations of a block without a larger one are 0
MOST = {16: 32767.0, 8: 127.0}  # of a rounded activation, by its bits
AHEAD = 4096  # bytes that are fetched before they are needed
_PAIR = {
    "avx512vnni": "llvm.x86.avx512.vpdpwssd.512",
    "avx512bw": "llvm.x86.avx512.pmaddw.d.512",
    "avx2": "llvm.x86.avx2.pmadd.wd",
}
_ABOVE = {"scales": "d", "mins": "dmin"}  # the upper level


def multiply(form: Form, parallel: bool) -> ir.Module:
    """Build ``multiply_run``: round all rows of x, and multiply tiles with them: out ``[rows, tiles, lanes]``.

    The range counts the tiles of every strip of `STRIP` rows, so that threads share both; rows of a strip pass a
    tile in groups of `Form.rows`.
    """
    module = ir.Module()
    quantize(module, form)
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
    if form.rows > FEW:
        add_taking_entry(module, "multiply", before="quantize", parallel=parallel)
    else:
        add_entry(module, "multiply", before="quantize", parallel=parallel)
    return module


def grouped(form: Form, parallel: bool) -> ir.Module:
    """Build ``grouped_run``: round all rows of x, and multiply pairs of a row and the tiles of its owner's matrix.

    Out is ``[pairs, tiles, lanes]``. The range counts tiles of all pairs: tile ``i`` of it is of pair ``i / tiles``. A
    pair is multiplied as a row is by a single matrix; matrices lie one after the other, each in as many tiles
    (`quantforge_kernels.grouped`).
    """
    module = ir.Module()
    quantize(module, form)
    e = Emitter(module, "grouped", form.blocks.lanes)
    build = e.build
    weights = IntegerWeights(e, form)
    out, tiles, each, owners = e.address(OUT), e.word(TILES), e.word(EACH), e.address(OWNERS)
    x = (e.address(X_CODES), e.address(X_SCALES), e.address(X_SUMS))
    with e.loop(e.first, e.last) as (place, _):
        pair = build.udiv(place, tiles)
        owner = build.sext(e.load(owners, e.scaled(pair, 4), I32), I64)
        tile = build.add(build.mul(owner, tiles), build.urem(place, tiles))
        totals = totals_of(e, form, weights, (tile, build.udiv(pair, each)), x)
        e.store(
            e.to_type(totals[0], form.dtype), out, e.scaled(place, form.dtype.itemsize * e.lanes)
        )
    build.ret_void()
    add_entry(module, "grouped", before="quantize", parallel=parallel)
    return module


def decode(form: Form, parallel: bool) -> ir.Module:
    """Build ``decode_run``: decode a range of tiles to ``[columns, tiles, lanes]``: the weight, transposed."""
    module = ir.Module()
    e = Emitter(module, "decode", form.blocks.lanes)
    build, blocks = e.build, form.blocks
    weights = IntegerWeights(e, form)
    out, tiles = e.address(OUT), e.word(TILES)
    with e.loop(e.first, e.last) as (tile, _), e.loop(I64(0), weights.units) as (unit, _):
        codes = [both for _, both in weights.codes(tile, unit, ahead=False)]
        above, below = e.splat(I32, 16), e.splat(I32, 0xFFFF)
        for i in range(blocks.unit // blocks.block):
            scale = weights.parameter("scales", tile, unit, i)
            lows = None if form.zero == "centre" else weights.parameter(form.zero, tile, unit, i)
            for column in range(i * blocks.block, (i + 1) * blocks.block):
                pair, upper = pair_of(column)
                both = build.bitcast(codes[pair], e.vector(I32))
                code = build.lshr(both, above) if upper else build.and_(both, below)
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
    add_entry(module, "decode", parallel=parallel)
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
    order = in_pairs(e.lanes) if octets == 2 else range(e.lanes)
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


class PairSum:
    """A sum of products of two columns, 16 bits each, in every lane; None is no sum yet."""

    def __init__(self, e: Emitter, form: Form) -> None:
        self.e, self.form = e, form
        self.total: Value = None

    @property
    def latest(self) -> Value:
        """Return what the next products are added to."""
        return self.total

    @latest.setter
    def latest(self, value: Value) -> None:
        self.total = value

    def add(self, codes: Value, x: Value) -> None:
        """Add the products of the codes of two columns with the same activations."""
        e, kind = self.e, self.e.vector(I32)
        name = _PAIR[self.form.feature]
        if self.form.feature == "avx512vnni":
            total = e.splat(I32, 0) if self.total is None else self.total
            self.total = e.call(name, kind, total, e.build.bitcast(codes, kind), x)
            return
        wide = e.build.bitcast(x, e.vector(I16, 2 * e.lanes))
        products = e.call(name, kind, codes, wide)
        self.total = products if self.total is None else e.build.add(self.total, products)

    def ended(self) -> Value:
        """Return the sum, 32 bits in every lane."""
        return self.total


class OctetSum(PairSum):
    """A sum of products of four columns, 8 bits each, in every lane.

    Without ``vpdpbusd``, ``vpmaddubsw`` adds two products in 16 bits. As many are added there as cannot overflow.
    """

    def __init__(self, e: Emitter, form: Form) -> None:
        super().__init__(e, form)
        self._halves: Value = None
        self._count = 0
        self._most = int(2**15 // (2 * MOST[8] * (2 ** sum(form.widths) - 1)))

    @property
    def latest(self) -> Value:
        """Return what the next products are added to."""
        return self.total if self._halves is None else self._halves

    @latest.setter
    def latest(self, value: Value) -> None:
        if self._halves is None:
            self.total = value
        else:
            self._halves = value

    def add(self, codes: Value, x: Value) -> None:
        """Add the products of the codes of four columns with the same activations."""
        e, kind = self.e, self.e.vector(I32)
        if self.form.feature == "avx512vnni":
            total = e.splat(I32, 0) if self.total is None else self.total
            name = "llvm.x86.avx512.vpdpbusd.512"
            self.total = e.call(name, kind, total, e.build.bitcast(codes, kind), x)
            return
        octets = e.build.bitcast(x, e.vector(I8, 4 * e.lanes))
        name = {16: "llvm.x86.avx512.pmaddubs.w.512", 8: "llvm.x86.avx2.pmadd.ub.sw"}[e.lanes]
        products = e.call(name, e.vector(I16, 2 * e.lanes), codes, octets)
        self._halves = products if self._halves is None else e.build.add(self._halves, products)
        self._count += 1
        if self._count == self._most:
            self._widen()

    def _widen(self) -> None:
        e = self.e
        ones = e.splat(I16, 1, 2 * e.lanes)
        wide = e.call(
            _PAIR["avx512bw" if e.lanes == 16 else "avx2"], e.vector(I32), self._halves, ones
        )
        self.total = wide if self.total is None else e.build.add(self.total, wide)
        self._halves, self._count = None, 0

    def ended(self) -> Value:
        """Return the sum, 32 bits in every lane."""
        if self._halves is not None:
            self._widen()
        return self.total


SUMS = {16: PairSum, 8: OctetSum}  # by the bits of a rounded activation


class IntegerWeights:
    """Reader of codes and parameters: it writes the code that loads them, for any tile and unit of columns.

    Args:
        e: writes the code.
        form: of the weights.
    """

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
        """Yield the words of a unit of columns in one plane; what loads a word is written when it is asked for.

        So loads stand between the products, instead of all before them, where they would wait for each other.
        """
        e, count = self.e, words_of(self.form.widths[plane], self.form.blocks.unit)
        start = e.scaled(e.build.add(e.build.mul(tile, self.units), unit), 4 * count * e.lanes)
        for j in range(count):
            offset = e.build.add(start, I64(4 * j * e.lanes))
            word = e.load(self.planes[plane], offset, e.vector(I32))
            if ahead:
                e.fetch(e.build.gep(self.planes[plane], [e.build.add(offset, I64(AHEAD))]))
            yield word

    def codes(
        self, tile: Value, unit: Value, bits: int = 16, ahead: bool = True
    ) -> Iterator[tuple[int, Value]]:
        """Yield the codes of a unit in numbers of so many bits, as many as a word has; and how many came before them.

        The order of columns is that of `lane_layout`. Planes are put together here, in one instruction for all rows
        of activations.
        """
        planes, low, each = [], 0, 32 // bits
        for plane, width in enumerate(self.form.widths):
            planes.append(self._plane(low, width, bits, self.words(plane, tile, unit, ahead)))
            low += width
        for before in range(0, self.form.blocks.unit, each):
            yield before, reduce(self.e.build.or_, [next(fields) for fields in planes])

    def _plane(self, low: int, width: int, bits: int, words: Iterator[Value]) -> Iterator[Value]:
        for word in words:
            yield from _fields(self.e, word, width, low, bits)

    def parameter(self, name: str, tile: Value, unit: Value, i: int) -> Value:
        """Return a parameter of block ``i`` of a unit, times that of the level above if there is one."""
        value = self._one(name, tile, unit, i, self.form.blocks.in_group)
        above = _ABOVE.get(name)
        if above in self.parameters:
            upper = self._one(above, tile, unit, i, self.form.blocks.in_super)
            value = self.e.build.fmul(value, upper)
        return value

    def _one(self, name: str, tile: Value, unit: Value, i: int, shared: int) -> Value:
        """Load a parameter of one level; ``shared`` blocks have the same one (0: all blocks of a row)."""
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


def _fields(e: Emitter, word: Value, width: int, low: int, bits: int) -> Iterator[Value]:
    """Yield one field after the other, of all bytes of every word, as vectors of numbers of so many bits.

    A field is moved to the bits from ``low`` on. Numbers of 16 bits have the fields of two bytes, one after the other.
    """
    build, count = e.build, 32 // bits * e.lanes
    # Shifts are of 16 bits at the least: processors have none of bytes.
    wide, again = (I16, 2 * e.lanes), 1 if bits == 16 else 0x101
    halves = build.bitcast(word, e.vector(*wide))
    for field in range(8 // width):
        for octet in range(bits // 8):
            value, down = halves, field * width + 8 * octet - low
            if down:
                shift = build.lshr if down > 0 else build.shl
                value = shift(value, e.splat(I16, abs(down), wide[1]))
            top = width == bits or (bits == 16 and field * width + 8 * octet + width == 16)
            if low or not top:  # bits above it are there to be removed
                value = build.and_(
                    value, e.splat(I16, (((1 << width) - 1) << low) * again, wide[1])
                )
            yield value if bits == 16 else build.bitcast(value, e.vector(I8, count))
