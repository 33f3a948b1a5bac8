"""Support for loops compiled by numba: options, and a vector type of eight float32 values.

Compiled loops must give the same bits on every processor, so no sum is reordered and no multiplication is fused with
an addition. LLVM then leaves short loops, loops with odd counts and searches for a minimum as scalar code. `Eight` is a
vector of eight float32: each operation is one vector instruction (several where vectors are shorter), and each lane is
rounded like a single float.

Import this module inside functions: numba takes a moment to import, and each loop is compiled at its first call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numba
import numpy
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model
from numba.np.arrayobj import make_array

_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
jit: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(**_OPTIONS)
inner: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(
    no_cpython_wrapper=True, **_OPTIONS
)
# For functions that neither create nor return arrays: counting references would take most of a short loop's time, and
# so would passing arrays, seven words each. They are inlined into their callers, which own the arrays.
borrowing: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(
    no_cpython_wrapper=True, _nrt=False, forceinline=True, **_OPTIONS
)


@borrowing
def fill(array, value):  # type: ignore[no-untyped-def]
    """Set all elements to ``value``."""
    for i in range(len(array)):
        array[i] = value


@borrowing
def copy(array, source):  # type: ignore[no-untyped-def]
    """Set all elements to those of ``source``."""
    for i in range(len(array)):
        array[i] = source[i]


LANES = 8
LANE_NUMBERS = numpy.arange(LANES, dtype=numpy.float32)
LARGEST = numpy.float32(3.4028234663852886e38)
_WORD = ir.IntType(32)
_WHOLE = ir.VectorType(ir.FloatType(), LANES)
_PLACES, _BYTES = ir.VectorType(_WORD, LANES), ir.VectorType(ir.IntType(8), LANES)


class Eight(types.Type):  # type: ignore[misc]
    """Numba type of a vector of eight float32."""

    def __init__(self) -> None:
        super().__init__(name="Eight")


EIGHT = Eight()


@register_model(Eight)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _WHOLE)


def _address(context: Any, build: Any, kind: Any, array: Any, place: Any, whole: Any) -> Any:
    data = make_array(kind)(context, build, array).data
    return build.bitcast(build.gep(data, [place]), whole.as_pointer())


@intrinsic
def load(typing, array, place):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return 8 values of a contiguous float32 or int8 ``array`` starting at ``place``, without a bounds check."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]
        kind, (array, place) = signature.args[0], arguments
        if kind.dtype == types.int8:
            where = _address(context, build, kind, array, place, _BYTES)
            return build.sitofp(build.sext(build.load(where, align=1), _PLACES), _WHOLE)
        where = _address(context, build, kind, array, place, _WHOLE)
        return build.load(where, align=4)

    return EIGHT(array, types.intp), generate


@intrinsic
def store(typing, array, place, value):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Write ``value`` to ``array`` starting at ``place``."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]
        array, place, value = arguments
        where = _address(context, build, signature.args[0], array, place, _WHOLE)
        build.store(value, where, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, EIGHT), generate


@intrinsic
def column(typing, array, place):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return 8 values of ``array`` starting at ``place``, with a stride of 8."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]
        data = make_array(signature.args[0])(context, build, arguments[0]).data
        found = ir.Constant(_WHOLE, ir.Undefined)
        for lane in range(LANES):
            distance = ir.Constant(arguments[1].type, LANES * lane)
            value = build.load(build.gep(data, [build.add(arguments[1], distance)]))
            found = build.insert_element(found, value, ir.Constant(_WORD, lane))
        return found

    return EIGHT(array, types.intp), generate


def _shuffled(build: Any, value: Any, places: list[int]) -> Any:
    undefined = ir.Constant(value.type, ir.Undefined)
    mask = ir.Constant(ir.VectorType(_WORD, len(places)), list(places))
    return build.shuffle_vector(value, undefined, mask)


@intrinsic
def spread(typing, value):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Broadcast the float32 ``value`` to all lanes."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        empty = ir.Constant(_WHOLE, ir.Undefined)
        one = build.insert_element(empty, arguments[0], ir.Constant(_WORD, 0))
        return _shuffled(build, one, [0] * LANES)

    return EIGHT(types.float32), generate


def _operation(name: str, *signs: Callable[[Any, Any], Any]) -> None:
    """Compile operators between two `Eight` to one LLVM instruction."""

    @intrinsic
    def apply(typing, one, other):  # type: ignore[no-untyped-def]  # noqa: ARG001
        def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
            return getattr(build, name)(*arguments)

        return EIGHT(EIGHT, EIGHT), generate

    def typed(one, other):  # type: ignore[no-untyped-def]
        both = one is EIGHT and other is EIGHT
        return (lambda one, other: apply(one, other)) if both else None  # noqa: PLW0108

    for sign in signs:
        overload(sign)(typed)


_operation("fadd", operator.add, operator.iadd)
_operation("fsub", operator.sub)
_operation("fmul", operator.mul)
_operation("fdiv", operator.truediv)


@intrinsic
def fused(typing, one, other, added):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return ``one * other + added``, rounded once or twice depending on the processor: only for bounds."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        kind = ir.FunctionType(_WHOLE, [_WHOLE] * 3)
        name = f"llvm.fmuladd.v{LANES}f32"
        return build.call(build.module.declare_intrinsic(name, (), kind), arguments)

    return EIGHT(EIGHT, EIGHT, EIGHT), generate


@intrinsic
def pick(typing, one, other, where, elsewhere):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Select lanes of ``where`` if ``one < other``, else of ``elsewhere``."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        one, other, where, elsewhere = arguments
        return build.select(build.fcmp_ordered("<", one, other), where, elsewhere)

    return EIGHT(EIGHT, EIGHT, EIGHT, EIGHT), generate


@intrinsic
def lesser(typing, one, other):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the smaller value of each pair of lanes; the second one if a value is NaN."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return build.select(build.fcmp_ordered("<", *arguments), *arguments)

    return EIGHT(EIGHT, EIGHT), generate


@intrinsic
def greater(typing, one, other):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the greater value of each pair of lanes; the second one if a value is NaN."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return build.select(build.fcmp_ordered(">", *arguments), *arguments)

    return EIGHT(EIGHT, EIGHT), generate


def _bits(sign: str) -> Any:
    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        found = build.bitcast(build.fcmp_ordered(sign, *arguments), ir.IntType(LANES))
        return build.zext(found, ir.IntType(64))

    return types.int64(EIGHT, EIGHT), generate


@intrinsic
def below(typing, one, other):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return a bit mask: bit ``i`` is set if ``one < other`` in lane ``i``."""
    return _bits("<")


