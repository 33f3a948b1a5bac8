"""Support for loops compiled by numba: options, and a vector type of eight float32 values.

Compiled loops must give the same bits on every processor, so no sum is reordered and no multiplication is fused with an
addition. LLVM then leaves short loops, loops with odd counts and searches for a minimum as scalar code. `Float8Vector`
is a vector of eight float32: each operation is one vector instruction (several where vectors are shorter), and each
lane is rounded like a single float.

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
internal_jit: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(
    no_cpython_wrapper=True, **_OPTIONS
)
# For functions that neither create nor return arrays: counting references would take most of a short loop's time, and
# so would passing arrays, seven words each. They are inlined into their callers, which own the arrays.
inlined_jit: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(
    no_cpython_wrapper=True, _nrt=False, forceinline=True, **_OPTIONS
)


@inlined_jit
def fill(array, value):  # type: ignore[no-untyped-def]
    """Set all elements to ``value``."""
    for i in range(len(array)):
        array[i] = value


@inlined_jit
def copy(array, source):  # type: ignore[no-untyped-def]
    """Set all elements to those of ``source``."""
    for i in range(len(array)):
        array[i] = source[i]


LANES = 8
LANE_INDICES = numpy.arange(LANES, dtype=numpy.float32)
MAX_FLOAT32 = numpy.float32(3.4028234663852886e38)
_WORD = ir.IntType(32)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_INT_VECTOR, _BYTE_VECTOR = ir.VectorType(_WORD, LANES), ir.VectorType(ir.IntType(8), LANES)


class Float8Vector(types.Type):  # type: ignore[misc]
    """Numba type of a vector of eight float32."""

    def __init__(self) -> None:
        super().__init__(name="Eight")


FLOAT8_VECTOR = Float8Vector()


@register_model(Float8Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, type_: Any) -> None:
        super().__init__(manager, type_, _VECTOR)


def _address(
    context: Any, build: Any, array_type: Any, array: Any, index: Any, pointed_type: Any
) -> Any:
    data = make_array(array_type)(context, build, array).data
    return build.bitcast(build.gep(data, [index]), pointed_type.as_pointer())


@intrinsic
def load(typing, array, index):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return 8 values of a contiguous float32 or int8 ``array`` starting at ``index``, without a bounds check."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]
        array_type, (array, index) = signature.args[0], arguments
        if array_type.dtype == types.int8:
            pointer = _address(context, build, array_type, array, index, _BYTE_VECTOR)
            return build.sitofp(build.sext(build.load(pointer, align=1), _INT_VECTOR), _VECTOR)
        pointer = _address(context, build, array_type, array, index, _VECTOR)
        return build.load(pointer, align=4)

    return FLOAT8_VECTOR(array, types.intp), generate


@intrinsic
def store(typing, array, index, value):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Write ``value`` to ``array`` starting at ``index``."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]
        array, index, value = arguments
        pointer = _address(context, build, signature.args[0], array, index, _VECTOR)
        build.store(value, pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, FLOAT8_VECTOR), generate


@intrinsic
def load_column(typing, array, index):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return 8 values of ``array`` starting at ``index``, with a stride of 8."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]
        data = make_array(signature.args[0])(context, build, arguments[0]).data
        vector = ir.Constant(_VECTOR, ir.Undefined)
        for lane in range(LANES):
            stride = ir.Constant(arguments[1].type, LANES * lane)
            value = build.load(build.gep(data, [build.add(arguments[1], stride)]))
            vector = build.insert_element(vector, value, ir.Constant(_WORD, lane))
        return vector

    return FLOAT8_VECTOR(array, types.intp), generate


def _shuffle(build: Any, value: Any, lanes: list[int]) -> Any:
    undefined = ir.Constant(value.type, ir.Undefined)
    mask = ir.Constant(ir.VectorType(_WORD, len(lanes)), list(lanes))
    return build.shuffle_vector(value, undefined, mask)


@intrinsic
def broadcast(typing, value):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Broadcast the float32 ``value`` to all lanes."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        first_lane = build.insert_element(undefined, arguments[0], ir.Constant(_WORD, 0))
        return _shuffle(build, first_lane, [0] * LANES)

    return FLOAT8_VECTOR(types.float32), generate


def _register_operator(name: str, *operators: Callable[[Any, Any], Any]) -> None:
    """Compile operators between two `Float8Vector` to one LLVM instruction."""

    @intrinsic
    def apply(typing, left, right):  # type: ignore[no-untyped-def]  # noqa: ARG001
        def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
            return getattr(build, name)(*arguments)

        return FLOAT8_VECTOR(FLOAT8_VECTOR, FLOAT8_VECTOR), generate

    def typed(left, right):  # type: ignore[no-untyped-def]
        are_vectors = left is FLOAT8_VECTOR and right is FLOAT8_VECTOR
        return (lambda left, right: apply(left, right)) if are_vectors else None  # noqa: PLW0108

    for op in operators:
        overload(op)(typed)


_register_operator("fadd", operator.add, operator.iadd)
_register_operator("fsub", operator.sub)
_register_operator("fmul", operator.mul)
_register_operator("fdiv", operator.truediv)


@intrinsic
def multiply_add(typing, left, right, addend):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return ``left * right + addend``, rounded once or twice depending on the processor: use only for bounds."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        signature_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        name = f"llvm.fmuladd.v{LANES}f32"
        return build.call(build.module.declare_intrinsic(name, (), signature_type), arguments)

    return FLOAT8_VECTOR(FLOAT8_VECTOR, FLOAT8_VECTOR, FLOAT8_VECTOR), generate


@intrinsic
def select_if_less(typing, left, right, if_less, otherwise):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Select the lanes of ``if_less`` where ``left < right``, else those of ``otherwise``."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        left, right, if_less, otherwise = arguments
        return build.select(build.fcmp_ordered("<", left, right), if_less, otherwise)

    return FLOAT8_VECTOR(FLOAT8_VECTOR, FLOAT8_VECTOR, FLOAT8_VECTOR, FLOAT8_VECTOR), generate


@intrinsic
def vector_min(typing, left, right):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the smaller value of each pair of lanes; the second one if a value is NaN."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return build.select(build.fcmp_ordered("<", *arguments), *arguments)

    return FLOAT8_VECTOR(FLOAT8_VECTOR, FLOAT8_VECTOR), generate


@intrinsic
def vector_max(typing, left, right):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the greater value of each pair of lanes; the second one if a value is NaN."""

    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return build.select(build.fcmp_ordered(">", *arguments), *arguments)

    return FLOAT8_VECTOR(FLOAT8_VECTOR, FLOAT8_VECTOR), generate


