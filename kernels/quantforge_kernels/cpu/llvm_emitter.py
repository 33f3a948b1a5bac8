"""Writing LLVM code from Python: `Emitter` writes instructions, `add_entry_point` the function that is called.

The Python code runs once and writes straight-line code: a Python loop is an unrolled loop, and `Emitter.loop` is a loop
at run time. Every program is a function ``void name(i64* args, i64 first, i64 last)``, which takes an array of 64-bit
words (addresses and counts, `Emitter.load_word`) and does the part ``[first, last)`` of the work (tiles, rows, tokens).
The first words are the same in all programs: the whole range, the number of threads, the number of rows.

`add_entry_point` adds ``void name_run(i64* args)``, which reads the range from the first two words and does it in one
thread or divides it among several. `add_dynamic_entry_point` is for more work: threads take small pieces when they are
free, so that a thread that is held up does not delay the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
_MEMORY_TYPES = {
    torch.bfloat16: I16,
    torch.float16: F16,
    torch.float32: F32,
    torch.uint8: I8,
    torch.int8: I8,
    torch.float8_e4m3fn: I8,
}
Value = Any  # the result of an instruction, or a type: llvmlite has no types in Python
ARG_FIRST, ARG_LAST, ARG_THREADS, ARG_ROWS = range(4)  # words
PIECES_PER_THREAD = 8  # that each thread takes, if all are equally fast
# Among threads that take pieces: places of 64 bits
_PIECE_STATE = ("words", "next", "last", "piece")


class Emitter:
    """A function under construction: ``void name(i64* args, i64 first, i64 last)``.

    A method writes instructions and returns a `Value`, the name of their result, which other methods accept. Numbers
    are known only when the function runs. For everything without a method here, use ``builder``, llvmlite's
    `IRBuilder`.

    Args:
        module: module to which the function is added.
        name: name of the function.
        lanes: number of 32-bit elements of a vector.
    """

    def __init__(self, module: ir.Module, name: str, lanes: int) -> None:
        element_type = ir.FunctionType(ir.VoidType(), [I64.as_pointer(), I64, I64])
        self.function = ir.Function(module, element_type, name)
        self.words, self.first, self.last = self.function.args
        self.lanes = lanes
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        self._module = module

    def vector_type(self, element_type: Value, count: int = 0) -> Value:
        """Return the type of a vector of ``count`` elements (default: one per lane)."""
        return ir.VectorType(element_type, count or self.lanes)

    def splat(self, element_type: Value, value: float, count: int = 0) -> Value:
        """Return a constant vector with ``value`` in every element."""
        return ir.Constant(self.vector_type(element_type, count), [value] * (count or self.lanes))

    def broadcast(self, value: Value) -> Value:
        """Copy a scalar to every lane."""
        empty = ir.Constant(self.vector_type(value.type), ir.Undefined)
        function_name = self.builder.insert_element(empty, value, I32(0))
        return self.builder.shuffle_vector(function_name, empty, self.splat(I32, 0))

    def shuffle(self, value: Value, order: Sequence[int]) -> Value:
        """Return the elements of a vector in the given order."""
        if list(order) == sorted(order):
            return value
        return self.builder.shuffle_vector(
            value, value, ir.Constant(self.vector_type(I32), list(order))
        )

    def call_intrinsic(self, name: str, result: Value, *arguments: Value) -> Value:
        """Call an LLVM intrinsic by name."""
        function = declare_function(self._module, name, result, [value.type for value in arguments])
        return self.builder.call(function, arguments)

    def pin_in_registers(self, values: list[Value]) -> list[Value]:
        """Return the vectors unchanged, but opaque to LLVM, so that the instructions that follow wait for all of them.

        Otherwise LLVM completes one sum after the other, and spills the shared operands to memory for lack of
        registers.
        """
        count, kinds = len(values), [value.type for value in values]
        element_type = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
        constraints = [*(["=v"] * count), *map(str, range(count))]
        outputs = self.builder.call(ir.InlineAsm(element_type, "", ",".join(constraints)), values)
        return [self.builder.extract_value(outputs, i) for i in range(count)]

    def load_word(self, index: int) -> Value:
        """Load word ``index`` of the argument array."""
        return self.builder.load(self.builder.gep(self.words, [I64(index)]))

    def load_address(self, index: int) -> Value:
        """Load word ``index`` of the argument array as an address."""
        return self.builder.inttoptr(self.load_word(index), I8.as_pointer())

    def pointer_at(self, base: Value, offset: Value, element_type: Value) -> Value:
        """Return a pointer to a value of type ``element_type``, ``offset`` bytes after ``base``."""
        return self.builder.bitcast(self.builder.gep(base, [offset]), element_type.as_pointer())

    def load(self, base: Value, offset: Value, element_type: Value) -> Value:
        """Load a value ``offset`` bytes after ``base``; only the alignment of one element is required."""
        scalar = getattr(element_type, "element", element_type)
        return self.builder.load(
            self.pointer_at(base, offset, element_type), align=_type_bytes(scalar)
        )

    def store(self, value: Value, base: Value, offset: Value) -> None:
        """Store a value ``offset`` bytes after ``base``; only the alignment of one element is required."""
        scalar = getattr(value.type, "element", value.type)
        self.builder.store(
            value, self.pointer_at(base, offset, value.type), align=_type_bytes(scalar)
        )

    def scale_index(self, index: Value, factor: int, offset: int = 0) -> Value:
        """Return ``index * factor + offset``."""
        product = self.builder.mul(index, I64(factor))
        return self.builder.add(product, I64(offset)) if offset else product

    @contextmanager
    def loop(
        self, first: Value, last: Value, carried: Sequence[Value] = ()
    ) -> Iterator[tuple[Value, list[Value]]]:
        """Write a loop over ``[first, last)`` that runs at least once.

        Yields ``(index, values)``. The body replaces loop-carried values in the list ``values``, which
        holds the final ones after the loop.
        """
        builder = self.builder
        prologue, body = builder.block, self.function.append_basic_block()
        after = self.function.append_basic_block()
        builder.branch(body)
        builder.position_at_end(body)
        index = builder.phi(I64)
        index.add_incoming(first, prologue)
        phis = [builder.phi(value.type) for value in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, prologue)
        values = list(phis)
        yield index, values
        next_index = builder.add(index, I64(1))
        index.add_incoming(next_index, builder.block)
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", next_index, last), body, after)
        builder.position_at_end(after)

    def load_floats(self, base: Value, index: Value, dtype: torch.dtype) -> Value:
        """Load vector ``index`` of an array of type ``dtype`` and convert it to float32."""
        offset = self.scale_index(index, dtype.itemsize * self.lanes)
        return self.to_float32(self.load(base, offset, self.memory_type(dtype)), dtype)

    def memory_type(self, dtype: torch.dtype) -> Value:
        """Return the LLVM type of a vector of ``dtype`` in memory."""
        return self.vector_type(_MEMORY_TYPES[dtype])

    def to_float32(self, value: Value, dtype: torch.dtype) -> Value:
        """Convert a vector of type ``dtype`` to float32."""
        if dtype == torch.float32:
            return value
        if dtype == torch.float16:
            return self.builder.fpext(value, self.vector_type(F32))
        if dtype == torch.bfloat16:
            widened = self.builder.zext(value, self.vector_type(I32))
            return self.builder.bitcast(
                self.builder.shl(widened, self.splat(I32, 16)), self.vector_type(F32)
            )
        widened = (self.builder.zext if dtype == torch.uint8 else self.builder.sext)(
            value, self.vector_type(I32)
        )
        if dtype == torch.float8_e4m3fn:  # as `gpu.fields.float8_value`
            bits = self.builder.and_(
                self.builder.shl(widened, self.splat(I32, 20)), self.splat(I32, -0x78100000)
            )
            scaled_value = self.builder.bitcast(bits, self.vector_type(F32))
            return self.builder.fmul(scaled_value, self.splat(F32, 2.0**120))
        return self.builder.sitofp(widened, self.vector_type(F32))

    def round_to(self, value: Value, dtype: torch.dtype) -> Value:
        """Round a float32 vector to the nearest values of ``dtype``; the result is float32."""
        return self.to_float32(self.from_float32(value, dtype), dtype)

    def store_floats(self, value: Value, base: Value, index: Value, dtype: torch.dtype) -> None:
        """Convert a float32 vector to ``dtype`` and store it as vector ``index`` of an array."""
        self.store(
            self.from_float32(value, dtype),
            base,
            self.scale_index(index, dtype.itemsize * self.lanes),
        )

    def prefetch(self, address: Value) -> None:
        """Prefetch the cache line at an address."""
        self.call_intrinsic("llvm.prefetch.p0", ir.VoidType(), address, I32(0), I32(3), I32(1))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return ``a * b + c`` of float32 vectors with a single rounding."""
        return self.call_intrinsic(f"llvm.fma.v{self.lanes}f32", self.vector_type(F32), a, b, c)

    def sum_lanes(self, value: Value) -> Value:
        """Return the sum of the lanes of a float32 vector, added in pairs."""
        name = f"llvm.vector.reduce.fadd.v{self.lanes}f32"
        function = declare_function(self._module, name, F32, [F32, value.type])
        return self.builder.call(function, [F32(-0.0), value], fastmath=("reassoc",))

    def from_float32(self, value: Value, dtype: torch.dtype) -> Value:
        """Convert a float32 vector to ``dtype`` as stored in memory, rounding to the nearest, ties to even."""
        if dtype == torch.float32:
            return value
        if dtype == torch.float16:
            return self.builder.fptrunc(value, self.vector_type(F16))
        builder, element_type = self.builder, self.vector_type(I32)
        bits = builder.bitcast(value, element_type)
        lowest_kept_bit = builder.and_(builder.lshr(bits, self.splat(I32, 16)), self.splat(I32, 1))
        bits = builder.add(bits, builder.add(lowest_kept_bit, self.splat(I32, 0x7FFF)))
        # An all-ones NaN would overflow into a number.
        quiet = self.splat(I32, 0x7FC00000)
        bits = builder.select(builder.fcmp_unordered("uno", value, value), quiet, bits)
        return builder.trunc(builder.lshr(bits, self.splat(I32, 16)), self.vector_type(I16))


