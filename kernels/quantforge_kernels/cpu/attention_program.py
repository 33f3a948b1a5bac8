"""The paged cache on a processor with vectors: attention of one new token per sequence.

See `quantforge_kernels.attention`. A unit of work is a few query heads that share a head of keys and
values: as many as their sums fit the registers. It goes over the cache twice, once for the scores,
which stay in scratch memory, once for the values. Keys and values are read where they lie, and
converted once per unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from llvmlite import ir

from quantforge_kernels.cpu.cache_entries import Entries, load_head, pool_at
from quantforge_kernels.cpu.emit import F32, I32, I64, Emitter, Value
from quantforge_kernels.cpu.layer_programs import exponential
from quantforge_kernels.cpu.parallel_entry import add_entry
from quantforge_kernels.kv import PAGE

# Words of the argument, by place, after FIRST, LAST, THREADS and ROWS.
QUERIES, TABLE, LENGTHS, OUT, SCRATCH = range(4, 9)  # addresses
PAGES, ROOM, HEADS, KV_HEADS = range(9, 13)  # pages of a row of TABLE, vectors of scores, counts
KEYS, VALUES = 13, 16  # pools, see `cache_entries`
_SUMS = 16  # vectors that a unit adds up

Tokens = tuple[Value, Value]  # the first that is seen, and the one after the last
Entry = Callable[[Value], Value]  # from a token to the number of its head


@dataclass(frozen=True, slots=True)
class PagedForm:
    """Form for which a program is made.

    Attributes:
        keys, values: how their heads are stored; of one type, lanes and head.
        group: query heads of a head of keys.
        scale: of scores.
        cap: of scores; 0: none.
        window: newest tokens that are seen; 0: all.
    """

    keys: Entries
    values: Entries
    group: int
    scale: float
    cap: float
    window: int

    @property
    def together(self) -> int:
        """Return the number of query heads of a unit."""
        most = max(1, _SUMS // self.keys.head)
        return next(size for size in range(most, 0, -1) if self.group % size == 0)


def attend(form: PagedForm, parallel: bool) -> ir.Module:
    """Build ``attend_run``: attention for a range of units, ``heads / together`` for each sequence."""
    module = ir.Module()
    dtype, head = form.keys.dtype, form.keys.head
    e = Emitter(module, "attend", form.keys.lanes)
    build, together = e.build, form.together
    heads, kv_heads, pages = (e.word(place) for place in (HEADS, KV_HEADS, PAGES))
    queries, out, table = (e.address(place) for place in (QUERIES, OUT, TABLE))
    room, scratch = e.word(ROOM), e.address(SCRATCH)
    with e.loop(e.first, e.last) as (unit, _):
        first = e.scaled(unit, together)  # of all query heads
        sequence = build.udiv(first, heads)
        shared = build.udiv(build.urem(first, heads), I64(form.group))
        length = _int32(e, e.address(LENGTHS), sequence)
        start = I64(0)
        if form.window:
            start = build.sub(length, I64(form.window))
            start = build.select(build.icmp_signed(">", start, I64(0)), start, I64(0))
        row = build.gep(table, [e.scaled(build.mul(sequence, pages), 4)])

        def entry(token: Value, row: Value = row, shared: Value = shared) -> Value:
            """Return the number of the head of a token."""
            page = _int32(e, row, build.udiv(token, I64(PAGE)))
            slot = build.add(e.scaled(page, PAGE), build.urem(token, I64(PAGE)))
            return build.add(build.mul(slot, kv_heads), shared)

        size = build.add(room, I64(head))  # vectors of scratch for a query head
        scores, scaled = [], []
        for g in range(together):
            query = build.add(first, I64(g))
            line = build.mul(query, size)
            scores.append(build.gep(scratch, [e.scaled(line, 4 * e.lanes)]))
            scaled.append(build.gep(scores[g], [e.scaled(room, 4 * e.lanes)]))
            for i in range(head):
                value = e.load_floats(queries, e.scaled(query, head, i), dtype)
                value = build.fmul(value, e.splat(F32, form.scale))
                e.store_floats(value, scaled[g], I64(i), torch.float32)
        _scores(e, form, (start, length), entry, scaled, scores)
        totals = [_softmax(e, form, base, (start, length)) for base in scores]
        sums = _weighted(e, form, (start, length), entry, scores)
        for g, total in enumerate(totals):
            for i in range(head):
                value = build.fdiv(sums[g * head + i], e.spread(total))
                at = e.scaled(build.add(first, I64(g)), head, i)
                e.store_floats(value, out, at, dtype)
    build.ret_void()
    add_entry(module, "attend", parallel=parallel)
    return module


def _scores(
    e: Emitter,
    form: PagedForm,
    tokens: Tokens,
    entry: Entry,
    queries: list[Value],
    scores: list[Value],
) -> None:
    """Store the score of every token for every query head, the oldest that is seen first."""
    build, keys = e.build, pool_at(e, KEYS)
    with e.loop(*tokens) as (token, _):
        key = load_head(e, form.keys, keys, entry(token))
        for query, score in zip(queries, scores, strict=True):
            dot = e.splat(F32, 0.0)
            for i, part in enumerate(key):
                dot = e.fma(part, e.load_floats(query, I64(i), torch.float32), dot)
            place = build.sub(token, tokens[0])
            e.store(e.total(dot), score, e.scaled(place, 4))


def _softmax(e: Emitter, form: PagedForm, scores: Value, tokens: Tokens) -> Value:
    """Replace scores by their exponentials, less the largest; return the sum of those."""
    build, kind = e.build, e.vector(F32)
    count = build.sub(tokens[1], tokens[0])
    vectors = build.udiv(build.add(count, I64(e.lanes - 1)), I64(e.lanes))
    lane = ir.Constant(e.vector(I32), list(range(e.lanes)))
    lowest = e.splat(F32, -math.inf)
    with e.loop(I64(0), vectors, [lowest]) as (i, peaks):
        value = e.load_floats(scores, i, torch.float32)
        if form.cap:
            value = _capped(e, value, form.cap)
        number = build.add(lane, e.spread(build.trunc(e.scaled(i, e.lanes), I32)))
        live = build.icmp_signed("<", number, e.spread(build.trunc(count, I32)))
        value = build.select(live, value, lowest)
        e.store_floats(value, scores, i, torch.float32)
        peaks[0] = e.call(f"llvm.maximum.v{e.lanes}f32", kind, peaks[0], value)
    peak = e.spread(e.call(f"llvm.vector.reduce.fmaximum.v{e.lanes}f32", F32, peaks[0]))
    with e.loop(I64(0), vectors, [e.splat(F32, 0.0)]) as (i, sums):
        value = exponential(e, build.fsub(e.load_floats(scores, i, torch.float32), peak))
        e.store_floats(value, scores, i, torch.float32)
        sums[0] = build.fadd(sums[0], value)
    return e.total(sums[0])


def _capped(e: Emitter, value: Value, cap: float) -> Value:
    """Compute ``cap tanh(value / cap)``, with ``tanh(z) = 1 - 2 / (exp(2 z) + 1)``."""
    build, one = e.build, e.splat(F32, 1.0)
    power = exponential(e, build.fmul(value, e.splat(F32, 2 / cap)))
    rest = build.fdiv(e.splat(F32, 2.0), build.fadd(power, one))
    return build.fmul(build.fsub(one, rest), e.splat(F32, cap))


def _weighted(
    e: Emitter, form: PagedForm, tokens: Tokens, entry: Entry, scores: list[Value]
) -> list[Value]:
    """Sum the values, each times its exponential: ``head`` vectors for every query head."""
    build, values, head = e.build, pool_at(e, VALUES), form.values.head
    start = [e.splat(F32, 0.0)] * (len(scores) * head)
    with e.loop(*tokens, start) as (token, sums):
        value = load_head(e, form.values, values, entry(token))
        place = e.scaled(build.sub(token, tokens[0]), 4)
        for g, score in enumerate(scores):
            weight = e.spread(e.load(score, place, F32))
            for i, part in enumerate(value):
                sums[g * head + i] = e.fma(weight, part, sums[g * head + i])
    return sums


def _int32(e: Emitter, base: Value, index: Value) -> Value:
    """Load an element of an array of 32-bit integers."""
    return e.build.sext(e.load(base, e.scaled(index, 4), I32), I64)
