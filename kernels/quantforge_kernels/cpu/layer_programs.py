"""CPU programs for norm, bias, rotary and gate, each of which makes one pass over the data.

A decoding step consists of dozens of operations on a few thousand numbers, each of which costs more
to call than to compute. A program does everything that a layer needs between two products: it keeps the
values in registers, rounds where the definitions in `layers` do, and sums a row in a fixed order.
"""

from __future__ import annotations

from math import log

import torch
from llvmlite import ir

from quantforge_kernels.cpu.llvm_emitter import F32, I32, I64, Emitter, Value, add_entry_point

# Words of the argument, by place, after FIRST, LAST, THREADS and ROWS: addresses, then counts.
(
    ARG_X,
    ARG_RESIDUAL,
    ARG_WEIGHT,
    ARG_OUT,
    ARG_TOTAL,
    ARG_VECTORS,
    ARG_HEADS_PER_TOKEN,
    ARG_TOKEN_STRIDE,
) = range(4, 12)  # of `build_add_rms_norm`
ARG_BIASED, ARG_BIAS, ARG_BIAS_STRIDE, ARG_BIAS_VECTORS = range(4, 8)  # of `build_add_bias`
# Arguments of `build_gate`
ARG_GATE, ARG_UP, ARG_GATED, ARG_GATE_STRIDE, ARG_UP_STRIDE, ARG_GATE_VECTORS = range(4, 10)
ARG_HEADS, ARG_COSINE, ARG_SINE, ARG_ROTATED, ARG_STRIDE, ARG_HEAD_COUNT, ARG_HALF_VECTORS = range(
    4, 11
)  # of `build_rotary`

_MIN_EXPONENT, _MAX_EXPONENT = -87.0, 88.0  # whose exponential is a normal number
_SERIES_TERMS = 7  # of the series of exp on [-ln 2 / 2, ln 2 / 2]: the next one is below 2^-27


def build_add_rms_norm(
    dtype: torch.dtype, epsilon: float, offset: float, add: bool, lanes: int, parallel: bool
) -> ir.Module:
    """Build ``norm_run``: `layers.add_rms_norm` of a range of rows.

    `ARG_HEADS_PER_TOKEN` rows of x are contiguous, and tokens are `ARG_TOKEN_STRIDE` bytes apart.
    """
    module = ir.Module()
    e = Emitter(module, "norm", lanes)
    builder = e.builder
    x, residual, weight, out, hidden = (
        e.load_address(argument) for argument in range(ARG_X, ARG_VECTORS)
    )
    vectors, heads_per_token, token_stride = (
        e.load_word(argument) for argument in (ARG_VECTORS, ARG_HEADS_PER_TOKEN, ARG_TOKEN_STRIDE)
    )
    with e.loop(e.first, e.last) as (row, _):
        start = builder.mul(row, vectors)
        token_base = builder.gep(x, [builder.mul(builder.udiv(row, heads_per_token), token_stride)])
        head_offset = e.scale_index(
            builder.mul(builder.urem(row, heads_per_token), vectors), lanes * dtype.itemsize
        )
        source = builder.gep(token_base, [head_offset])
        with e.loop(I64(0), vectors, [e.splat(F32, 0.0)]) as (i, squares):
            position = builder.add(start, i)
            value = e.load_floats(source, i, dtype)
            if add:
                value = e.round_to(
                    builder.fadd(value, e.load_floats(residual, position, dtype)), dtype
                )
                e.store_floats(value, hidden, position, dtype)
            squares[0] = e.fma(value, value, squares[0])
        head_count = builder.sitofp(e.scale_index(vectors, lanes), F32)
        mean = builder.fadd(builder.fdiv(e.sum_lanes(squares[0]), head_count), F32(epsilon))
        inverse = e.broadcast(builder.fdiv(F32(1.0), e.call_intrinsic("llvm.sqrt.f32", F32, mean)))
        with e.loop(I64(0), vectors) as (i, _):
            position = builder.add(start, i)
            value = (
                e.load_floats(hidden, position, dtype) if add else e.load_floats(source, i, dtype)
            )
            value = builder.fmul(value, inverse)
            factor = e.load_floats(weight, i, dtype)
            if offset:
                factor = builder.fadd(factor, e.splat(F32, offset))
            else:
                value = e.round_to(value, dtype)
            e.store_floats(builder.fmul(value, factor), out, position, dtype)
    builder.ret_void()
    add_entry_point(module, "norm", parallel=parallel)
    return module


def build_add_bias(dtype: torch.dtype, lanes: int, parallel: bool) -> ir.Module:
    """Build ``bias_run``, which adds a bias to each of a range of rows."""
    module = ir.Module()
    e = Emitter(module, "bias", lanes)
    builder = e.builder
    with e.loop(e.first, e.last) as (row, _):
        base = builder.gep(
            e.load_address(ARG_BIASED), [builder.mul(row, e.load_word(ARG_BIAS_STRIDE))]
        )
        with e.loop(I64(0), e.load_word(ARG_BIAS_VECTORS)) as (i, _):
            value, addend = (
                e.load_floats(values, i, dtype) for values in (base, e.load_address(ARG_BIAS))
            )
            e.store_floats(builder.fadd(value, addend), base, i, dtype)
    builder.ret_void()
    add_entry_point(module, "bias", parallel=parallel)
    return module