def _type_bytes(element_type: Value) -> int:
    return {I8: 1, I16: 2, F16: 2, I32: 4, F32: 4, I64: 8}[element_type]


def declare_function(
    module: ir.Module, name: str, result: Value, arguments: Sequence[Value] = ()
) -> ir.Function:
    """Declare an external function, or return its declaration if the module has one."""
    existing = module.globals.get(name)
    return existing or ir.Function(module, ir.FunctionType(result, arguments), name)


def add_entry_point(
    module: ir.Module, name: str, prologue: str = "", parallel: bool = False
) -> None:
    """Add the entry ``void name_run(i64* args)``, which calls ``name`` on the whole range.

    Args:
        module: module with the function ``name``.
        name: name of the function.
        prologue: function to call first, on all `ARG_ROWS`, by one thread.
        parallel: divide the range by ``GOMP_parallel`` if `ARG_THREADS` is above 1.
    """
    builder, arguments = _new_words_function(module, f"{name}_run")
    if prologue:
        rows = builder.load(builder.gep(arguments, [I64(ARG_ROWS)]))
        builder.call(module.globals[prologue], [arguments, I64(0), rows])
    first, last = _load_range(builder, arguments)
    if not parallel:
        builder.call(module.globals[name], [arguments, first, last])
        builder.ret_void()
        return
    share_function = _build_thread_share(module, name)
    kinds = [share_function.type, arguments.type, I32, I32]
    run_parallel = declare_function(module, "GOMP_parallel", ir.VoidType(), kinds)
    threads = builder.load(builder.gep(arguments, [I64(ARG_THREADS)]))
    with builder.if_else(builder.icmp_signed(">", threads, I64(1))) as (in_parallel, in_one_thread):
        with in_parallel:
            builder.call(
                run_parallel, [share_function, arguments, builder.trunc(threads, I32), I32(0)]
            )
        with in_one_thread:
            builder.call(module.globals[name], [arguments, first, last])
    builder.ret_void()