def _compare_mask(comparison: str) -> Any:
    def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
        mask = build.bitcast(build.fcmp_ordered(comparison, *arguments), ir.IntType(LANES))
        return build.zext(mask, ir.IntType(64))

    return types.int64(FLOAT8_VECTOR, FLOAT8_VECTOR), generate


@intrinsic
def less_mask(typing, left, right):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return a bit mask: bit ``i`` is set if ``left < right`` in lane ``i``."""
    return _compare_mask("<")


@intrinsic
def differ_mask(typing, left, right):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return a bit mask: bit ``i`` is set if ``left != right`` in lane ``i``."""
    return _compare_mask("!=")


def _make_reduction(name: str, comparison: str) -> Any:
    def reduce(typing, value):  # type: ignore[no-untyped-def]  # noqa: ARG001
        def generate(context, build, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ARG001
            (vector,) = arguments
            for distance in (4, 2, 1):
                shuffled = _shuffle(build, vector, [lane ^ distance for lane in range(LANES)])
                if comparison == "+":
                    vector = build.fadd(vector, shuffled)
                else:
                    vector = build.select(
                        build.fcmp_ordered(comparison, vector, shuffled), vector, shuffled
                    )
            return build.extract_element(vector, ir.Constant(_WORD, 0))

        return types.float32(FLOAT8_VECTOR), generate

    reduce.__name__ = name
    return intrinsic(reduce)


lane_min = _make_reduction("lane_min", "<")
lane_max = _make_reduction("lane_max", ">")
lane_sum = _make_reduction("lane_sum", "+")


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
        (bits_value,) = arguments
        leading_zeros = build.ctlz(bits_value, ir.Constant(ir.IntType(1), 1))
        return build.sub(ir.Constant(bits_value.type, 63), leading_zeros)

    return types.int64(types.int64), generate


@inlined_jit
def argmin_lane(keys, values):  # type: ignore[no-untyped-def]
    """Return the smallest of ``values`` among the lanes with the smallest ``keys``, and that smallest key."""
    min_key = lane_min(keys)
    return int(
        lane_min(select_if_less(broadcast(min_key), keys, broadcast(MAX_FLOAT32), values))
    ), min_key
