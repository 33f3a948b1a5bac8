"""Program that decodes packed integers: weights in the type of activations, for products of many rows by torch."""

from __future__ import annotations

from llvmlite import ir

from quantforge_kernels.cpu.emit import F32, I32, I64, Emitter
from quantforge_kernels.cpu.integer_form import OUT, TILES, Form
from quantforge_kernels.cpu.integer_weights import IntegerWeights
from quantforge_kernels.cpu.lane_layout import pair_of
from quantforge_kernels.cpu.parallel_entry import add_entry


def decode(form: Form, parallel: bool) -> ir.Module:
    """Build ``decode_run``: decode a range of tiles."""
    module = ir.Module()
    _decode(module, form)
    add_entry(module, "decode", parallel=parallel)
    return module


def _decode(module: ir.Module, form: Form) -> None:
    """Decode the tiles ``[first, last)`` to ``[columns, tiles, lanes]``: the weight, transposed."""
    e = Emitter(module, "decode", form.blocks.lanes)
    build, blocks = e.build, form.blocks
    weights = IntegerWeights(e, form)
    out, tiles = e.address(OUT), e.word(TILES)
    with e.loop(e.first, e.last) as (tile, _), e.loop(I64(0), weights.units) as (unit, _):
        codes = [both for _, both in weights.codes(tile, unit, ahead=False)]
        above, below = e.splat(I32, 16), e.splat(I32, 0xFFFF)
        for i in range(blocks.unit // blocks.block):
            scale = weights.parameter("scales", tile, unit, i)
            lows = None if form.zero == "centre" else weights.parameter(form.zero, tile, unit, i)
            for column in range(i * blocks.block, (i + 1) * blocks.block):
                pair, upper = pair_of(column, form.widths)
                both = build.bitcast(codes[pair], e.vector(I32))
                code = build.lshr(both, above) if upper else build.and_(both, below)
                value = build.sitofp(code, e.vector(F32))
                if form.zero == "centre":
                    value = build.fsub(value, e.splat(F32, form.centre))
                elif form.zero == "zeros":
                    value = build.fsub(value, lows)
                value = build.fmul(value, scale)
                if form.zero == "mins":
                    value = build.fsub(value, lows)
                line = build.mul(e.scaled(unit, blocks.unit, column), tiles)
                offset = e.scaled(build.add(line, tile), form.dtype.itemsize * e.lanes)
                e.store(e.to_type(value, form.dtype), out, offset)
    build.ret_void()