def add_dynamic_entry_point(module: ir.Module, name: str, prologue: str, parallel: bool) -> None:
    """Add the entry ``void name_run(i64* args)`` in which threads take pieces of the work as they become free.

    It calls ``prologue`` on all `ARG_ROWS`, then ``name`` on the whole range.

    Args:
        module: module with both functions; their results must not depend on how the range is cut.
        name: name of the second function.
        prologue: name of the first function.
        parallel: use threads if `ARG_THREADS` is above 1.
    """
    builder, arguments = _new_words_function(module, f"{name}_run")
    rows, threads = (
        builder.load(builder.gep(arguments, [I64(index)])) for index in (ARG_ROWS, ARG_THREADS)
    )
    ranges = {prologue: (I64(0), rows), name: _load_range(builder, arguments)}
    shared = builder.alloca(I64, I64(len(_PIECE_STATE)))
    for function_name, (first, last) in ranges.items():
        if not parallel:
            builder.call(module.globals[function_name], [arguments, first, last])
            continue
        piece_function = _build_piece_loop(module, function_name)
        kinds = [piece_function.type, arguments.type, I32, I32]
        piece = builder.sdiv(builder.sub(last, first), builder.mul(threads, I64(PIECES_PER_THREAD)))
        piece = builder.select(builder.icmp_signed(">", piece, I64(1)), piece, I64(1))
        for index, value in enumerate((builder.ptrtoint(arguments, I64), first, last, piece)):
            builder.store(value, builder.gep(shared, [I64(index)]))
        with builder.if_else(builder.icmp_signed(">", threads, I64(1))) as (
            in_parallel,
            in_one_thread,
        ):
            with in_parallel:
                run_parallel = declare_function(module, "GOMP_parallel", ir.VoidType(), kinds)
                builder.call(
                    run_parallel, [piece_function, shared, builder.trunc(threads, I32), I32(0)]
                )
            with in_one_thread:
                builder.call(module.globals[function_name], [arguments, first, last])
    builder.ret_void()


