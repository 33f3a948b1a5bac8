"""A linear layer whose weight stays packed in memory.

It gives the codes and parameters of a `QuantizedTensor` to the first kernel that accepts them, keeps
only what that kernel prepared, and multiplies. Which kernel it was is part of every report.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantforge.tensor import QuantizedTensor
from quantforge_kernels.problem import Kernel, Problem
from quantforge_kernels.select import select


def problem_of(tensor: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> Problem:
    """State the product of one token with a quantized weight."""
    scheme, (rows, columns) = tensor.scheme, tensor.shape
    return Problem(
        rows=1,
        out_features=rows,
        in_features=columns,
        bits=scheme.bits,
        group_size=scheme.group_size(columns),
        symmetric=scheme.symmetric,
        dtype=dtype,
        device=device.type,
    )


class PackedLinear(nn.Module):
    """``y = x W^T + bias`` with a quantized ``W`` ``[out_features, in_features]``.

    Args:
        tensor: the weight.
        bias: ``[out_features]``, or None.
        dtype: of activations.
        device: where the weight is kept.
        kernel: to be used; the first that accepts the problem when left out.
    """

    def __init__(
        self,
        tensor: QuantizedTensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        kernel: Kernel | None = None,
    ) -> None:
        super().__init__()
        self._problem = problem_of(tensor, dtype, device)
        self._kernel = kernel or select(self._problem)
        self._names: list[str] = []
        zeros = tensor.parameters.get("zeros")
        packed = self._kernel.prepare(
            _unsigned(tensor).to(device),
            self._per_row(tensor.parameters["scales"]).to(device),
            None if zeros is None else self._per_row(zeros).to(device),
            self._problem,
        )
        for name, value in packed.items():
            self.register_buffer(name, value)
            self._names.append(name)
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias.to(device, dtype), requires_grad=False)

    def _per_row(self, parameter: Tensor) -> Tensor:
        """One row of parameters for every output row, also where one serves the whole matrix."""
        return parameter.expand(self._problem.out_features, self._problem.groups)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` ``[..., in_features]``."""
        packed = {name: self.get_buffer(name) for name in self._names}
        rows = x.reshape(-1, self._problem.in_features)
        y = self._kernel.matmul(rows, packed, self._problem)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self._problem.out_features)

    @property
    def kernel(self) -> str:
        """Name of the kernel that multiplies."""
        return self._kernel.name

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self._problem.out_features * self._problem.in_features

    @property
    def weight_bytes(self) -> int:
        """Bytes held for the weight: codes and parameters as the kernel keeps them."""
        return sum(self.get_buffer(name).nbytes for name in self._names)


def _unsigned(tensor: QuantizedTensor) -> Tensor:
    """The codes as uint8 from 0: kernels know no signed codes."""
    if not tensor.scheme.symmetric:
        return tensor.codes
    return (tensor.codes.short() + (1 << (tensor.scheme.bits - 1))).to(torch.uint8)
