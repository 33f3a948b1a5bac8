"""CPU programs for packed integers: plain products, grouped products, and decoding.

`build_multiply` multiplies packed integers by rounded activations, with one output row per lane of a vector.
A row of activations is cut into blocks, and each block is rounded to 16-bit integers with its own scale: an error of
at most ``max|x| / 65534`` of its block, a hundredth of the error of bfloat16; with 8-bit integers,
``max|x| / 254``. Codes are integers too, so that the sum over a block is exact in 32 bits:

    y_n = sum over blocks of  s_n (sum code x - zero_n sum x) x_scale - minimum_n sum x

One instruction multiplies two or four columns of every row by the same activations (`Int16Accumulator`,
`Int8Accumulator`). The layout (`lane_layout`) is such that a mask, or a shift and a mask, extracts these codes in place
(`IntegerWeightLoader`). Nothing is summed across lanes, and the order of all sums is fixed. docs/cpu-programs.md
explains it step by step. `build_grouped_multiply` multiplies pairs of a row and one of several matrices in the same
way; `build_decode` writes weights in the type of activations, for products of many rows by torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce

from llvmlite import ir

from quantforge_kernels.cpu.lane_layout import (
    ARG_COLUMNS,
    ARG_EXPERTS,
    ARG_GROUPS,
    ARG_OUT,
    ARG_PARAMETERS,
    ARG_PLANES,
    ARG_STRIP,
    ARG_TILES,
    ARG_TOP_K,
    ARG_UNITS_PER_ROW,
    ARG_X,
    ARG_X_CODES,
    ARG_X_SCALES,
    ARG_X_SUMS,
    FEW_ROWS,
    PARAM_NAMES,
    ProgramSpec,
    locate_pair,
    paired_order,
    words_per_row,
)
from quantforge_kernels.cpu.llvm_emitter import (
    ARG_ROWS,
    F32,
    I8,
    I16,
    I32,
    I64,
    Emitter,
    Value,
    add_dynamic_entry_point,
    add_entry_point,
)
from quantforge_kernels.matmul_spec import LOWER_LEVEL_PARAMS

MIN_PEAK = 1e-30  # activations of a block without a larger one are 0
MAX_ROUNDED = {16: 32767.0, 8: 127.0}  # of a rounded activation, by its bits
PREFETCH_BYTES = 4096  # bytes that are fetched before they are needed
_PAIR_INSTRUCTIONS = {
    "avx512vnni": "llvm.x86.avx512.vpdpwssd.512",
    "avx512bw": "llvm.x86.avx512.pmaddw.d.512",
    "avx2": "llvm.x86.avx2.pmadd.wd",
}
_SUPERBLOCK_PARAMS = {"scales": "d", "mins": "dmin"}  # the upper level


def build_multiply(spec: ProgramSpec, parallel: bool) -> ir.Module:
    """Build ``multiply_run``, which rounds all rows of x and multiplies tiles by them: out ``[rows, tiles, lanes]``.

    The range counts the tiles of every strip of `ARG_STRIP` rows, so that threads share both. Within a strip, rows are
    multiplied in groups of `ProgramSpec.shared_rows`.
    """
    module = ir.Module()
    add_quantize_function(module, spec)
    e = Emitter(module, "multiply", spec.blocks.lanes)
    builder = e.builder
    weights = IntegerWeightLoader(e, spec)
    out, rows, width, strip = (
        e.load_address(ARG_OUT),
        e.load_word(ARG_ROWS),
        e.load_word(ARG_TILES),
        e.load_word(ARG_STRIP),
    )
    x = (e.load_address(ARG_X_CODES), e.load_address(ARG_X_SCALES), e.load_address(ARG_X_SUMS))
    with e.loop(e.first, e.last) as (position, _):
        tile = builder.urem(position, width)
        start = builder.mul(builder.udiv(position, width), strip)
        stop = builder.add(start, strip)
        stop = builder.select(builder.icmp_unsigned("<", stop, rows), stop, rows)
        groups = [builder.udiv(row, I64(spec.shared_rows)) for row in (start, stop)]
        with e.loop(*groups) as (group, _):
            totals = emit_tile_products(e, spec, weights, (tile, group), x)
            for r in range(spec.shared_rows):
                offset = builder.add(
                    builder.mul(e.scale_index(group, spec.shared_rows, r), width), tile
                )
                offset = e.scale_index(offset, spec.dtype.itemsize * e.lanes)
                e.store(e.from_float32(totals[r], spec.dtype), out, offset)
    builder.ret_void()
    if spec.shared_rows > FEW_ROWS:
        add_dynamic_entry_point(module, "multiply", prologue="quantize", parallel=parallel)
    else:
        add_entry_point(module, "multiply", prologue="quantize", parallel=parallel)
    return module


def build_grouped_multiply(spec: ProgramSpec, parallel: bool) -> ir.Module:
    """Build ``grouped_run``, which rounds all rows of x and multiplies each pair of a row and an expert.

    Out is ``[pairs, tiles, lanes]``. The range counts the tiles of all pairs: tile ``i`` belongs to pair ``i / tiles``.
    A pair is multiplied like a row by a single matrix; the matrices are stacked, each with the same number of tiles
    (`quantforge_kernels.grouped`).
    """
    module = ir.Module()
    add_quantize_function(module, spec)
    e = Emitter(module, "grouped", spec.blocks.lanes)
    builder = e.builder
    weights = IntegerWeightLoader(e, spec)
    out, tiles, codes_per_word, owners = (
        e.load_address(ARG_OUT),
        e.load_word(ARG_TILES),
        e.load_word(ARG_TOP_K),
        e.load_address(ARG_EXPERTS),
    )
    x = (e.load_address(ARG_X_CODES), e.load_address(ARG_X_SCALES), e.load_address(ARG_X_SUMS))
    with e.loop(e.first, e.last) as (position, _):
        pair = builder.udiv(position, tiles)
        owner = builder.sext(e.load(owners, e.scale_index(pair, 4), I32), I64)
        tile = builder.add(builder.mul(owner, tiles), builder.urem(position, tiles))
        totals = emit_tile_products(e, spec, weights, (tile, builder.udiv(pair, codes_per_word)), x)
        e.store(
            e.from_float32(totals[0], spec.dtype),
            out,
            e.scale_index(position, spec.dtype.itemsize * e.lanes),
        )
    builder.ret_void()
    add_entry_point(module, "grouped", prologue="quantize", parallel=parallel)
    return module


def build_decode(spec: ProgramSpec, parallel: bool) -> ir.Module:
    """Build ``decode_run``, which decodes a range of tiles to ``[columns, tiles, lanes]``: the transposed weight."""
    module = ir.Module()
    e = Emitter(module, "decode", spec.blocks.lanes)
    builder, blocks = e.builder, spec.blocks
    weights = IntegerWeightLoader(e, spec)
    out, tiles = e.load_address(ARG_OUT), e.load_word(ARG_TILES)
    with e.loop(e.first, e.last) as (tile, _), e.loop(I64(0), weights.units) as (unit, _):
        codes = [pair for _, pair in weights.load_codes(tile, unit, prefetch=False)]
        half_bits, low_mask = e.splat(I32, 16), e.splat(I32, 0xFFFF)
        for i in range(blocks.unit_columns // blocks.block_columns):
            scale = weights.load_parameter("scales", tile, unit, i)
            shift = (
                None
                if spec.zero_kind == "centre"
                else weights.load_parameter(spec.zero_kind, tile, unit, i)
            )
            for column in range(i * blocks.block_columns, (i + 1) * blocks.block_columns):
                pair_index, is_high_half = locate_pair(column)
                pair = builder.bitcast(codes[pair_index], e.vector_type(I32))
                code = (
                    builder.lshr(pair, half_bits) if is_high_half else builder.and_(pair, low_mask)
                )
                value = builder.sitofp(code, e.vector_type(F32))
                if spec.zero_kind == "centre":
                    value = builder.fsub(value, e.splat(F32, spec.center_code))
                elif spec.zero_kind == "zeros":
                    value = builder.fsub(value, shift)
                value = builder.fmul(value, scale)
                if spec.zero_kind == "mins":
                    value = builder.fsub(value, shift)
                offset = builder.mul(e.scale_index(unit, blocks.unit_columns, column), tiles)
                offset = e.scale_index(builder.add(offset, tile), spec.dtype.itemsize * e.lanes)
                e.store(e.from_float32(value, spec.dtype), out, offset)
    builder.ret_void()
    add_entry_point(module, "decode", parallel=parallel)
    return module


def add_quantize_function(module: ir.Module, spec: ProgramSpec) -> None:
    """Add the function ``quantize`` to the module, which rounds rows ``[first, last)`` of x.

    The result for each group of `ProgramSpec.shared_rows` rows is: codes ``[units, rows, unit_columns]``, in the order
    of columns in words (`lane_layout`), and scales and sums ``[blocks, rows]``. Sums are stored in the form in which
    `emit_tile_products` adds them: times ``-center_code``, times the scale (float32, with ``mins``), or unchanged.
    """
    e = Emitter(module, "quantize", spec.blocks.lanes)
    builder, block, unit = e.builder, spec.blocks.block_columns, spec.blocks.unit_columns
    x, codes, scales, sums = (
        e.load_address(position) for position in (ARG_X, ARG_X_CODES, ARG_X_SCALES, ARG_X_SUMS)
    )
    columns, units = e.load_word(ARG_COLUMNS), e.load_word(ARG_UNITS_PER_ROW)
    width, bytes_per_code, max_code = (
        spec.dtype.itemsize,
        spec.input_bits // 8,
        MAX_ROUNDED[spec.input_bits],
    )
    order = paired_order(e.lanes) if bytes_per_code == 2 else range(e.lanes)
    vectors = block // e.lanes
    floats, integers = e.vector_type(F32), e.vector_type(I32)
    suffix = f"v{e.lanes}"
    with e.loop(e.first, e.last) as (row, _), e.loop(I64(0), units) as (unit_index, _):
        group, r = (
            builder.udiv(row, I64(spec.shared_rows)),
            builder.urem(row, I64(spec.shared_rows)),
        )
        position = builder.add(builder.mul(group, units), unit_index)
        position = builder.add(e.scale_index(position, spec.shared_rows), r)
        for i in range(unit // block):
            start = builder.add(
                builder.mul(row, columns), e.scale_index(unit_index, unit, i * block)
            )
            base = builder.gep(x, [e.scale_index(start, width)])
            values = [e.load_floats(base, I64(vector), spec.dtype) for vector in range(vectors)]
            # Sizes compare like their bits, and those of NaN are larger than any number's.
            magnitude_bits = e.splat(I32, 0)
            for value in values:
                size = builder.and_(builder.bitcast(value, integers), e.splat(I32, 0x7FFFFFFF))
                magnitude_bits = e.call_intrinsic(
                    f"llvm.umax.{suffix}i32", integers, magnitude_bits, size
                )
            bits = e.call_intrinsic(f"llvm.vector.reduce.umax.{suffix}i32", I32, magnitude_bits)
            max_magnitude = builder.bitcast(bits, F32)
            normal = builder.fcmp_ordered(">", max_magnitude, F32(MIN_PEAK))
            normal = builder.and_(normal, builder.fcmp_ordered("<", max_magnitude, F32(math.inf)))
            inverse = builder.select(normal, builder.fdiv(F32(max_code), max_magnitude), F32(0.0))
            total = e.splat(I32, 0)
            for vector, value in enumerate(values):
                rounded = builder.fmul(value, e.broadcast(inverse))
                rounded = e.call_intrinsic(f"llvm.nearbyint.{suffix}f32", floats, rounded)
                number = builder.fcmp_ordered("ord", rounded, rounded)
                integer = builder.fptosi(
                    builder.select(number, rounded, e.splat(F32, 0.0)), integers
                )
                total = builder.add(total, integer)
                offset = e.scale_index(
                    position, bytes_per_code * unit, bytes_per_code * (i * block + vector * e.lanes)
                )
                rounded = builder.trunc(integer, e.vector_type(ir.IntType(spec.input_bits)))
                e.store(e.shuffle(rounded, order), codes, offset)
            number = builder.add(builder.mul(group, units), unit_index)
            number = builder.add(
                e.scale_index(number, unit // block * spec.shared_rows, i * spec.shared_rows), r
            )
            step = builder.fdiv(max_magnitude, F32(max_code))
            e.store(step, scales, e.scale_index(number, 4))
            integer = e.call_intrinsic(f"llvm.vector.reduce.add.{suffix}i32", I32, total)
            if spec.zero_kind == "centre":
                integer = builder.mul(integer, I32(-spec.center_code))
            elif spec.zero_kind == "mins":
                integer = builder.fmul(builder.sitofp(integer, F32), step)
            e.store(integer, sums, e.scale_index(number, 4))
    builder.ret_void()


def emit_tile_products(
    e: Emitter,
    spec: ProgramSpec,
    weights: IntegerWeightLoader,
    location: tuple[Value, Value],
    x: tuple[Value, Value, Value],
) -> list[Value]:
    """Write code for the products of a tile with a group of rows of x; return a float vector for each row.

    Args:
        e: emitter of the function.
        spec: what the program is generated for.
        weights: loader of the weight.
        location: the tile, and the index of the group of `ProgramSpec.shared_rows` rows.
        x: addresses of the rounded activations, their scales and their sums, see `add_quantize_function`.
    """
    builder, (tile, group), (codes, scales, sums) = e.builder, location, x
    floats, rows, blocks = e.vector_type(F32), spec.shared_rows, spec.blocks
    first_unit = builder.mul(group, weights.units)
    with e.loop(I64(0), weights.units, [e.splat(F32, 0.0)] * rows) as (unit, totals):
        position = builder.add(first_unit, unit)
        base = builder.gep(
            codes, [e.scale_index(position, spec.input_bits // 8 * blocks.unit_columns * rows)]
        )
        count = blocks.unit_columns // blocks.block_columns
        lines = [
            [e.scale_index(position, 4 * count * rows, 4 * (i * rows + r)) for r in range(rows)]
            for i in range(count)
        ]
        initial_sums = None
        if spec.zero_kind == "centre":
            initial_sums = [
                [e.broadcast(e.load(sums, offset, I32)) for offset in row] for row in lines
            ]
        dots = _emit_block_sums(e, spec, weights, (tile, unit), base, initial_sums)
        for i in range(count):
            scale = weights.load_parameter("scales", tile, unit, i)
            offset_param = (
                None
                if spec.zero_kind == "centre"
                else weights.load_parameter(spec.zero_kind, tile, unit, i)
            )
            integer = (
                None
                if spec.zero_kind != "zeros"
                else builder.fptosi(offset_param, e.vector_type(I32))
            )
            for r, dot in enumerate(dots[i]):
                step = e.broadcast(e.load(scales, lines[i][r], F32))
                value = dot
                if spec.zero_kind == "zeros":
                    total = e.broadcast(e.load(sums, lines[i][r], I32))
                    value = builder.sub(value, builder.mul(integer, total))
                value = builder.sitofp(value, floats)
                totals[r] = e.fma(value, builder.fmul(scale, step), totals[r])
                if spec.zero_kind == "mins":
                    shift = e.broadcast(e.load(sums, lines[i][r], F32))
                    totals[r] = e.fma(builder.fneg(offset_param), shift, totals[r])
    return totals


def _emit_block_sums(
    e: Emitter,
    spec: ProgramSpec,
    weights: IntegerWeightLoader,
    location: tuple[Value, Value],
    base: Value,
    initial_sums: list[list[Value]] | None,
) -> list[list[Value]]:
    """Write code for the sums of code times activation: an int32 vector for each block of a unit and each row.

    Args:
        e: emitter of the function.
        spec: what the program is generated for.
        weights: loader of the weight.
        location: the tile and the unit.
        base: address of the rounded activations of that unit.
        initial_sums: initial value of each sum by block and row, or None for zero.
    """
    builder, blocks, rows, bytes_per_code = (
        e.builder,
        spec.blocks,
        spec.shared_rows,
        spec.input_bits // 8,
    )
    chains = max(1, 4 // rows)  # independent sums hide the latency of an addition
    block_count = blocks.unit_columns // blocks.block_columns
    accumulators = [
        [[ACCUMULATORS[spec.input_bits](e, spec) for _ in range(chains)] for _ in range(rows)]
        for _ in range(block_count)
    ]
    for block_accumulators, start in zip(accumulators, initial_sums or [], strict=False):
        for row_accumulators, value in zip(block_accumulators, start, strict=True):
            row_accumulators[0].total = value
    for columns_before, codes in weights.load_codes(
        *location, spec.input_bits, prefetch=rows <= FEW_ROWS
    ):
        position, part = (
            columns_before * bytes_per_code // 4 % chains,
            accumulators[columns_before // blocks.block_columns],
        )
        sums = [row_accumulators[position] for row_accumulators in part]
        for r, accumulator in enumerate(sums):
            word = e.load(
                base, I64(bytes_per_code * (r * blocks.unit_columns + columns_before)), I32
            )
            accumulator.add(codes, e.broadcast(word))
        if rows >= FEW_ROWS:
            for accumulator, total in zip(
                sums, e.pin_in_registers([accumulator.pending for accumulator in sums]), strict=True
            ):
                accumulator.pending = total
    finished = [
        [[accumulator.finish() for accumulator in row_accumulators] for row_accumulators in part]
        for part in accumulators
    ]
    return [
        [reduce(builder.add, filter(None, row_accumulators)) for row_accumulators in part]
        for part in finished
    ]


class Int16Accumulator:
    """Accumulator of products of two columns, 16 bits each, in every lane; ``total`` is None at the start."""

    def __init__(self, e: Emitter, spec: ProgramSpec) -> None:
        self.e, self.spec = e, spec
        self.total: Value = None

    @property
    def pending(self) -> Value:
        """Return the value to which the next products are added."""
        return self.total

    @pending.setter
    def pending(self, value: Value) -> None:
        self.total = value

    def add(self, codes: Value, x: Value) -> None:
        """Add the products of the codes of two columns and the same activations."""
        e, kind = self.e, self.e.vector_type(I32)
        name = _PAIR_INSTRUCTIONS[self.spec.instruction_set]
        if self.spec.instruction_set == "avx512vnni":
            total = e.splat(I32, 0) if self.total is None else self.total
            self.total = e.call_intrinsic(name, kind, total, e.builder.bitcast(codes, kind), x)
            return
        widened = e.builder.bitcast(x, e.vector_type(I16, 2 * e.lanes))
        products = e.call_intrinsic(name, kind, codes, widened)
        self.total = products if self.total is None else e.builder.add(self.total, products)

    def finish(self) -> Value:
        """Return the sum, 32 bits in every lane."""
        return self.total


class Int8Accumulator(Int16Accumulator):
    """Accumulator of products of four columns, 8 bits each, in every lane.

    Without ``vpdpbusd``, ``vpmaddubsw`` adds two products in 16 bits; they are widened before the sum can overflow.
    """

    def __init__(self, e: Emitter, spec: ProgramSpec) -> None:
        super().__init__(e, spec)
        self._partial_sums: Value = None
        self._count = 0
        self._max_partial_sums = int(2**15 // (2 * MAX_ROUNDED[8] * (2 ** sum(spec.widths) - 1)))

    @property
    def pending(self) -> Value:
        """Return the value to which the next products are added."""
        return self.total if self._partial_sums is None else self._partial_sums

    @pending.setter
    def pending(self, value: Value) -> None:
        if self._partial_sums is None:
            self.total = value
        else:
            self._partial_sums = value

    def add(self, codes: Value, x: Value) -> None:
        """Add the products of the codes of four columns and the same activations."""
        e, kind = self.e, self.e.vector_type(I32)
        if self.spec.instruction_set == "avx512vnni":
            total = e.splat(I32, 0) if self.total is None else self.total
            name = "llvm.x86.avx512.vpdpbusd.512"
            self.total = e.call_intrinsic(name, kind, total, e.builder.bitcast(codes, kind), x)
            return
        x_bytes = e.builder.bitcast(x, e.vector_type(I8, 4 * e.lanes))
        name = {16: "llvm.x86.avx512.pmaddubs.w.512", 8: "llvm.x86.avx2.pmadd.ub.sw"}[e.lanes]
        products = e.call_intrinsic(name, e.vector_type(I16, 2 * e.lanes), codes, x_bytes)
        self._partial_sums = (
            products if self._partial_sums is None else e.builder.add(self._partial_sums, products)
        )
        self._count += 1
        if self._count == self._max_partial_sums:
            self._widen()

    def _widen(self) -> None:
        e = self.e
        ones = e.splat(I16, 1, 2 * e.lanes)
        widened = e.call_intrinsic(
            _PAIR_INSTRUCTIONS["avx512bw" if e.lanes == 16 else "avx2"],
            e.vector_type(I32),
            self._partial_sums,
            ones,
        )
        self.total = widened if self.total is None else e.builder.add(self.total, widened)
        self._partial_sums, self._count = None, 0

    def finish(self) -> Value:
        """Return the sum, 32 bits in every lane."""
        if self._partial_sums is not None:
            self._widen()
        return self.total


ACCUMULATORS = {16: Int16Accumulator, 8: Int8Accumulator}  # by the bits of a rounded activation


class IntegerWeightLoader:
    """Writer of the code that loads codes and parameters for any tile and unit of columns.

    Args:
        e: emitter of the function.
        spec: what the program is generated for.
    """

    def __init__(self, e: Emitter, spec: ProgramSpec) -> None:
        self.e = e
        self.spec = spec
        self.plane_addresses = [e.load_address(ARG_PLANES + i) for i in range(len(spec.widths))]
        self.param_dtypes = dict(spec.param_dtypes)
        self.param_addresses = {
            name: e.load_address(ARG_PARAMETERS + i)
            for i, name in enumerate(PARAM_NAMES)
            if name in self.param_dtypes
        }
        self.units, self.groups = e.load_word(ARG_UNITS_PER_ROW), e.load_word(ARG_GROUPS)

    def load_words(
        self, plane: int, tile: Value, unit: Value, prefetch: bool = True
    ) -> Iterator[Value]:
        """Yield the words of a unit of columns in one plane; each load is written when its word is requested.

        So loads are interleaved with products instead of preceding all of them, where they would wait for each other.
        """
        e, count = self.e, words_per_row(self.spec.widths[plane], self.spec.blocks.unit_columns)
        start = e.scale_index(
            e.builder.add(e.builder.mul(tile, self.units), unit), 4 * count * e.lanes
        )
        for j in range(count):
            offset = e.builder.add(start, I64(4 * j * e.lanes))
            word = e.load(self.plane_addresses[plane], offset, e.vector_type(I32))
            if prefetch:
                e.prefetch(
                    e.builder.gep(
                        self.plane_addresses[plane], [e.builder.add(offset, I64(PREFETCH_BYTES))]
                    )
                )
            yield word

    def load_codes(
        self, tile: Value, unit: Value, bits: int = 16, prefetch: bool = True
    ) -> Iterator[tuple[int, Value]]:
        """Yield ``(column, codes)``: the codes of a unit as integers of ``bits`` bits, 32 bits per lane at a time.

        Columns are in the order of `lane_layout`. Planes are combined here, once for all rows of activations.
        """
        planes, low_bit, codes_per_word = [], 0, 32 // bits
        for plane, width in enumerate(self.spec.widths):
            planes.append(
                self._load_plane(low_bit, width, bits, self.load_words(plane, tile, unit, prefetch))
            )
            low_bit += width
        for columns_before in range(0, self.spec.blocks.unit_columns, codes_per_word):
            yield columns_before, reduce(self.e.builder.or_, [next(fields) for fields in planes])

    def _load_plane(
        self, low_bit: int, width: int, bits: int, words: Iterator[Value]
    ) -> Iterator[Value]:
        for word in words:
            yield from _extract_fields(self.e, word, width, low_bit, bits)

    def load_parameter(self, name: str, tile: Value, unit: Value, i: int) -> Value:
        """Return a parameter of block ``i`` of a unit, multiplied by that of the upper level if there is one."""
        value = self._load_level(name, tile, unit, i, self.spec.blocks.blocks_per_group)
        upper_name = _SUPERBLOCK_PARAMS.get(name)
        if upper_name in self.param_addresses:
            group_scale = self._load_level(
                upper_name, tile, unit, i, self.spec.blocks.blocks_per_superblock
            )
            value = self.e.builder.fmul(value, group_scale)
        return value

    def _load_level(
        self, name: str, tile: Value, unit: Value, i: int, blocks_sharing: int
    ) -> Value:
        """Load a parameter of one level; ``blocks_sharing`` blocks share it (0: all blocks of a row)."""
        if self.spec.packed_nibbles and name in LOWER_LEVEL_PARAMS:
            return self._load_nibble(name, tile, unit, i)
        e, blocks = self.e, self.spec.blocks
        number = e.scale_index(unit, blocks.unit_columns // blocks.block_columns, i)
        count = self.groups
        if name in {"d", "dmin"}:
            count = e.builder.udiv(
                count, I64(blocks.blocks_per_superblock // blocks.blocks_per_group)
            )
        index = e.builder.udiv(number, I64(blocks_sharing)) if blocks_sharing else I64(0)
        position = e.builder.add(e.builder.mul(tile, count), index)
        return e.load_floats(self.param_addresses[name], position, self.param_dtypes[name])

    def _load_nibble(self, name: str, tile: Value, unit: Value, i: int) -> Value:
        """Load a 4-bit parameter; a block is a group, and a unit contains whole pairs of groups."""
        e, blocks = self.e, self.spec.blocks
        first = e.builder.mul(tile, e.builder.udiv(self.groups, I64(2)))
        position = e.builder.add(
            first, e.scale_index(unit, blocks.unit_columns // blocks.block_columns // 2, i // 2)
        )
        pair = e.load(
            self.param_addresses[name], e.scale_index(position, e.lanes), e.vector_type(I8)
        )
        widened = e.builder.zext(pair, e.vector_type(I32))
        half = (
            e.builder.lshr(widened, e.splat(I32, 4))
            if i % 2
            else e.builder.and_(widened, e.splat(I32, 15))
        )
        return e.builder.sitofp(half, e.vector_type(F32))


def _extract_fields(
    e: Emitter, word: Value, width: int, low_bit: int, bits: int
) -> Iterator[Value]:
    """Yield the fields of all bytes of every word as vectors of ``bits``-bit integers, shifted to bit ``low_bit``.

    16-bit integers hold the fields of two bytes, one after the other.
    """
    builder, count = e.builder, 32 // bits * e.lanes
    # Shifts are of 16 bits at the least: processors have none of bytes.
    widened, byte_mask_factor = (I16, 2 * e.lanes), 1 if bits == 16 else 0x101
    half_words = builder.bitcast(word, e.vector_type(*widened))
    for field in range(8 // width):
        for byte in range(bits // 8):
            value, right_shift = half_words, field * width + 8 * byte - low_bit
            if right_shift:
                shift = builder.lshr if right_shift > 0 else builder.shl
                value = shift(value, e.splat(I16, abs(right_shift), widened[1]))
            is_topmost = width == bits or (bits == 16 and field * width + 8 * byte + width == 16)
            if low_bit or not is_topmost:  # bits above it are there to be removed
                value = builder.and_(
                    value,
                    e.splat(I16, (((1 << width) - 1) << low_bit) * byte_mask_factor, widened[1]),
                )
            yield value if bits == 16 else builder.bitcast(value, e.vector_type(I8, count))
