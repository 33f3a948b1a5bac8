"""Norm, rotary and gate on a processor with vectors: what `quantforge_kernels.layers` defines, in one pass each.

A step of decoding asks for dozens of operations on a few thousand numbers, each of which costs more
to call than to compute. A program here does what a layer needs between two products: it keeps the
values in registers, rounds wherever the definition does, and sums a row in one fixed order.
"""

from __future__ import annotations

from math import log

import torch
from llvmlite import ir

from quantforge_kernels.cpu.emit import F32, I32, I64, Emitter, Value, add_entry

# Words of the argument, by place, after FIRST, LAST, THREADS and ROWS: addresses, then counts.
X, OTHER, WEIGHT, OUT, TOTAL, VECTORS, SIDE, APART = range(4, 12)  # of `norm`
BIASED, BIAS, BIAS_STRIDE, BIAS_VECTORS = range(4, 8)  # of `bias`
GATE, UP, GATED, GATE_STRIDE, UP_STRIDE, GATE_VECTORS = range(4, 10)  # of `gate`
HEADS, COSINE, SINE, TURNED, STRIDE, COUNT, HALF = range(4, 11)  # of `rotate`

_LOWEST, _HIGHEST = -87.0, 88.0  # whose exponential is a normal number
_TERMS = 7  # of the series of exp on [-ln 2 / 2, ln 2 / 2]: the next one is below 2^-27


def norm(
    dtype: torch.dtype, epsilon: float, offset: float, add: bool, lanes: int, parallel: bool
) -> ir.Module:
    """Build ``norm_run``: `layers.add_norm` of a range of rows.

    Of x, `SIDE` rows lie side by side, and such lots are `APART` bytes apart.
    """
    module = ir.Module()
    e = Emitter(module, "norm", lanes)
    build = e.build
    x, other, weight, out, total = (e.address(place) for place in range(X, VECTORS))
    vectors, side, apart = (e.word(place) for place in (VECTORS, SIDE, APART))
    with e.loop(e.first, e.last) as (row, _):
        start = build.mul(row, vectors)
        lot = build.gep(x, [build.mul(build.udiv(row, side), apart)])
        within = e.scaled(build.mul(build.urem(row, side), vectors), lanes * dtype.itemsize)
        source = build.gep(lot, [within])
        with e.loop(I64(0), vectors, [e.splat(F32, 0.0)]) as (i, squares):
            at = build.add(start, i)
            value = e.load_floats(source, i, dtype)
            if add:
                value = e.rounded(build.fadd(value, e.load_floats(other, at, dtype)), dtype)
                e.store_floats(value, total, at, dtype)
            squares[0] = e.fma(value, value, squares[0])
        count = build.sitofp(e.scaled(vectors, lanes), F32)
        mean = build.fadd(build.fdiv(e.total(squares[0]), count), F32(epsilon))
        inverse = e.spread(build.fdiv(F32(1.0), e.call("llvm.sqrt.f32", F32, mean)))
        with e.loop(I64(0), vectors) as (i, _):
            at = build.add(start, i)
            value = e.load_floats(total, at, dtype) if add else e.load_floats(source, i, dtype)
            value = build.fmul(value, inverse)
            factor = e.load_floats(weight, i, dtype)
            if offset:
                factor = build.fadd(factor, e.splat(F32, offset))
            else:
                value = e.rounded(value, dtype)
            e.store_floats(build.fmul(value, factor), out, at, dtype)
    build.ret_void()
    add_entry(module, "norm", parallel=parallel)
    return module


def bias(dtype: torch.dtype, lanes: int, parallel: bool) -> ir.Module:
    """Build ``bias_run``: add one row to each of a range of rows."""
    module = ir.Module()
    e = Emitter(module, "bias", lanes)
    build = e.build
    with e.loop(e.first, e.last) as (row, _):
        base = build.gep(e.address(BIASED), [build.mul(row, e.word(BIAS_STRIDE))])
        with e.loop(I64(0), e.word(BIAS_VECTORS)) as (i, _):
            value, more = (e.load_floats(values, i, dtype) for values in (base, e.address(BIAS)))
            e.store_floats(build.fadd(value, more), base, i, dtype)
    build.ret_void()
    add_entry(module, "bias", parallel=parallel)
    return module


