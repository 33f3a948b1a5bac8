"""ggml's weights of the errors of lattice types, to the last bit; a loop that numba compiles."""

from __future__ import annotations

import numpy

from quantforge.packers.ggml.panel_loops import jit

_ZERO, _COLUMNS = numpy.float32(0), numpy.float32(256)


@jit
def weigh(x, importance, twice, share, w):  # type: ignore[no-untyped-def]
    """Fill in weights of blocks: ``importance sqrt(mean + x^2)``, or without one ``share * mean + x^2``.

    Args:
        x: float32 ``[blocks, 256]``.
        importance: float32 ``[blocks of a row, 256]``, or ``[0, 256]``.
        twice: whether the mean of the squares, which are summed in the order of the columns, counts twice.
        share: of the mean where no importance is known.
        w: float32 ``[blocks, 256]``, filled in.
    """
    last, sums = len(x) - 1, numpy.empty(4, numpy.float32)
    for first in range(0, len(x), 4):  # side by side, since each sum waits for the one before
        rows = (first, min(first + 1, last), min(first + 2, last), min(first + 3, last))
        a, b, c, d = _ZERO, _ZERO, _ZERO, _ZERO
        for i in range(256):
            a += x[rows[0], i] * x[rows[0], i]
            b += x[rows[1], i] * x[rows[1], i]
            c += x[rows[2], i] * x[rows[2], i]
            d += x[rows[3], i] * x[rows[3], i]
        sums[0], sums[1], sums[2], sums[3] = a, b, c, d
        for block in range(first, min(first + 4, len(x))):
            whole, mine, out = sums[block - first], x[block], w[block]
            mean = (whole + whole if twice else whole) / _COLUMNS
            if len(importance):
                known = importance[block % len(importance)]
                for i in range(256):
                    out[i] = numpy.sqrt(mean + mine[i] * mine[i]) * known[i]
            else:
                least = share * mean if share > _ZERO else _ZERO
                for i in range(256):
                    out[i] = least + mine[i] * mine[i]
