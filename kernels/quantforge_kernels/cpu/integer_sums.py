"""Sums of products of codes and rounded activations, 32 bits in every lane: what one instruction adds to them.

Of 16 bits, ``vpdpwssd`` multiplies two columns (``vpmaddwd`` and an addition without it); of 8 bits ``vpdpbusd`` four.
"""

from __future__ import annotations

from quantforge_kernels.cpu.emit import I8, I16, I32, Emitter, Value
from quantforge_kernels.cpu.integer_form import Form

MOST = {16: 32767.0, 8: 127.0}  # of a rounded activation, by its bits
_PAIR = {"avx512vnni": "llvm.x86.avx512.vpdpwssd.512", "avx512bw": "llvm.x86.avx512.pmaddw.d.512",
         "avx2": "llvm.x86.avx2.pmadd.wd"}  # fmt: skip


class PairSum:
    """A sum of products of two columns, 16 bits each, in every lane; None is no sum yet."""

    def __init__(self, e: Emitter, form: Form) -> None:
        self.e, self.form = e, form
        self.total: Value = None

    @property
    def latest(self) -> Value:
        """Return what the next products are added to."""
        return self.total

    @latest.setter
    def latest(self, value: Value) -> None:
        self.total = value

    def add(self, codes: Value, x: Value) -> None:
        """Add the products of the codes of two columns with the same activations."""
        e, kind = self.e, self.e.vector(I32)
        name = _PAIR[self.form.feature]
        if self.form.feature == "avx512vnni":
            total = e.splat(I32, 0) if self.total is None else self.total
            self.total = e.call(name, kind, total, e.build.bitcast(codes, kind), x)
            return
        wide = e.build.bitcast(x, e.vector(I16, 2 * e.lanes))
        products = e.call(name, kind, codes, wide)
        self.total = products if self.total is None else e.build.add(self.total, products)

    def ended(self) -> Value:
        """Return the sum, 32 bits in every lane."""
        return self.total


class OctetSum(PairSum):
    """A sum of products of four columns, 8 bits each, in every lane.

    Without ``vpdpbusd``, ``vpmaddubsw`` adds two products in 16 bits. As many are added there as cannot overflow.
    """

    def __init__(self, e: Emitter, form: Form) -> None:
        super().__init__(e, form)
        self._halves: Value = None
        self._count = 0
        self._most = int(2**15 // (2 * MOST[8] * (2 ** sum(form.widths) - 1)))

    @property
    def latest(self) -> Value:
        """Return what the next products are added to."""
        return self.total if self._halves is None else self._halves

    @latest.setter
    def latest(self, value: Value) -> None:
        if self._halves is None:
            self.total = value
        else:
            self._halves = value

    def add(self, codes: Value, x: Value) -> None:
        """Add the products of the codes of four columns with the same activations."""
        e, kind = self.e, self.e.vector(I32)
        if self.form.feature == "avx512vnni":
            total = e.splat(I32, 0) if self.total is None else self.total
            name = "llvm.x86.avx512.vpdpbusd.512"
            self.total = e.call(name, kind, total, e.build.bitcast(codes, kind), x)
            return
        octets = e.build.bitcast(x, e.vector(I8, 4 * e.lanes))
        name = {16: "llvm.x86.avx512.pmaddubs.w.512", 8: "llvm.x86.avx2.pmadd.ub.sw"}[e.lanes]
        products = e.call(name, e.vector(I16, 2 * e.lanes), codes, octets)
        self._halves = products if self._halves is None else e.build.add(self._halves, products)
        self._count += 1
        if self._count == self._most:
            self._widen()

    def _widen(self) -> None:
        e = self.e
        ones = e.splat(I16, 1, 2 * e.lanes)
        wide = e.call(
            _PAIR["avx512bw" if e.lanes == 16 else "avx2"], e.vector(I32), self._halves, ones
        )
        self.total = wide if self.total is None else e.build.add(self.total, wide)
        self._halves, self._count = None, 0

    def ended(self) -> Value:
        """Return the sum, 32 bits in every lane."""
        if self._halves is not None:
            self._widen()
        return self.total


SUMS = {16: PairSum, 8: OctetSum}  # by the bits of a rounded activation