def build_gate(dtype: torch.dtype, tanh: bool, lanes: int, parallel: bool) -> ir.Module:
    """Build ``gate_run``: `layers.silu_gate`, or `layers.gelu_gate` if ``tanh``, of a range of rows."""
    module = ir.Module()
    e = Emitter(module, "gate", lanes)
    builder = e.builder
    gate_rows, up_rows, out = (
        e.load_address(argument) for argument in range(ARG_GATE, ARG_GATE_STRIDE)
    )
    strides = [e.load_word(ARG_GATE_STRIDE), e.load_word(ARG_UP_STRIDE)]
    vectors = e.load_word(ARG_GATE_VECTORS)
    with e.loop(e.first, e.last) as (row, _):
        bases = [
            builder.gep(base, [builder.mul(row, stride)])
            for base, stride in zip((gate_rows, up_rows), strides, strict=True)
        ]
        with e.loop(I64(0), vectors) as (i, _):
            value, up = (e.load_floats(base, i, dtype) for base in bases)
            # gelu's (1 + tanh(z)) / 2 is the sigmoid of 2 z.
            sigmoid_input = _emit_gelu_argument(e, value) if tanh else value
            denominator = builder.fadd(e.splat(F32, 1.0), emit_exp(e, builder.fneg(sigmoid_input)))
            value = e.round_to(builder.fdiv(value, denominator), dtype)
            e.store_floats(
                builder.fmul(value, up), out, builder.add(builder.mul(row, vectors), i), dtype
            )
    builder.ret_void()
    add_entry_point(module, "gate", parallel=parallel)
    return module


def build_rotary(dtype: torch.dtype, lanes: int, parallel: bool) -> ir.Module:
    """Build ``rotate_run``: `layers.apply_rotary` of a range of tokens with contiguous heads."""
    module = ir.Module()
    e = Emitter(module, "rotate", lanes)
    builder = e.builder
    heads, cosines, sines, out = (
        e.load_address(argument) for argument in range(ARG_HEADS, ARG_STRIDE)
    )
    stride, head_count, half_vectors = (
        e.load_word(argument) for argument in (ARG_STRIDE, ARG_HEAD_COUNT, ARG_HALF_VECTORS)
    )
    with e.loop(e.first, e.last) as (token, _):
        base = builder.gep(heads, [builder.mul(token, stride)])
        with e.loop(I64(0), head_count) as (head, _), e.loop(I64(0), half_vectors) as (i, _):
            angle = builder.add(builder.mul(token, half_vectors), i)
            cosine, sine = (e.load_floats(values, angle, dtype) for values in (cosines, sines))
            low = builder.add(builder.mul(e.scale_index(head, 2), half_vectors), i)
            high = builder.add(low, half_vectors)
            first, second = (e.load_floats(base, position, dtype) for position in (low, high))

            def product(a: Value, b: Value) -> Value:
                return e.round_to(builder.fmul(a, b), dtype)

            rotated = (
                builder.fsub(product(first, cosine), product(second, sine)),
                builder.fadd(product(second, cosine), product(first, sine)),
            )
            row = builder.mul(builder.mul(token, head_count), e.scale_index(half_vectors, 2))
            for value, position in zip(rotated, (low, high), strict=True):
                e.store_floats(value, out, builder.add(row, position), dtype)
    builder.ret_void()
    add_entry_point(module, "rotate", parallel=parallel)
    return module


def emit_exp(e: Emitter, value: Value) -> Value:
    """Write code for ``exp(value)``: 2^n times the series of the remainder; 0 below `_MIN_EXPONENT`."""
    builder, kind = e.builder, value.type
    clamped = e.call_intrinsic(
        f"llvm.minnum.v{e.lanes}f32", kind, value, e.splat(F32, _MAX_EXPONENT)
    )
    clamped = e.call_intrinsic(
        f"llvm.maxnum.v{e.lanes}f32", kind, clamped, e.splat(F32, _MIN_EXPONENT)
    )
    exponent_float = builder.fmul(clamped, e.splat(F32, 1 / log(2)))
    exponent_float = e.call_intrinsic(f"llvm.nearbyint.v{e.lanes}f32", kind, exponent_float)
    # ln 2 in two parts, the first so short that its product with n is exact.
    remainder = e.fma(exponent_float, e.splat(F32, -0.693359375), clamped)
    remainder = e.fma(exponent_float, e.splat(F32, 0.693359375 - log(2)), remainder)
    series = e.splat(F32, 1.0)
    for term in range(_SERIES_TERMS, 0, -1):
        series = e.fma(builder.fmul(series, remainder), e.splat(F32, 1 / term), e.splat(F32, 1.0))
    exponent = builder.add(builder.fptosi(exponent_float, e.vector_type(I32)), e.splat(I32, 127))
    scale = builder.bitcast(builder.shl(exponent, e.splat(I32, 23)), kind)
    result = builder.fmul(series, scale)
    result = builder.select(
        builder.fcmp_ordered("<", value, e.splat(F32, _MIN_EXPONENT)), e.splat(F32, 0.0), result
    )
    return builder.select(builder.fcmp_unordered("uno", value, value), value, result)


def _emit_gelu_argument(e: Emitter, x: Value) -> Value:
    """Write code for ``2 sqrt(2 / pi) (x + 0.044715 x^3)``."""
    builder = e.builder
    cubic = e.fma(builder.fmul(x, x), e.splat(F32, 0.044715), e.splat(F32, 1.0))
    return builder.fmul(builder.fmul(x, cubic), e.splat(F32, 2 * (2 / torch.pi) ** 0.5))