@intrinsic
def differing(typing, one, other):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return a bit mask: bit ``i`` is set if ``one != other`` in lane ``i``."""
    return _bits("!=")


def _folded(name: str, sign: str) -> Any:
    def reduce(typing, value):  # type: ignore[no-untyped-def]  # noqa: ARG001
        def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
            (part,) = arguments
            for distance in (4, 2, 1):
                other = _shuffled(build, part, [lane ^ distance for lane in range(LANES)])
                if sign == "+":
                    part = build.fadd(part, other)
                else:
                    part = build.select(build.fcmp_ordered(sign, part, other), part, other)
            return build.extract_element(part, ir.Constant(_WORD, 0))

        return types.float32(EIGHT), generate

    reduce.__name__ = name
    return intrinsic(reduce)


lane_min = _folded("lane_min", "<")
lane_max = _folded("lane_max", ">")
lane_sum = _folded("lane_sum", "+")


@intrinsic
def first_bit(typing, bits):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the index of the lowest set bit of ``bits``, which must not be 0."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return build.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@intrinsic
def last_bit(typing, bits):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the index of the highest set bit of ``bits``, which must not be 0."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        (given,) = arguments
        above = build.ctlz(given, ir.Constant(ir.IntType(1), 1))
        return build.sub(ir.Constant(given.type, 63), above)

    return types.int64(types.int64), generate


@borrowing
def first_of(best, found):  # type: ignore[no-untyped-def]
    """Return the smallest ``found`` among the lanes with the smallest ``best``, and that smallest value."""
    value = lane_min(best)
    return int(lane_min(pick(spread(value), best, spread(LARGEST), found))), value
