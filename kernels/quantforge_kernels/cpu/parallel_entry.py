"""The function by which a program is called: its whole range, in one thread or shared out among several.

A program is written as ``void name(i64* words, i64 first, i64 last)``, which does the part ``[first, last)`` of
the work (tiles, rows, tokens). `add_entry` adds ``void name_run(i64* words)``, which takes the range from the first
two words.
"""

from __future__ import annotations

from llvmlite import ir

from quantforge_kernels.cpu.emit import FIRST, I32, I64, LAST, ROWS, THREADS, Value, declared


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
