"""Eight float32 as one value in loops that numba compiles, each operation one instruction on the whole.

LLVM makes scalar code of loops with few or odd numbers of rounds, and of those that look for a minimum. Lanes are
rounded as single floats are, on every processor; where vectors are shorter LLVM splits them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model
from numba.np.arrayobj import make_array

LANES = 8
_WORD = ir.IntType(32)
_WHOLE = ir.VectorType(ir.FloatType(), LANES)
_PLACES, _BYTES = ir.VectorType(_WORD, LANES), ir.VectorType(ir.IntType(8), LANES)


class Eight(types.Type):  # type: ignore[misc]
    """The type of such a value for numba."""

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
    """Return 8 values of a contiguous float32 or int8 ``array`` from ``place`` on; nobody looks if it has them."""

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
    """Write ``value`` into ``array`` from ``place`` on."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]
        array, place, value = arguments
        where = _address(context, build, signature.args[0], array, place, _WHOLE)
        build.store(value, where, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, EIGHT), generate


@intrinsic
def column(typing, array, place):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return 8 values of ``array``, the first at ``place`` and each 8 after the one before."""

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
    """Return 8 times the float32 ``value``."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        empty = ir.Constant(_WHOLE, ir.Undefined)
        one = build.insert_element(empty, arguments[0], ir.Constant(_WORD, 0))
        return _shuffled(build, one, [0] * LANES)

    return EIGHT(types.float32), generate


def _operation(name: str, *signs: Callable[[Any, Any], Any]) -> None:
    """Give numba an instruction of LLVM for operators between two of them."""

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
    """Return ``one * other + added``, rounded once where the processor can, else twice: for bounds alone."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        kind = ir.FunctionType(_WHOLE, [_WHOLE] * 3)
        name = f"llvm.fmuladd.v{LANES}f32"
        return build.call(build.module.declare_intrinsic(name, (), kind), arguments)

    return EIGHT(EIGHT, EIGHT, EIGHT), generate


@intrinsic
def pick(typing, one, other, where, elsewhere):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the lanes of ``where`` where ``one < other``, else those of ``elsewhere``."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        one, other, where, elsewhere = arguments
        return build.select(build.fcmp_ordered("<", one, other), where, elsewhere)

    return EIGHT(EIGHT, EIGHT, EIGHT, EIGHT), generate


@intrinsic
def lesser(typing, one, other):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the lesser of each pair of lanes, and of a pair with NaN the second."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return build.select(build.fcmp_ordered("<", *arguments), *arguments)

    return EIGHT(EIGHT, EIGHT), generate


@intrinsic
def greater(typing, one, other):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the greater of each pair of lanes, and of a pair with NaN the second."""

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
    """Return an integer: bit ``i`` is set where ``one < other`` in lane ``i``."""
    return _bits("<")


@intrinsic
def differing(typing, one, other):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return an integer: bit ``i`` is set where ``one != other`` in lane ``i``."""
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


least = _folded("least", "<")
most = _folded("most", ">")
total = _folded("total", "+")


@intrinsic
def first_bit(typing, bits):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the place of the lowest bit of ``bits``, which is not 0."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return build.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@intrinsic
def last_bit(typing, bits):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the place of the highest bit of ``bits``, which is not 0."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        (given,) = arguments
        above = build.ctlz(given, ir.Constant(ir.IntType(1), 1))
        return build.sub(ir.Constant(given.type, 63), above)

    return types.int64(types.int64), generate
