"""Packers: one module per number family, each with the functions of `Packer`.

``fit`` chooses the parameters of a weight (as stored), ``encode`` turns any run of columns into codes, ``decode``
turns codes back; ``points`` and ``refits`` say the same in terms that fast loops and refinement work in. Rounders call
only these, so that one GPTQ works on every grid. `bits` lays codes out in the words of a file.

In this folder:

    bits            A dense little-endian bit stream: how integer codes lie in the 32-bit words of a file
    fp4             nvfp4 and mxfp8: elements of 4 or 8 bits under block scales of 8 bits
    fp8             8-bit floating point: e4m3 (without infinities) and e5m2, under a scale per tensor, row
    hessian_refit   Parameters fitted again with the codes held, under the whole Hessian
    input_rounding  Inputs of linear layers, rounded at run time: what an engine does to them
    integer         Uniform integer grids, 2 to 8 bits: symmetric, with an integer zero point, or with a stored minimum
    nearest_levels  Nearest of a few sorted levels for each of many values: thresholds are counted, levels looked up
    nf4             The 4-bit codebooks of bitsandbytes: NF4 and FP4, in groups that share one absolute maximum
    row_encoding    Codes of whole matrices on a CPU, in one pass: the loops of `nf4`, `fp8` and `integer`
    scale_loops     The search of `scale_search` for scales of integers, in loops that numba compiles
    scale_search    Scales that minimise the weighted squared error of a group instead of covering its range
    tensor          The one thing that every method makes and every format stores: a quantized tensor
    ggml/           The number types of ggml, as GGUF files hold them: blocks of 32 or 256 weights with fixed layouts
    lattices/       The lattice types of ggml, IQ1 to IQ3: a code picks the magnitudes of 4 or 8 weights at once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from quantforge.grids import GRIDS
from quantforge.scheme import Scheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quantforge.packers.hessian_refit import Refit
    from quantforge.packers.tensor import KernelTerms, QuantizedTensor


class Points(NamedTuple):
    """The grid of some columns: ``(code - zero) * scale + offset`` with codes inside of ``limits``.

    With a ``table`` (thresholds, then the values between them and the codes of these, float32) it is
    ``value * scale + offset``; a value at a threshold belongs above it.
    """

    scales: Tensor  # float32 [columns, rows], as the two that follow
    zeros: Tensor
    offsets: Tensor
    limits: tuple[int, int]
    dtype: torch.dtype  # of the codes
    table: tuple[Tensor, Tensor, Tensor] | None = None


class Packer(Protocol):
    """Interface of the module of a number family."""

    def fit(
        self,
        weight: Tensor,
        scheme: Scheme,
        importance: Tensor | None = None,
        *,
        search: bool = False,
    ) -> dict[str, Tensor]:
        """Choose the parameters of ``weight`` ``[out, in]`` (float32), rounded to their stored types.

        They cover the range of what shares them; with ``search`` they minimise its squared error, weighted by
        ``importance`` ``[in]`` (the diagonal of the Hessian; None: equal weights).

        Raises:
            InputError: a parameter is beyond the largest number of its stored type.
        """

    def encode(
        self,
        weight: Tensor,
        parameters: Mapping[str, Tensor],
        scheme: Scheme,
        columns: slice | None = None,
    ) -> Tensor:
        """Return the nearest codes of ``weight`` ``[out, n]``, the run ``columns`` of the whole matrix.

        ``parameters`` are those of the whole matrix; ``columns`` says which of its groups apply.
        """

    def decode(
        self,
        codes: Tensor,
        parameters: Mapping[str, Tensor],
        scheme: Scheme,
        columns: slice | None = None,
    ) -> Tensor:
        """Return float32 values of ``codes`` ``[out, n]``, the run ``columns`` of the whole matrix."""

    def points(
        self, parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor
    ) -> Points | None:
        """Return the values that some columns can take, or None.

        With None, rounders ask `encode` and `decode` for one column after the other, which takes a few times as long.

        Args:
            parameters: float32 copies of the whole matrix's.
            scheme: of the matrix.
            columns: int64 ``[n]``, in any order.
        """

    def refits(self, scheme: Scheme, in_features: int) -> Sequence[Refit]:
        """Return the steps that fit parameters again with the codes held, fewest shared columns first.

        `Refit.columns` of each step divides that of the next. Without a step neither parameters nor codes are refined.
        """

    def kernel_terms(self, tensor: QuantizedTensor) -> KernelTerms:
        """Return a tensor in the terms of the kernels, without the parameters of its input."""


class VectorPacker(Packer, Protocol):
    """Interface of the module of a number family in which one code stands for several adjacent weights of a row.

    With ``v`` weights per code (`Grid.weights_per_code`) the codes of ``[out, n]`` weights are ``[out, n / v]``.
    """

    def nearest(
        self,
        targets: Tensor,
        parameters: Mapping[str, Tensor],
        scheme: Scheme,
        columns: slice,
        root: Tensor,
    ) -> Tensor:
        """Return the codes ``[out, 1]`` of the vectors nearest to ``targets`` ``[out, v]``.

        The distance of ``q`` from ``t`` is ``|(t - q) root|``, with ``root`` ``[v, v]``. Where there are too many
        vectors to try them all, the nearest may be missed.
        """

    def weighed(
        self, weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, importance: Tensor
    ) -> Tensor:
        """Return the codes of ``weight`` ``[out, in]`` with the least errors weighted by ``importance`` ``[in]``."""


if TYPE_CHECKING:  # the type checker holds the modules to the interfaces
    from quantforge.packers import fp4, fp8, integer, nf4
    from quantforge.packers.ggml import packer as ggml
    from quantforge.packers.lattices import packer as lattices

    _PACKERS: tuple[Packer, ...] = (integer, nf4, fp8, fp4, ggml)
    _VECTOR_PACKERS: tuple[VectorPacker, ...] = (lattices,)


def weighed_codes(
    weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, importance: Tensor | None
) -> Tensor:
    """Return the best codes of ``weight`` ``[out, in]``: of a vector it matters which of its weights are important."""
    packer = packer_of(scheme)
    if importance is None or GRIDS[scheme.grid].weights_per_code == 1:
        return packer.encode(weight, parameters, scheme)
    return cast("VectorPacker", packer).weighed(weight, parameters, scheme, importance)


def packer_of(scheme: Scheme) -> Packer:
    """Return the packer of the scheme's grid, imported when it is first asked for: it needs torch."""
    return cast("Packer", import_module(GRIDS[scheme.grid].packer))
