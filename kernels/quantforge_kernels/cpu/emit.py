"""How a program is written: `Emitter` makes LLVM's intermediate code, and `add_entry` the function that is called.

Python runs once and leaves straight code behind: a Python loop is an unrolled one, `Emitter.loop` is
a loop of the machine. Every program is a function ``void name(i64* words, i64 first, i64 last)``, which takes an array
of 64-bit words (addresses and counts, `Emitter.word`) and does the part ``[first, last)`` of the work (tiles, rows,
tokens). The first words are the same everywhere: the whole range, the number of threads, the number of rows.

`add_entry` adds ``void name_run(i64* words)``, which takes the range from the first two words and does it in one thread
or shares it out among several. `add_taking_entry` does so for much work: threads take pieces of it as they get done, so
that none waits for one that something else holds up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
_STORED = {
    torch.bfloat16: I16,
    torch.float16: F16,
    torch.float32: F32,
    torch.uint8: I8,
    torch.int8: I8,
    torch.float8_e4m3fn: I8,
}
Value = Any  # the result of an instruction, or a type: llvmlite has no types in Python
FIRST, LAST, THREADS, ROWS = range(4)  # words
PIECES = 8  # that each thread takes, if all are equally fast
_SHARED = ("words", "next", "last", "piece")  # among threads that take pieces: places of 64 bits


class Emitter:
    """A function under construction: ``void name(i64* words, i64 first, i64 last)``.

    A method writes instructions and returns a `Value`: the name of their result, which other methods take. Numbers are
    known only when the function runs. What has no method here is written by ``build``, llvmlite's own builder.

    Args:
        module: to which it is added.
        name: of the function.
        lanes: elements of a vector of 32 bits.
    """

    def __init__(self, module: ir.Module, name: str, lanes: int) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer(), I64, I64])
        self.function = ir.Function(module, kind, name)
        self.words, self.first, self.last = self.function.args
        self.lanes = lanes
        self.build = ir.IRBuilder(self.function.append_basic_block())
        self._module = module

    def vector(self, kind: Value, count: int = 0) -> Value:
        """Return the type of a vector, as many elements as there are lanes when left out."""
        return ir.VectorType(kind, count or self.lanes)

    def splat(self, kind: Value, value: float, count: int = 0) -> Value:
        """Return a constant in every element."""
        return ir.Constant(self.vector(kind, count), [value] * (count or self.lanes))

    def spread(self, value: Value) -> Value:
        """Copy a scalar to every lane."""
        empty = ir.Constant(self.vector(value.type), ir.Undefined)
        one = self.build.insert_element(empty, value, I32(0))
        return self.build.shuffle_vector(one, empty, self.splat(I32, 0))

    def reordered(self, value: Value, order: Sequence[int]) -> Value:
        """Return the elements of a vector in another order."""
        if list(order) == sorted(order):
            return value
        return self.build.shuffle_vector(value, value, ir.Constant(self.vector(I32), list(order)))

    def call(self, name: str, result: Value, *arguments: Value) -> Value:
        """Call a function of LLVM (an intrinsic) by its name."""
        function = declared(self._module, name, result, [value.type for value in arguments])
        return self.build.call(function, arguments)

    def pinned(self, values: list[Value]) -> list[Value]:
        """Return vectors as they are, in a way that LLVM does not see through: what comes after waits for all of them.

        Else it finishes one sum after the other, and keeps what they share in memory for want of registers.
        """
        count, kinds = len(values), [value.type for value in values]
        kind = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
        places = [*(["=v"] * count), *map(str, range(count))]
        both = self.build.call(ir.InlineAsm(kind, "", ",".join(places)), values)
        return [self.build.extract_value(both, i) for i in range(count)]

    def word(self, place: int) -> Value:
        """Read the word at a place of the argument."""
        return self.build.load(self.build.gep(self.words, [I64(place)]))

    def address(self, place: int) -> Value:
        """Read the word at a place of the argument, as an address."""
        return self.build.inttoptr(self.word(place), I8.as_pointer())

    def at(self, base: Value, offset: Value, kind: Value) -> Value:
        """Return the address ``offset`` bytes after ``base``, of a value of some type."""
        return self.build.bitcast(self.build.gep(base, [offset]), kind.as_pointer())

    def load(self, base: Value, offset: Value, kind: Value) -> Value:
        """Load a value ``offset`` bytes after ``base``; the address needs no alignment beyond that of an element."""
        scalar = getattr(kind, "element", kind)
        return self.build.load(self.at(base, offset, kind), align=_bytes(scalar))

    def store(self, value: Value, base: Value, offset: Value) -> None:
        """Store a value ``offset`` bytes after ``base``, with as little alignment."""
        scalar = getattr(value.type, "element", value.type)
        self.build.store(value, self.at(base, offset, value.type), align=_bytes(scalar))

    def scaled(self, index: Value, factor: int, plus: int = 0) -> Value:
        """Return ``index * factor + plus``."""
        product = self.build.mul(index, I64(factor))
        return self.build.add(product, I64(plus)) if plus else product

    @contextmanager
    def loop(
        self, first: Value, last: Value, carried: Sequence[Value] = ()
    ) -> Iterator[tuple[Value, list[Value]]]:
        """Loop over ``[first, last)``, at least once.

        Yields ``(index, values)``: the carried values, which the body replaces in the list, and
        which hold the last ones after the loop.
        """
        build = self.build
        before, body = build.block, self.function.append_basic_block()
        after = self.function.append_basic_block()
        build.branch(body)
        build.position_at_end(body)
        index = build.phi(I64)
        index.add_incoming(first, before)
        kept = [build.phi(value.type) for value in carried]
        for phi, value in zip(kept, carried, strict=True):
            phi.add_incoming(value, before)
        values = list(kept)
        yield index, values
        following = build.add(index, I64(1))
        index.add_incoming(following, build.block)
        for phi, value in zip(kept, values, strict=True):
            phi.add_incoming(value, build.block)
        build.cbranch(build.icmp_signed("<", following, last), body, after)
        build.position_at_end(after)

    def load_floats(self, base: Value, index: Value, dtype: torch.dtype) -> Value:
        """Load vector ``index`` of an array; return it in float32."""
        offset = self.scaled(index, dtype.itemsize * self.lanes)
        return self.to_floats(self.load(base, offset, self.stored(dtype)), dtype)

    def stored(self, dtype: torch.dtype) -> Value:
        """Return the type of a vector as memory holds it."""
        return self.vector(_STORED[dtype])

    def to_floats(self, value: Value, dtype: torch.dtype) -> Value:
        """Return a vector of some type in float32."""
        if dtype == torch.float32:
            return value
        if dtype == torch.float16:
            return self.build.fpext(value, self.vector(F32))
        if dtype == torch.bfloat16:
            wide = self.build.zext(value, self.vector(I32))
            return self.build.bitcast(self.build.shl(wide, self.splat(I32, 16)), self.vector(F32))
        wide = (self.build.zext if dtype == torch.uint8 else self.build.sext)(
            value, self.vector(I32)
        )
        if dtype == torch.float8_e4m3fn:  # as `gpu.fields.float8_value`
            bits = self.build.and_(
                self.build.shl(wide, self.splat(I32, 20)), self.splat(I32, -0x78100000)
            )
            small = self.build.bitcast(bits, self.vector(F32))
            return self.build.fmul(small, self.splat(F32, 2.0**120))
        return self.build.sitofp(wide, self.vector(F32))

    def rounded(self, value: Value, dtype: torch.dtype) -> Value:
        """Return a vector of float32 as its nearest values of some type, in float32."""
        return self.to_floats(self.to_type(value, dtype), dtype)

    def store_floats(self, value: Value, base: Value, index: Value, dtype: torch.dtype) -> None:
        """Store a vector of float32 as vector ``index`` of an array."""
        self.store(
            self.to_type(value, dtype), base, self.scaled(index, dtype.itemsize * self.lanes)
        )

    def fetch(self, address: Value) -> None:
        """Prefetch the line of memory at an address, which will be read soon."""
        self.call("llvm.prefetch.p0", ir.VoidType(), address, I32(0), I32(3), I32(1))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return ``a b + c`` of vectors of float32."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.vector(F32), a, b, c)

    def total(self, value: Value) -> Value:
        """Sum the lanes of float32, in pairs."""
        name = f"llvm.vector.reduce.fadd.v{self.lanes}f32"
        function = declared(self._module, name, F32, [F32, value.type])
        return self.build.call(function, [F32(-0.0), value], fastmath=("reassoc",))

    def to_type(self, value: Value, dtype: torch.dtype) -> Value:
        """Return a vector of float32 in a type as memory holds it, rounded to the nearest, halves to even."""
        if dtype == torch.float32:
            return value
        if dtype == torch.float16:
            return self.build.fptrunc(value, self.vector(F16))
        build, kind = self.build, self.vector(I32)
        bits = build.bitcast(value, kind)
        odd = build.and_(build.lshr(bits, self.splat(I32, 16)), self.splat(I32, 1))
        bits = build.add(bits, build.add(odd, self.splat(I32, 0x7FFF)))
        # An all-ones NaN would overflow into a number.
        quiet = self.splat(I32, 0x7FC00000)
        bits = build.select(build.fcmp_unordered("uno", value, value), quiet, bits)
        return build.trunc(build.lshr(bits, self.splat(I32, 16)), self.vector(I16))


def _bytes(kind: Value) -> int:
    return {I8: 1, I16: 2, F16: 2, I32: 4, F32: 4, I64: 8}[kind]


def declared(
    module: ir.Module, name: str, result: Value, arguments: Sequence[Value] = ()
) -> ir.Function:
    """Declare a function that is elsewhere."""
    found = module.globals.get(name)
    return found or ir.Function(module, ir.FunctionType(result, arguments), name)


def add_entry(module: ir.Module, name: str, before: str = "", parallel: bool = False) -> None:
    """Add ``void name_run(i64* words)``: ``name`` on the whole range.

    Args:
        module: has the function.
        name: its name.
        before: a function that is called first, on all `ROWS`, by one thread.
        parallel: share the range out by ``GOMP_parallel`` where there are `THREADS`.
    """
    build, words = _entry(module, f"{name}_run")
    if before:
        rows = build.load(build.gep(words, [I64(ROWS)]))
        build.call(module.globals[before], [words, I64(0), rows])
    first, last = _range(build, words)
    if not parallel:
        build.call(module.globals[name], [words, first, last])
        build.ret_void()
        return
    part = _part(module, name)
    kinds = [part.type, words.type, I32, I32]
    share = declared(module, "GOMP_parallel", ir.VoidType(), kinds)
    threads = build.load(build.gep(words, [I64(THREADS)]))
    with build.if_else(build.icmp_signed(">", threads, I64(1))) as (several, one):
        with several:
            build.call(share, [part, words, build.trunc(threads, I32), I32(0)])
        with one:
            build.call(module.globals[name], [words, first, last])
    build.ret_void()


def add_taking_entry(module: ir.Module, name: str, before: str, parallel: bool) -> None:
    """Add ``void name_run(i64* words)``: ``before`` on all `ROWS`, then ``name`` on the whole range, in pieces.

    Args:
        module: has both functions; what they write of a piece does not depend on the pieces.
        name: of the second one.
        before: of the first one.
        parallel: threads take pieces, where there are `THREADS`.
    """
    build, words = _entry(module, f"{name}_run")
    rows, threads = (build.load(build.gep(words, [I64(place)])) for place in (ROWS, THREADS))
    ranges = {before: (I64(0), rows), name: _range(build, words)}
    shared = build.alloca(I64, I64(len(_SHARED)))
    for one, (first, last) in ranges.items():
        if not parallel:
            build.call(module.globals[one], [words, first, last])
            continue
        taking = _taking(module, one)
        kinds = [taking.type, words.type, I32, I32]
        piece = build.sdiv(build.sub(last, first), build.mul(threads, I64(PIECES)))
        piece = build.select(build.icmp_signed(">", piece, I64(1)), piece, I64(1))
        for place, value in enumerate((build.ptrtoint(words, I64), first, last, piece)):
            build.store(value, build.gep(shared, [I64(place)]))
        with build.if_else(build.icmp_signed(">", threads, I64(1))) as (several, alone):
            with several:
                share = declared(module, "GOMP_parallel", ir.VoidType(), kinds)
                build.call(share, [taking, shared, build.trunc(threads, I32), I32(0)])
            with alone:
                build.call(module.globals[one], [words, first, last])
    build.ret_void()


def _taking(module: ir.Module, name: str) -> ir.Function:
    """Build ``void name_taking(i64* shared)``: ``name`` on one piece after the other, until all are taken."""
    build, shared = _entry(module, f"{name}_taking")
    address, last, piece = (
        build.load(build.gep(shared, [I64(_SHARED.index(what))]))
        for what in ("words", "last", "piece")
    )
    words, following = (
        build.inttoptr(address, shared.type),
        build.gep(shared, [I64(_SHARED.index("next"))]),
    )
    function = build.function
    take, work, done = (function.append_basic_block() for _ in range(3))
    build.branch(take)
    build.position_at_end(take)
    start = build.atomic_rmw("add", following, piece, "monotonic")
    build.cbranch(build.icmp_signed("<", start, last), work, done)
    build.position_at_end(work)
    end = build.add(start, piece)
    end = build.select(build.icmp_signed("<", end, last), end, last)
    build.call(module.globals[name], [words, start, end])
    build.branch(take)
    build.position_at_end(done)
    build.ret_void()
    return function


def _part(module: ir.Module, name: str) -> ir.Function:
    """Build ``void name_part(i64* words)``: ``name`` on this thread's share of the range."""
    build, words = _entry(module, f"{name}_part")
    number, count = (
        build.sext(build.call(declared(module, f"omp_get_{what}", I32), []), I64)
        for what in ("thread_num", "num_threads")
    )
    first, last = _range(build, words)
    work = build.sub(last, first)
    start, end = (
        build.add(first, build.sdiv(build.mul(work, index), count))
        for index in (number, build.add(number, I64(1)))
    )
    with build.if_then(build.icmp_signed("<", start, end)):
        build.call(module.globals[name], [words, start, end])
    build.ret_void()
    return build.function


def _entry(module: ir.Module, name: str) -> tuple[ir.IRBuilder, Value]:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64.as_pointer()]), name)
    return ir.IRBuilder(function.append_basic_block()), function.args[0]


def _range(build: ir.IRBuilder, words: Value) -> tuple[Value, Value]:
    first, last = (build.load(build.gep(words, [I64(place)])) for place in (FIRST, LAST))
    return first, last
