"""The product of low rank that makes up for most of a rounding error, by what the inputs of a linear see of it.

An error ``E = W - Q`` costs ``tr(E H E^T)`` at the output, ``H`` the mean of ``x x^T``. Of all ``B A`` of rank ``r``
the one that leaves least of it projects the errors at the output on their ``r`` principal directions: the eigenvectors
``U`` of ``E H E^T`` with the largest eigenvalues, ``B = U`` and ``A = U^T E``. It is the solution of EoRA
(arXiv 2410.21271), which reaches it by a decomposition of ``E H^(1/2)``; here no root of ``H`` is taken, so that ``H``
may be singular, and directions of the input that calibration has not seen are corrected by the same projection.

The eigenvectors are those within a Krylov space (`STEPS` blocks, each a product with ``E H E^T``, orthonormal to those
before). Where that is as wide as the matrix is high, it is the whole space, and they are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.numerics.finite import finite
from quantforge.numerics.products import matmul
from quantforge.numerics.threads import one_thread

STEPS = 8  # blocks of the Krylov space; see its test for what they leave
MORE = 8  # directions of a block beyond the rank


def low_rank(error: Tensor, hessian: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return ``A`` float16 ``[rank, in]`` and ``B`` float16 ``[out, rank]``, whose product is to be added to ``Q``.

    Args:
        error: ``W - Q``, float32 ``[out, in]``.
        hessian: float32 ``[in, in]``, symmetric.
        rank: at most the smaller side of the error.

    Raises:
        InputError: the product does not fit into float16, or is not finite.
    """
    directions = _principal(error, hessian, rank)
    a = matmul(directions.T.contiguous(), error)
    # Both halves as long as each other, by powers of two, which round nothing: float16 has few exponents.
    lengths = a.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    even = torch.exp2((lengths.log2() / 2).round())
    half_a, half_b = (a / even[:, None]).half(), (directions * even).half()
    if not (finite(half_a) and finite(half_b)):
        raise InputError(
            "the correction is beyond float16",
            "a weight of the source or of the result is damaged: quantforge verify RESULT --source MODEL",
        )
    return half_a, half_b


def _principal(error: Tensor, hessian: Tensor, rank: int) -> Tensor:
    """Return the orthonormal directions ``[out, rank]`` in which errors at the output are largest, largest first."""
    rows, width = len(error), rank + MORE
    if STEPS * width >= rows:
        basis = torch.eye(rows, device=error.device)
    else:
        generator = torch.Generator().manual_seed(0)
        block = torch.randn(rows, width, generator=generator).to(error.device)
        basis = block.new_empty(rows, 0)
        for step in range(STEPS):
            block = _seen(error, hessian, block) if step else block
            for _ in range(2):  # once leaves what float32 rounds, of a block that brings little new
                block = block - matmul(basis, matmul(basis.T.contiguous(), block))
                with one_thread():
                    block = torch.linalg.qr(block.double()).Q.float()
            basis = torch.cat((basis, block), 1)
    inner = matmul(basis.T.contiguous(), _seen(error, hessian, basis)).double()
    with one_thread():
        vectors: Tensor = torch.linalg.eigh((inner + inner.T) / 2).eigenvectors
    return matmul(basis, vectors[:, -rank:].flip(1).float())


def _seen(error: Tensor, hessian: Tensor, block: Tensor) -> Tensor:
    """Return ``E H E^T`` times a block."""
    return matmul(error, matmul(hessian, matmul(error.T.contiguous(), block)))
