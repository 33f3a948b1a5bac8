"""Packed integers as a program reads them: words taken apart into codes of 16 or 8 bits, and the parameters of a group.

A vector of words is one word of every row of a tile; as numbers of 16 (8) bits it is two (four) columns of all these
rows. A field of all is had by a mask, or a shift and a mask, of the whole vector: nothing moves from lane to lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

from llvmlite import ir

from quantforge_kernels import base3
from quantforge_kernels.cpu.emit import F32, I8, I16, I32, I64, Emitter, Value
from quantforge_kernels.cpu.integer_form import CODES, GROUPS, PARAMETERS, SCALES, UNITS, Form
from quantforge_kernels.cpu.lane_layout import TERNARY, words_of
from quantforge_kernels.lower import LOWER_LEVEL

AHEAD = 4096  # bytes that are fetched before they are needed
_ABOVE = {"scales": "d", "mins": "dmin"}  # the upper level
_SHUFFLE = {16: "llvm.x86.avx512.pshuf.b.512", 8: "llvm.x86.avx2.pshuf.b"}  # by lanes


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
    if width == TERNARY:
        yield from _digits(e, build.bitcast(word, e.vector(I16, count)))
        return
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


def _digits(e: Emitter, halves: Value) -> Iterator[Value]:
    """Yield the digits of `base3` likewise.

    A product brings out two digits as one number below 9, and two tables part them: look-ups are cheaper than products.
    """
    build, count = e.build, 2 * e.lanes
    narrow, wide, octets = e.vector(I16, count), e.vector(I32, count), e.vector(I8, 2 * count)
    tables = [
        ir.Constant(octets, (digits + [0] * 7) * (2 * count // 16))
        for digits in ([two // 3 for two in range(9)], [two % 3 for two in range(9)])
    ]
    for place in range(0, base3.PER_HALF, 2):
        rest = build.mul(halves, e.splat(I16, 3**place, count))
        product = build.mul(build.zext(rest, wide), e.splat(I32, 9, count))
        two = build.trunc(build.lshr(product, e.splat(I32, 16, count)), narrow)
        index = build.bitcast(two, octets)  # its upper bytes are 0, and stay 0
        for table in tables:
            yield build.bitcast(e.call(_SHUFFLE[e.lanes], octets, table, index), narrow)
