"""Packers: one module per number family, each with the functions of `Packer`.

``fit`` chooses the parameters of a weight (as stored), ``encode`` rounds any run of columns to codes, ``decode`` turns
codes back into floats. ``column_grid`` and ``refit_steps`` describe the same grid to the fast loops of GPTQ and to the
refinement of scales. Quantizers call only these functions, so that one GPTQ works with every grid. `bits` packs codes
into the words of a file.

In this folder:

    bits            Pack integer codes of any width into the 32-bit words of a file, and unpack them
    fp4             nvfp4 and mxfp8: elements of 4 or 8 bits under block scales of 8 bits
    fp8             8-bit floating point: e4m3 (without infinities) and e5m2, under a scale per tensor, row
    hessian_refit   Fit parameters again for fixed codes, minimizing the error under the whole Hessian
    input_rounding  Inputs of linear layers, rounded at run time as an engine does, and their static scales
    integer         Uniform integer grids, 2 to 8 bits: symmetric, with an integer zero point, or with a stored minimum
    nearest_levels  Round values to the nearest of a few sorted levels by counting thresholds
    nf4             The 4-bit codebooks of bitsandbytes: NF4 and FP4, in groups that share one absolute maximum
    row_encoding    Loops of `nf4`, `fp8` and `integer` that encode whole matrices on a CPU, compiled by numba
    scale_loops     The search of `scale_search` for integer scales, in loops compiled by numba
    scale_search    Search scales that minimize the weighted squared error of a group
    tensor          A quantized tensor: what every method makes and every format stores
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

    from quantforge.packers.hessian_refit import RefitStep
    from quantforge.packers.tensor import KernelInputs, QuantizedTensor


class ColumnGrid(NamedTuple):
    """The values that the weights of some columns can take.

    Without a ``table`` they are ``(code - zero) * scale + offset`` for the codes within ``limits``. With a ``table``
    (sorted thresholds, the values between them and the codes of those values, float32) they are ``value * scale +
    offset``; a number equal to a threshold belongs to the value above it.
    """

    scales: Tensor  # float32 [columns, rows], as the two that follow
    zeros: Tensor
    offsets: Tensor
    limits: tuple[int, int]
    dtype: torch.dtype  # of the codes
    table: tuple[Tensor, Tensor, Tensor] | None = None


class Packer(Protocol):
    """Functions that the module of each number family has."""

    def fit(
        self,
        weight: Tensor,
        scheme: Scheme,
        importance: Tensor | None = None,
        *,
        search: bool = False,
    ) -> dict[str, Tensor]:
        """Choose the parameters of ``weight`` ``[out, in]`` (float32), rounded to their stored types.

        Without ``search`` they cover the range of the weights that share them. With ``search`` they minimize the
        squared error, weighted with ``importance`` ``[in]`` (the diagonal of the Hessian; None: equal weights).

        Raises:
            InputError: a parameter is larger than its stored type can hold.
        """

    def encode(
        self,
        weight: Tensor,
        parameters: Mapping[str, Tensor],
        scheme: Scheme,
        columns: slice | None = None,
    ) -> Tensor:
        """Return the nearest codes of ``weight`` ``[out, n]``.

        ``columns`` are the positions of ``weight`` in the whole matrix (None: it is the whole matrix), whose parameters
        are ``parameters``.
        """

    def decode(
        self,
        codes: Tensor,
        parameters: Mapping[str, Tensor],
        scheme: Scheme,
        columns: slice | None = None,
    ) -> Tensor:
        """Return the float32 values of ``codes`` ``[out, n]``, which are the given columns of the whole matrix."""

    def column_grid(
        self, parameters: Mapping[str, Tensor], scheme: Scheme, columns: Tensor
    ) -> ColumnGrid | None:
        """Return the values that some columns can take, or None.

        If it is None, quantizers call `encode` and `decode` for one column after another, which takes a few times as
        long.

        Args:
            parameters: float32 copies of the parameters of the whole matrix.
            scheme: scheme of the matrix.
            columns: column indices, int64 ``[n]``, in any order.
        """

    def refit_steps(self, scheme: Scheme, in_features: int) -> Sequence[RefitStep]:
        """Return the steps that fit the parameters again for fixed codes, those for the fewest columns first.

        `RefitStep.num_columns` of each step divides that of the next. An empty sequence means that nothing is refined.
        """

    def kernel_inputs(self, tensor: QuantizedTensor) -> KernelInputs:
        """Return the tensor as the matmul kernels take it, without the parameters of the quantized input."""


class VectorPacker(Packer, Protocol):
    """Functions that the module of a number family has if one code stands for several adjacent weights of a row.

    With ``v`` weights per code (`Grid.weights_per_code`) the codes of ``[out, n]`` weights are ``[out, n / v]``.
    """

    def nearest_vectors(
        self,
        targets: Tensor,
        parameters: Mapping[str, Tensor],
        scheme: Scheme,
        columns: slice,
        root: Tensor,
    ) -> Tensor:
        """Return the codes ``[out, 1]`` of the vectors nearest to ``targets`` ``[out, v]``.

        The distance of ``q`` from ``t`` is ``|(t - q) root|``, with ``root`` ``[v, v]``. Where there are too many
        vectors to try them all, a slightly farther one may be returned.
        """

    def encode_weighted(
        self, weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, importance: Tensor
    ) -> Tensor:
        """Return the codes of ``weight`` ``[out, in]`` with the least squared error under ``importance`` ``[in]``."""


def encode_with_importance(
    weight: Tensor, parameters: Mapping[str, Tensor], scheme: Scheme, importance: Tensor | None
) -> Tensor:
    """Return the codes of ``weight`` ``[out, in]`` that minimize the error weighted with ``importance`` ``[in]``.

    The importance matters only if a code stands for several weights.
    """
    packer = get_packer(scheme)
    if importance is None or GRIDS[scheme.grid].weights_per_code == 1:
        return packer.encode(weight, parameters, scheme)
    return cast("VectorPacker", packer).encode_weighted(weight, parameters, scheme, importance)


def get_packer(scheme: Scheme) -> Packer:
    """Return the packer module of the scheme's grid; it is imported at the first call, since it needs torch."""
    return cast("Packer", import_module(GRIDS[scheme.grid].packer))