def gate(dtype: torch.dtype, tanh: bool, lanes: int, parallel: bool) -> ir.Module:
    """Build ``gate_run``: `layers.silu_gate`, or `layers.gelu_gate`, of a range of rows."""
    module = ir.Module()
    e = Emitter(module, "gate", lanes)
    build = e.build
    gates, ups, out = (e.address(place) for place in range(GATE, GATE_STRIDE))
    strides = [e.word(GATE_STRIDE), e.word(UP_STRIDE)]
    vectors = e.word(GATE_VECTORS)
    with e.loop(e.first, e.last) as (row, _):
        bases = [
            build.gep(base, [build.mul(row, stride)])
            for base, stride in zip((gates, ups), strides, strict=True)
        ]
        with e.loop(I64(0), vectors) as (i, _):
            value, up = (e.load_floats(base, i, dtype) for base in bases)
            # gelu's (1 + tanh(z)) / 2 is the sigmoid of 2 z.
            slope = _twice_of_gelu(e, value) if tanh else value
            below = build.fadd(e.splat(F32, 1.0), exponential(e, build.fneg(slope)))
            value = e.rounded(build.fdiv(value, below), dtype)
            e.store_floats(build.fmul(value, up), out, build.add(build.mul(row, vectors), i), dtype)
    build.ret_void()
    add_entry(module, "gate", parallel=parallel)
    return module


def rotate(dtype: torch.dtype, lanes: int, parallel: bool) -> ir.Module:
    """Build ``rotate_run``: `layers.rotate` of a range of tokens, whose heads lie side by side."""
    module = ir.Module()
    e = Emitter(module, "rotate", lanes)
    build = e.build
    heads, cosines, sines, out = (e.address(place) for place in range(HEADS, STRIDE))
    stride, count, half = (e.word(place) for place in (STRIDE, COUNT, HALF))
    with e.loop(e.first, e.last) as (token, _):
        base = build.gep(heads, [build.mul(token, stride)])
        with e.loop(I64(0), count) as (head, _), e.loop(I64(0), half) as (i, _):
            angle = build.add(build.mul(token, half), i)
            cosine, sine = (e.load_floats(values, angle, dtype) for values in (cosines, sines))
            low = build.add(build.mul(e.scaled(head, 2), half), i)
            high = build.add(low, half)
            first, second = (e.load_floats(base, at, dtype) for at in (low, high))

            def product(a: Value, b: Value) -> Value:
                return e.rounded(build.fmul(a, b), dtype)

            turned = (
                build.fsub(product(first, cosine), product(second, sine)),
                build.fadd(product(second, cosine), product(first, sine)),
            )
            row = build.mul(build.mul(token, count), e.scaled(half, 2))
            for value, at in zip(turned, (low, high), strict=True):
                e.store_floats(value, out, build.add(row, at), dtype)
    build.ret_void()
    add_entry(module, "rotate", parallel=parallel)
    return module


def exponential(e: Emitter, value: Value) -> Value:
    """Raise e to the power of every element: 2^n times the series of what is left; 0 below `_LOWEST`."""
    build, kind = e.build, value.type
    clamped = e.call(f"llvm.minnum.v{e.lanes}f32", kind, value, e.splat(F32, _HIGHEST))
    clamped = e.call(f"llvm.maxnum.v{e.lanes}f32", kind, clamped, e.splat(F32, _LOWEST))
    power = build.fmul(clamped, e.splat(F32, 1 / log(2)))
    power = e.call(f"llvm.nearbyint.v{e.lanes}f32", kind, power)
    # ln 2 in two parts, the first so short that its product with n is exact.
    left = e.fma(power, e.splat(F32, -0.693359375), clamped)
    left = e.fma(power, e.splat(F32, 0.693359375 - log(2)), left)
    series = e.splat(F32, 1.0)
    for term in range(_TERMS, 0, -1):
        series = e.fma(build.fmul(series, left), e.splat(F32, 1 / term), e.splat(F32, 1.0))
    exponent = build.add(build.fptosi(power, e.vector(I32)), e.splat(I32, 127))
    scale = build.bitcast(build.shl(exponent, e.splat(I32, 23)), kind)
    result = build.fmul(series, scale)
    result = build.select(
        build.fcmp_ordered("<", value, e.splat(F32, _LOWEST)), e.splat(F32, 0.0), result
    )
    return build.select(build.fcmp_unordered("uno", value, value), value, result)


def _twice_of_gelu(e: Emitter, x: Value) -> Value:
    """Compute ``2 sqrt(2 / pi) (x + 0.044715 x^3)``."""
    build = e.build
    cubic = e.fma(build.fmul(x, x), e.splat(F32, 0.044715), e.splat(F32, 1.0))
    return build.fmul(build.fmul(x, cubic), e.splat(F32, 2 * (2 / torch.pi) ** 0.5))
