"""Program that multiplies rows by the packed integers of their owners: pairs of a row and a matrix.

A pair is multiplied as a row is by a single matrix (`integer_products.totals_of`); where its weights begin is read from
a list. Matrices lie one after the other, each in as many tiles.
"""

from __future__ import annotations

from llvmlite import ir

from quantforge_kernels.cpu.emit import I32, I64, Emitter
from quantforge_kernels.cpu.integer_form import (
    EACH,
    OUT,
    OWNERS,
    TILES,
    X_CODES,
    X_SCALES,
    X_SUMS,
    Form,
)
from quantforge_kernels.cpu.integer_products import quantize, totals_of
from quantforge_kernels.cpu.integer_weights import IntegerWeights
from quantforge_kernels.cpu.parallel_entry import add_entry


def grouped(form: Form, parallel: bool) -> ir.Module:
    """Build ``grouped_run``: round all rows of x, and multiply pairs of a row and the tiles of its owner's matrix.

    The range counts tiles of all pairs; matrices lie one after the other (`quantforge_kernels.grouped`).
    """
    module = ir.Module()
    quantize(module, form)
    _grouped(module, form)
    add_entry(module, "grouped", before="quantize", parallel=parallel)
    return module


def _grouped(module: ir.Module, form: Form) -> None:
    """Multiply likewise, for pairs: out ``[pairs, tiles, lanes]``; tile ``i`` of the range is of pair ``i / tiles``."""
    e = Emitter(module, "grouped", form.blocks.lanes)
    build = e.build
    weights = IntegerWeights(e, form)
    out, tiles, each, owners = e.address(OUT), e.word(TILES), e.word(EACH), e.address(OWNERS)
    x = (e.address(X_CODES), e.address(X_SCALES), e.address(X_SUMS))
    with e.loop(e.first, e.last) as (place, _):
        pair = build.udiv(place, tiles)
        owner = build.sext(e.load(owners, e.scaled(pair, 4), I32), I64)
        tile = build.add(build.mul(owner, tiles), build.urem(place, tiles))
        totals = totals_of(e, form, weights, (tile, build.udiv(pair, each)), x)
        e.store(
            e.to_type(totals[0], form.dtype), out, e.scaled(place, form.dtype.itemsize * e.lanes)
        )
    build.ret_void()
