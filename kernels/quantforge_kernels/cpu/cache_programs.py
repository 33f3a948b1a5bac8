"""CPU programs for the paged cache: attention of one new token per sequence, and storing new keys and values.

`build_attend` (see `quantforge_kernels.attention`): a unit of work is a few query heads that share a key/value head, as
many as their accumulators fit the registers. It passes over the cache twice: first for the logits,
which are kept in scratch memory, then for the values. Keys and values are read in place and
converted once per unit.

`build_store`: formats and rounding match `quantforge_kernels.kv` bit for bit. A quantized head consists of codes
and a few float16 parameters, one for each group of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from llvmlite import ir

from quantforge_kernels.cpu.layer_programs import emit_exp
from quantforge_kernels.cpu.llvm_emitter import (
    F16,
    F32,
    I8,
    I32,
    I64,
    Emitter,
    Value,
    add_entry_point,
)
from quantforge_kernels.kv import CODE_DTYPES, MAX_CODES, MIN_SCALE, PAGE_SIZE

PoolAddresses = tuple[Value, Value, Value]  # codes, scales, lows; what is not there is not read
TokenRange = tuple[Value, Value]  # the first that is seen, and the one after the last
HeadNumber = Callable[[Value], Value]  # from a token to the number of its head


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """Storage format of one head of keys or values.

    Attributes:
        dtype: type of activations.
        lanes: elements of a vector.
        head_vectors: vectors of a head.
        kind: storage kind of the cache.
        vectors_per_scale: vectors that share a scale.
    """

    dtype: torch.dtype
    lanes: int
    head_vectors: int
    kind: str
    vectors_per_scale: int

    @property
    def code_dtype(self) -> torch.dtype:
        """Return the type of the codes."""
        return CODE_DTYPES[self.kind] if self.kind else self.dtype

    @property
    def code_vectors(self) -> int:
        """Return the number of vectors that the codes of a head take."""
        return self.head_vectors // 2 if self.kind == "int4" else self.head_vectors


def load_pool_addresses(e: Emitter, index: int) -> PoolAddresses:
    """Load three consecutive argument words as the addresses of codes, scales and minima."""
    return e.load_address(index), e.load_address(index + 1), e.load_address(index + 2)


def emit_load_head(
    e: Emitter, head_format: HeadFormat, pool: PoolAddresses, number: Value
) -> list[Value]:
    """Write code that loads head ``number`` of a pool as vectors of float32."""
    builder, kind = e.builder, head_format.kind
    first = e.scale_index(number, head_format.code_vectors)
    code_vectors = range(head_format.code_vectors)
    if kind == "int4":
        bytes_ = [
            builder.zext(
                e.load(
                    pool[0], e.scale_index(builder.add(first, I64(i)), e.lanes), e.vector_type(I8)
                ),
                e.vector_type(I32),
            )
            for i in code_vectors
        ]
        low, four_bits = e.splat(I32, 15), e.splat(I32, 4)
        codes = [builder.and_(value, low) for value in bytes_]
        codes += [builder.lshr(value, four_bits) for value in bytes_]
        values = [builder.sitofp(code, e.vector_type(F32)) for code in codes]
    else:
        values = [
            e.load_floats(pool[0], builder.add(first, I64(i)), head_format.code_dtype)
            for i in code_vectors
        ]
    if not kind:
        return values
    groups = head_format.head_vectors // head_format.vectors_per_scale
    for i in range(head_format.head_vectors):
        location = e.scale_index(
            e.scale_index(number, groups, i // head_format.vectors_per_scale), 2
        )
        scale = e.broadcast(builder.fpext(e.load(pool[1], location, F16), F32))
        if kind == "int4":
            shift = e.broadcast(builder.fpext(e.load(pool[2], location, F16), F32))
            values[i] = e.fma(values[i], scale, shift)
        else:
            values[i] = builder.fmul(values[i], scale)
    return values


# Words of `build_attend` by place, after FIRST, LAST, THREADS and ROWS.
ARG_QUERIES, ARG_PAGE_TABLE, ARG_LENGTHS, ARG_OUT, ARG_SCRATCH = range(4, 9)  # addresses
# Pages of a row of TABLE, vectors of scores, counts
ARG_TABLE_STRIDE, ARG_SCORE_VECTORS, ARG_HEADS, ARG_KV_HEADS = range(9, 13)
ARG_KEYS, ARG_VALUES = 13, 16  # three words each, see `load_pool_addresses`
_MAX_SUM_VECTORS = 16  # vectors that a unit adds up


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What an attention program is generated for.

    Attributes:
        key_format: storage format of keys.
        value_format: storage format of values, with the same dtype, lanes and head size.
        queries_per_kv_head: query heads that share a key/value head.
        scale: factor of the logits.
        softcap: cap of the logits; 0 for none.
        window: number of newest tokens that are attended to; 0 for all.
    """

    key_format: HeadFormat
    value_format: HeadFormat
    queries_per_kv_head: int
    scale: float
    softcap: float
    window: int

    @property
    def heads_per_unit(self) -> int:
        """Return the number of query heads in a unit of work."""
        max_heads = max(1, _MAX_SUM_VECTORS // self.key_format.head_vectors)
        return next(
            size for size in range(max_heads, 0, -1) if self.queries_per_kv_head % size == 0
        )


def build_attend(spec: AttentionSpec, parallel: bool) -> ir.Module:
    """Build ``attend_run``: attention for a range of units, ``heads / heads_per_unit`` for each sequence."""
    module = ir.Module()
    dtype, head = spec.key_format.dtype, spec.key_format.head_vectors
    e = Emitter(module, "attend", spec.key_format.lanes)
    builder, heads_per_unit = e.builder, spec.heads_per_unit
    heads, kv_heads, pages = (
        e.load_word(index) for index in (ARG_HEADS, ARG_KV_HEADS, ARG_TABLE_STRIDE)
    )
    queries, out, table = (
        e.load_address(index) for index in (ARG_QUERIES, ARG_OUT, ARG_PAGE_TABLE)
    )
    score_vectors, scratch = e.load_word(ARG_SCORE_VECTORS), e.load_address(ARG_SCRATCH)
    with e.loop(e.first, e.last) as (unit, _):
        first = e.scale_index(unit, heads_per_unit)  # of all query heads
        sequence = builder.udiv(first, heads)
        kv_head = builder.udiv(builder.urem(first, heads), I64(spec.queries_per_kv_head))
        length = _load_int32(e, e.load_address(ARG_LENGTHS), sequence)
        start = I64(0)
        if spec.window:
            start = builder.sub(length, I64(spec.window))
            start = builder.select(builder.icmp_signed(">", start, I64(0)), start, I64(0))
        row = builder.gep(table, [e.scale_index(builder.mul(sequence, pages), 4)])

        def head_number_of(token: Value, row: Value = row, kv_head: Value = kv_head) -> Value:
            """Return the number of the head of a token."""
            page = _load_int32(e, row, builder.udiv(token, I64(PAGE_SIZE)))
            slot = builder.add(e.scale_index(page, PAGE_SIZE), builder.urem(token, I64(PAGE_SIZE)))
            return builder.add(builder.mul(slot, kv_heads), kv_head)

        size = builder.add(score_vectors, I64(head))  # vectors of scratch for a query head
        scores, scaled_queries = [], []
        for g in range(heads_per_unit):
            query = builder.add(first, I64(g))
            query_start = builder.mul(query, size)
            scores.append(builder.gep(scratch, [e.scale_index(query_start, 4 * e.lanes)]))
            scaled_queries.append(
                builder.gep(scores[g], [e.scale_index(score_vectors, 4 * e.lanes)])
            )
            for i in range(head):
                value = e.load_floats(queries, e.scale_index(query, head, i), dtype)
                value = builder.fmul(value, e.splat(F32, spec.scale))
                e.store_floats(value, scaled_queries[g], I64(i), torch.float32)
        _emit_scores(e, spec, (start, length), head_number_of, scaled_queries, scores)
        totals = [_emit_softmax(e, spec, base, (start, length)) for base in scores]
        sums = _emit_weighted_values(e, spec, (start, length), head_number_of, scores)
        for g, total in enumerate(totals):
            for i in range(head):
                value = builder.fdiv(sums[g * head + i], e.broadcast(total))
                location = e.scale_index(builder.add(first, I64(g)), head, i)
                e.store_floats(value, out, location, dtype)
    builder.ret_void()
    add_entry_point(module, "attend", parallel=parallel)
    return module


def _emit_scores(
    e: Emitter,
    spec: AttentionSpec,
    tokens: TokenRange,
    head_number_of: HeadNumber,
    queries: list[Value],
    scores: list[Value],
) -> None:
    """Write code that stores the logits of every visible token, oldest first, for every query head."""
    builder, keys = e.builder, load_pool_addresses(e, ARG_KEYS)
    with e.loop(*tokens) as (token, _):
        key = emit_load_head(e, spec.key_format, keys, head_number_of(token))
        for query, score in zip(queries, scores, strict=True):
            dot = e.splat(F32, 0.0)
            for i, key_vector in enumerate(key):
                dot = e.fma(key_vector, e.load_floats(query, I64(i), torch.float32), dot)
            index = builder.sub(token, tokens[0])
            e.store(e.sum_lanes(dot), score, e.scale_index(index, 4))


def _emit_softmax(e: Emitter, spec: AttentionSpec, scores: Value, tokens: TokenRange) -> Value:
    """Write code that replaces logits by ``exp(logit - max)``; return their sum."""
    builder, kind = e.builder, e.vector_type(F32)
    count = builder.sub(tokens[1], tokens[0])
    vectors = builder.udiv(builder.add(count, I64(e.lanes - 1)), I64(e.lanes))
    lane = ir.Constant(e.vector_type(I32), list(range(e.lanes)))
    lowest = e.splat(F32, -math.inf)
    with e.loop(I64(0), vectors, [lowest]) as (i, maxima):
        value = e.load_floats(scores, i, torch.float32)
        if spec.softcap:
            value = _emit_softcap(e, value, spec.softcap)
        number = builder.add(lane, e.broadcast(builder.trunc(e.scale_index(i, e.lanes), I32)))
        is_visible = builder.icmp_signed("<", number, e.broadcast(builder.trunc(count, I32)))
        value = builder.select(is_visible, value, lowest)
        e.store_floats(value, scores, i, torch.float32)
        maxima[0] = e.call_intrinsic(f"llvm.maximum.v{e.lanes}f32", kind, maxima[0], value)
    maximum = e.broadcast(
        e.call_intrinsic(f"llvm.vector.reduce.fmaximum.v{e.lanes}f32", F32, maxima[0])
    )
    with e.loop(I64(0), vectors, [e.splat(F32, 0.0)]) as (i, sums):
        value = emit_exp(e, builder.fsub(e.load_floats(scores, i, torch.float32), maximum))
        e.store_floats(value, scores, i, torch.float32)
        sums[0] = builder.fadd(sums[0], value)
    return e.sum_lanes(sums[0])


def _emit_softcap(e: Emitter, value: Value, cap: float) -> Value:
    """Write code for ``cap * tanh(value / cap)``, with ``tanh(z) = 1 - 2 / (exp(2 z) + 1)``."""
    builder, one = e.builder, e.splat(F32, 1.0)
    exponential = emit_exp(e, builder.fmul(value, e.splat(F32, 2 / cap)))
    fraction = builder.fdiv(e.splat(F32, 2.0), builder.fadd(exponential, one))
    return builder.fmul(builder.fsub(one, fraction), e.splat(F32, cap))


def _emit_weighted_values(
    e: Emitter,
    spec: AttentionSpec,
    tokens: TokenRange,
    head_number_of: HeadNumber,
    scores: list[Value],
) -> list[Value]:
    """Write code that sums the values weighted by the exponentials; return the vectors of every query head."""
    builder, values, head = (
        e.builder,
        load_pool_addresses(e, ARG_VALUES),
        spec.value_format.head_vectors,
    )
    start = [e.splat(F32, 0.0)] * (len(scores) * head)
    with e.loop(*tokens, start) as (token, sums):
        value = emit_load_head(e, spec.value_format, values, head_number_of(token))
        index = e.scale_index(builder.sub(token, tokens[0]), 4)
        for g, score in enumerate(scores):
            weight = e.broadcast(e.load(score, index, F32))
            for i, value_vector in enumerate(value):
                sums[g * head + i] = e.fma(weight, value_vector, sums[g * head + i])
    return sums


def _load_int32(e: Emitter, base: Value, index: Value) -> Value:
    """Load an element of an array of 32-bit integers."""
    return e.builder.sext(e.load(base, e.scale_index(index, 4), I32), I64)


ARG_NEW_KEYS, ARG_NEW_VALUES, ARG_SLOTS = range(4, 7)  # words of `build_store`: addresses
# Bytes from token to token, heads of a token
ARG_KEY_STRIDE, ARG_VALUE_STRIDE, ARG_STORED_HEADS = range(7, 10)
ARG_KEY_POOL, ARG_VALUE_POOL = 10, 13  # three addresses each: codes, scales, lows
ARG_KEY_SCALES, ARG_VALUE_SCALES = 16, 17  # addresses of measured scales, see `kv.expand_scale`
_STORE_ARGS = (  # of keys, and of values
    (ARG_NEW_KEYS, ARG_KEY_STRIDE, ARG_KEY_POOL, ARG_KEY_SCALES),
    (ARG_NEW_VALUES, ARG_VALUE_STRIDE, ARG_VALUE_POOL, ARG_VALUE_SCALES),
)


def build_store(
    formats: tuple[HeadFormat, HeadFormat], measured: tuple[bool, bool], parallel: bool
) -> ir.Module:
    """Build ``store_run``, which stores keys and values of a range of tokens in their slots.

    ``formats`` are the formats of keys and values; ``measured`` says for each whether calibrated scales are given.
    """
    module, first = ir.Module(), formats[0]
    e = Emitter(module, "store", first.lanes)
    builder, heads = e.builder, e.load_word(ARG_STORED_HEADS)
    width = first.head_vectors * first.lanes * first.dtype.itemsize  # bytes of a head
    with e.loop(e.first, e.last) as (token, _):
        slot = e.load(e.load_address(ARG_SLOTS), e.scale_index(token, 8), I64)
        for head_format, has_scale, (new_values, stride, pool, scales) in zip(
            formats, measured, _STORE_ARGS, strict=True
        ):
            source = builder.gep(
                e.load_address(new_values), [builder.mul(token, e.load_word(stride))]
            )
            measured_scale = e.load_address(scales) if has_scale else None
            with e.loop(I64(0), heads) as (head, _):
                base = builder.gep(source, [e.scale_index(head, width)])
                number = builder.add(builder.mul(slot, heads), head)
                _emit_store_head(
                    e,
                    head_format,
                    base,
                    load_pool_addresses(e, pool),
                    (number, head),
                    measured_scale,
                )
    builder.ret_void()
    add_entry_point(module, "store", parallel=parallel)
    return module


def _emit_store_head(
    e: Emitter,
    head_format: HeadFormat,
    base: Value,
    pool: PoolAddresses,
    location: tuple[Value, Value],
    measured: Value | None,
) -> None:
    """Write code that stores a head: its codes, and in quantized kinds the scale (and minimum) of each group."""
    number, head = location
    first = e.scale_index(number, head_format.code_vectors)
    builder, head_vectors = e.builder, range(head_format.head_vectors)
    if not head_format.kind:
        for i in head_vectors:
            size = head_format.dtype.itemsize * e.lanes
            value = e.load(base, I64(i * size), e.memory_type(head_format.dtype))
            e.store(value, pool[0], e.scale_index(builder.add(first, I64(i)), size))
        return
    values = [e.load_floats(base, I64(i), head_format.dtype) for i in head_vectors]
    groups = head_format.head_vectors // head_format.vectors_per_scale
    codes: list[Value] = []
    for r in range(groups):
        group = values[r * head_format.vectors_per_scale : (r + 1) * head_format.vectors_per_scale]
        index = e.scale_index(number, groups, r)
        scale_before = None
        if measured is not None:
            scale_before = e.load(measured, e.scale_index(e.scale_index(head, groups, r), 4), F32)
        codes += _emit_quantized_run(e, head_format, group, pool, (index, scale_before))
    if head_format.kind == "int4":
        half, four_bits = head_format.head_vectors // 2, e.splat(I32, 4)
        codes = [
            builder.or_(codes[i], builder.shl(codes[half + i], four_bits)) for i in range(half)
        ]
    for i, code in enumerate(codes):
        offset = e.scale_index(builder.add(first, I64(i)), e.lanes)
        e.store(builder.trunc(code, e.vector_type(I8)), pool[0], offset)


def _emit_quantized_run(
    e: Emitter,
    head_format: HeadFormat,
    group: list[Value],
    pool: PoolAddresses,
    location: tuple[Value, Value | None],
) -> list[Value]:
    """Write code that stores the scale (and minimum) of a group of channels; return its codes as int32 vectors."""
    builder, (index, measured) = e.builder, location
    offset = e.scale_index(index, 2)
    if head_format.kind == "int4":
        low = builder.fptrunc(_reduce_elements(e, "minimum", group), F16)
        e.store(low, pool[2], offset)
        base = builder.fpext(low, F32)
        span = builder.fsub(_reduce_elements(e, "maximum", group), base)
        scale = _emit_store_scale(e, builder.fdiv(span, F32(15.0)), pool, offset)
        group = [builder.fsub(value, e.broadcast(base)) for value in group]
        lowest, highest = 0.0, 15.0
    else:
        highest = MAX_CODES[head_format.kind]
        lowest = -highest
        if measured is None:
            sizes = [
                e.call_intrinsic(f"llvm.fabs.v{e.lanes}f32", e.vector_type(F32), value)
                for value in group
            ]
            measured = builder.fdiv(_reduce_elements(e, "maximum", sizes), F32(highest))
        scale = _emit_store_scale(e, measured, pool, offset)
    codes = []
    for value in group:
        exact = builder.fdiv(value, e.broadcast(scale))
        number = _emit_clamp(e, exact, lowest, highest)
        codes.append(
            _emit_float8(e, number, exact) if head_format.kind == "fp8" else _emit_round(e, number)
        )
    return codes


def _emit_round(e: Emitter, value: Value) -> Value:
    """Round to the nearest integer, ties to even."""
    rounded = e.call_intrinsic(f"llvm.nearbyint.v{e.lanes}f32", e.vector_type(F32), value)
    return e.builder.fptosi(rounded, e.vector_type(I32))


def _reduce_elements(e: Emitter, name: str, values: list[Value]) -> Value:
    """Return the ``maximum`` or ``minimum`` (``name``) of all elements; NaN if there is a NaN."""
    kind = e.vector_type(F32)
    while len(values) > 1:
        values = [e.call_intrinsic(f"llvm.{name}.v{e.lanes}f32", kind, *values[:2]), *values[2:]]
    return e.call_intrinsic(f"llvm.vector.reduce.f{name}.v{e.lanes}f32", F32, values[0])


def _emit_store_scale(e: Emitter, scale: Value, pool: PoolAddresses, offset: Value) -> Value:
    """Write code that stores a scale in float16; return it as stored, in float32."""
    builder = e.builder
    scale = builder.select(builder.fcmp_ordered("<", scale, F32(MIN_SCALE)), F32(MIN_SCALE), scale)
    half = builder.fptrunc(scale, F16)
    e.store(half, pool[1], offset)
    return builder.fpext(half, F32)


def _emit_clamp(e: Emitter, value: Value, low: float, high: float) -> Value:
    """Clamp values and replace NaN by 0; NaN inputs appear in the scale of the group or (fp8) in the code."""
    builder = e.builder
    for bound, sign in ((low, "<"), (high, ">")):
        edge = e.splat(F32, bound)
        value = builder.select(builder.fcmp_ordered(sign, value, edge), edge, value)
    return builder.select(builder.fcmp_ordered("ord", value, value), value, e.splat(F32, 0.0))


def _emit_float8(e: Emitter, value: Value, exact: Value) -> Value:
    """Return the nearest float8_e4m3fn as a byte, ties to even, for numbers up to 448; NaN where ``exact`` is NaN."""
    builder, kind = e.builder, e.vector_type(I32)
    bits = builder.bitcast(value, kind)
    sign = builder.and_(builder.lshr(bits, e.splat(I32, 24)), e.splat(I32, 0x80))
    size = builder.and_(bits, e.splat(I32, 0x7FFFFFFF))
    lowest_kept_bit = builder.and_(builder.lshr(size, e.splat(I32, 20)), e.splat(I32, 1))
    rounded = builder.add(size, builder.add(lowest_kept_bit, e.splat(I32, 0x7FFFF)))
    normal = builder.sub(builder.lshr(rounded, e.splat(I32, 20)), e.splat(I32, (127 - 7) << 3))
    # Below 2^-6 the byte counts steps of 2^-9.
    steps = builder.fmul(
        builder.bitcast(size, e.vector_type(F32)), e.splat(F32, math.ldexp(1.0, 9))
    )
    is_subnormal = builder.icmp_signed("<", size, e.splat(I32, (127 - 6) << 23))
    code = builder.or_(sign, builder.select(is_subnormal, _emit_round(e, steps), normal))
    nan_code = builder.or_(
        builder.lshr(builder.bitcast(exact, kind), e.splat(I32, 24)), e.splat(I32, 0x7F)
    )
    return builder.select(builder.fcmp_ordered("ord", exact, exact), code, nan_code)
