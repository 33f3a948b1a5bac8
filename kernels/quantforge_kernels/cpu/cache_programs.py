"""Programs for the paged cache: attention of one new token per sequence, and new keys and values stored.

`attend` (see `quantforge_kernels.attention`): a unit of work is a few query heads that share a head of keys and
values, as many as their sums fit the registers. It goes over the cache twice, once for the scores,
which stay in scratch memory, once for the values. Keys and values are read where they lie, and
converted once per unit.

`store`: formats and rounding are those of `quantforge_kernels.kv`, to the bit. A head of some kinds is codes
and a few float16 parameters, one for each run of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from llvmlite import ir

from quantforge_kernels.cpu.emit import F16, F32, I8, I32, I64, Emitter, Value, add_entry
from quantforge_kernels.cpu.layer_programs import exponential
from quantforge_kernels.kv import CODES, MOST, PAGE, SMALLEST

Pool = tuple[Value, Value, Value]  # codes, scales, lows; what is not there is not read
Tokens = tuple[Value, Value]  # the first that is seen, and the one after the last
Entry = Callable[[Value], Value]  # from a token to the number of its head


@dataclass(frozen=True, slots=True)
class Entries:
    """Form in which heads are stored.

    Attributes:
        dtype: of activations.
        lanes: elements of a vector.
        head: vectors of a head.
        kind: of the cache.
        run: vectors that share a scale.
    """

    dtype: torch.dtype
    lanes: int
    head: int
    kind: str
    run: int

    @property
    def codes(self) -> torch.dtype:
        """Return the type of the codes."""
        return CODES[self.kind] if self.kind else self.dtype

    @property
    def stored(self) -> int:
        """Return the vectors of codes of a head."""
        return self.head // 2 if self.kind == "int4" else self.head


def pool_at(e: Emitter, place: int) -> Pool:
    """Return three words of the argument as a pool."""
    return e.address(place), e.address(place + 1), e.address(place + 2)


def load_head(e: Emitter, entries: Entries, pool: Pool, number: Value) -> list[Value]:
    """Load a head of the pool as vectors of float32."""
    build, kind = e.build, entries.kind
    first = e.scaled(number, entries.stored)
    parts = range(entries.stored)
    if kind == "int4":
        raw = [
            build.zext(
                e.load(pool[0], e.scaled(build.add(first, I64(i)), e.lanes), e.vector(I8)),
                e.vector(I32),
            )
            for i in parts
        ]
        low, four = e.splat(I32, 15), e.splat(I32, 4)
        codes = [build.and_(value, low) for value in raw]
        codes += [build.lshr(value, four) for value in raw]
        values = [build.sitofp(code, e.vector(F32)) for code in codes]
    else:
        values = [e.load_floats(pool[0], build.add(first, I64(i)), entries.codes) for i in parts]
    if not kind:
        return values
    runs = entries.head // entries.run
    for i in range(entries.head):
        at = e.scaled(e.scaled(number, runs, i // entries.run), 2)
        scale = e.spread(build.fpext(e.load(pool[1], at, F16), F32))
        if kind == "int4":
            shift = e.spread(build.fpext(e.load(pool[2], at, F16), F32))
            values[i] = e.fma(values[i], scale, shift)
        else:
            values[i] = build.fmul(values[i], scale)
    return values


# Words of `attend` by place, after FIRST, LAST, THREADS and ROWS.
QUERIES, TABLE, LENGTHS, OUT, SCRATCH = range(4, 9)  # addresses
PAGES, ROOM, HEADS, KV_HEADS = range(9, 13)  # pages of a row of TABLE, vectors of scores, counts
KEYS, VALUES = 13, 16  # three words each, see `pool_at`
_SUMS = 16  # vectors that a unit adds up


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


NEW_KEYS, NEW_VALUES, SLOTS = range(4, 7)  # words of `store`: addresses
KEY_STRIDE, VALUE_STRIDE, STORED_HEADS = range(7, 10)  # bytes from token to token, heads of a token
KEY_POOL, VALUE_POOL = 10, 13  # three addresses each: codes, scales, lows
KEY_SCALES, VALUE_SCALES = 16, 17  # addresses of measured scales, see `kv.spread`
_WORDS = (  # of keys, and of values
    (NEW_KEYS, KEY_STRIDE, KEY_POOL, KEY_SCALES),
    (NEW_VALUES, VALUE_STRIDE, VALUE_POOL, VALUE_SCALES),
)


def store(both: tuple[Entries, Entries], measured: tuple[bool, bool], parallel: bool) -> ir.Module:
    """Build ``store_run``: put keys and values of a range of tokens into their slots; scales may be measured before."""
    module, first = ir.Module(), both[0]
    e = Emitter(module, "store", first.lanes)
    build, heads = e.build, e.word(STORED_HEADS)
    width = first.head * first.lanes * first.dtype.itemsize  # bytes of a head
    with e.loop(e.first, e.last) as (token, _):
        slot = e.load(e.address(SLOTS), e.scaled(token, 8), I64)
        for entries, given, (new, stride, pool, scales) in zip(both, measured, _WORDS, strict=True):
            source = build.gep(e.address(new), [build.mul(token, e.word(stride))])
            before = e.address(scales) if given else None
            with e.loop(I64(0), heads) as (head, _):
                base = build.gep(source, [e.scaled(head, width)])
                number = build.add(build.mul(slot, heads), head)
                _store_head(e, entries, base, pool_at(e, pool), (number, head), before)
    build.ret_void()
    add_entry(module, "store", parallel=parallel)
    return module


def _store_head(
    e: Emitter,
    entries: Entries,
    base: Value,
    pool: Pool,
    at: tuple[Value, Value],
    measured: Value | None,
) -> None:
    """Store a head: its codes, and for quantized kinds the scale (and minimum) of each run."""
    number, head = at
    first = e.scaled(number, entries.stored)
    build, parts = e.build, range(entries.head)
    if not entries.kind:
        for i in parts:
            size = entries.dtype.itemsize * e.lanes
            value = e.load(base, I64(i * size), e.stored(entries.dtype))
            e.store(value, pool[0], e.scaled(build.add(first, I64(i)), size))
        return
    values = [e.load_floats(base, I64(i), entries.dtype) for i in parts]
    runs = entries.head // entries.run
    codes: list[Value] = []
    for r in range(runs):
        run = values[r * entries.run : (r + 1) * entries.run]
        place = e.scaled(number, runs, r)
        before = None
        if measured is not None:
            before = e.load(measured, e.scaled(e.scaled(head, runs, r), 4), F32)
        codes += _quantized(e, entries, run, pool, (place, before))
    if entries.kind == "int4":
        half, four = entries.head // 2, e.splat(I32, 4)
        codes = [build.or_(codes[i], build.shl(codes[half + i], four)) for i in range(half)]
    for i, code in enumerate(codes):
        offset = e.scaled(build.add(first, I64(i)), e.lanes)
        e.store(build.trunc(code, e.vector(I8)), pool[0], offset)


def _quantized(
    e: Emitter,
    entries: Entries,
    run: list[Value],
    pool: Pool,
    at: tuple[Value, Value | None],
) -> list[Value]:
    """Store the scale (and minimum) of a run of channels; return its codes, vectors of 32-bit integers."""
    build, (place, measured) = e.build, at
    offset = e.scaled(place, 2)
    if entries.kind == "int4":
        low = build.fptrunc(_over(e, "minimum", run), F16)
        e.store(low, pool[2], offset)
        base = build.fpext(low, F32)
        span = build.fsub(_over(e, "maximum", run), base)
        scale = _stored_scale(e, build.fdiv(span, F32(15.0)), pool, offset)
        run = [build.fsub(value, e.spread(base)) for value in run]
        lowest, highest = 0.0, 15.0
    else:
        highest = MOST[entries.kind]
        lowest = -highest
        if measured is None:
            sizes = [e.call(f"llvm.fabs.v{e.lanes}f32", e.vector(F32), value) for value in run]
            measured = build.fdiv(_over(e, "maximum", sizes), F32(highest))
        scale = _stored_scale(e, measured, pool, offset)
    codes = []
    for value in run:
        exact = build.fdiv(value, e.spread(scale))
        number = _between(e, exact, lowest, highest)
        codes.append(_float8(e, number, exact) if entries.kind == "fp8" else _nearest(e, number))
    return codes


def _nearest(e: Emitter, value: Value) -> Value:
    """Round to the nearest integer, halves to even."""
    near = e.call(f"llvm.nearbyint.v{e.lanes}f32", e.vector(F32), value)
    return e.build.fptosi(near, e.vector(I32))


def _over(e: Emitter, name: str, values: list[Value]) -> Value:
    """Return the ``maximum`` or ``minimum`` of all elements, as ``name`` says; NaN where one is."""
    kind = e.vector(F32)
    while len(values) > 1:
        values = [e.call(f"llvm.{name}.v{e.lanes}f32", kind, *values[:2]), *values[2:]]
    return e.call(f"llvm.vector.reduce.f{name}.v{e.lanes}f32", F32, values[0])


def _stored_scale(e: Emitter, scale: Value, pool: Pool, offset: Value) -> Value:
    """Store a scale in 16 bits; return it."""
    build = e.build
    scale = build.select(build.fcmp_ordered("<", scale, F32(SMALLEST)), F32(SMALLEST), scale)
    half = build.fptrunc(scale, F16)
    e.store(half, pool[1], offset)
    return build.fpext(half, F32)


def _between(e: Emitter, value: Value, low: float, high: float) -> Value:
    """Clamp values, and NaN to 0: that there was one stands in the scale of the run, or (fp8) is put into its code."""
    build = e.build
    for bound, sign in ((low, "<"), (high, ">")):
        edge = e.splat(F32, bound)
        value = build.select(build.fcmp_ordered(sign, value, edge), edge, value)
    return build.select(build.fcmp_ordered("ord", value, value), value, e.splat(F32, 0.0))


def _float8(e: Emitter, value: Value, exact: Value) -> Value:
    """Return the byte of the nearest float8_e4m3fn, halves to even; of numbers up to 448, NaN where ``exact`` is."""
    build, kind = e.build, e.vector(I32)
    bits = build.bitcast(value, kind)
    sign = build.and_(build.lshr(bits, e.splat(I32, 24)), e.splat(I32, 0x80))
    size = build.and_(bits, e.splat(I32, 0x7FFFFFFF))
    odd = build.and_(build.lshr(size, e.splat(I32, 20)), e.splat(I32, 1))
    rounded = build.add(size, build.add(odd, e.splat(I32, 0x7FFFF)))
    normal = build.sub(build.lshr(rounded, e.splat(I32, 20)), e.splat(I32, (127 - 7) << 3))
    # Below 2^-6 the byte counts steps of 2^-9.
    steps = build.fmul(build.bitcast(size, e.vector(F32)), e.splat(F32, math.ldexp(1.0, 9)))
    tiny = build.icmp_signed("<", size, e.splat(I32, (127 - 6) << 23))
    code = build.or_(sign, build.select(tiny, _nearest(e, steps), normal))
    none = build.or_(build.lshr(build.bitcast(exact, kind), e.splat(I32, 24)), e.splat(I32, 0x7F))
    return build.select(build.fcmp_ordered("ord", exact, exact), code, none)
