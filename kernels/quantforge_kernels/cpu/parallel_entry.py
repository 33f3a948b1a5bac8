"""The function by which a program is called: its whole range, in one thread or shared out among several.

A program is written as ``void name(i64* words, i64 first, i64 last)``, which does the part ``[first, last)`` of
the work (tiles, rows, tokens). `add_entry` adds ``void name_run(i64* words)``, which takes the range from the first
two words. `add_taking_entry` does so for much work: threads take pieces of it as they get done, so that none waits for
one that something else holds up.
"""

from __future__ import annotations

from llvmlite import ir

from quantforge_kernels.cpu.emit import FIRST, I32, I64, LAST, ROWS, THREADS, Value, declared

PIECES = 8  # that each thread takes, if all are equally fast
_SHARED = ("words", "next", "last", "piece")  # among threads that take pieces: places of 64 bits


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