def _build_piece_loop(module: ir.Module, name: str) -> ir.Function:
    """Build ``void name_taking(i64* shared)``, which calls ``name`` on one piece after the other until none is left."""
    builder, shared = _new_words_function(module, f"{name}_taking")
    address, last, piece = (
        builder.load(builder.gep(shared, [I64(_PIECE_STATE.index(field))]))
        for field in ("words", "last", "piece")
    )
    arguments, next_index = (
        builder.inttoptr(address, shared.type),
        builder.gep(shared, [I64(_PIECE_STATE.index("next"))]),
    )
    function = builder.function
    take, work, done = (function.append_basic_block() for _ in range(3))
    builder.branch(take)
    builder.position_at_end(take)
    piece_start = builder.atomic_rmw("add", next_index, piece, "monotonic")
    builder.cbranch(builder.icmp_signed("<", piece_start, last), work, done)
    builder.position_at_end(work)
    piece_end = builder.add(piece_start, piece)
    piece_end = builder.select(builder.icmp_signed("<", piece_end, last), piece_end, last)
    builder.call(module.globals[name], [arguments, piece_start, piece_end])
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
    return function


def _build_thread_share(module: ir.Module, name: str) -> ir.Function:
    """Build ``void name_part(i64* args)``, which calls ``name`` on this thread's share of the range."""
    builder, arguments = _new_words_function(module, f"{name}_part")
    number, count = (
        builder.sext(builder.call(declare_function(module, f"omp_get_{suffix}", I32), []), I64)
        for suffix in ("thread_num", "num_threads")
    )
    first, last = _load_range(builder, arguments)
    work = builder.sub(last, first)
    piece_start, piece_end = (
        builder.add(first, builder.sdiv(builder.mul(work, index), count))
        for index in (number, builder.add(number, I64(1)))
    )
    with builder.if_then(builder.icmp_signed("<", piece_start, piece_end)):
        builder.call(module.globals[name], [arguments, piece_start, piece_end])
    builder.ret_void()
    return builder.function


def _new_words_function(module: ir.Module, name: str) -> tuple[ir.IRBuilder, Value]:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64.as_pointer()]), name)
    return ir.IRBuilder(function.append_basic_block()), function.args[0]


def _load_range(builder: ir.IRBuilder, arguments: Value) -> tuple[Value, Value]:
    first, last = (
        builder.load(builder.gep(arguments, [I64(index)])) for index in (ARG_FIRST, ARG_LAST)
    )
    return first, last
