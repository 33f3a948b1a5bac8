"""A linear layer whose weight stays packed in memory.

It gives the codes and parameters of a `QuantizedTensor` to the first kernel that accepts them, keeps
only what that kernel prepared, and multiplies. Which kernel it was is part of every report. A kernel
that fails on this machine, which is found out at once, gives the weight back to the reference, and
``failure`` says so.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantforge.runtime import activations
from quantforge.runtime.problems import Stated, state
from quantforge.tensor import QuantizedTensor
from quantforge_kernels import reference
from quantforge_kernels.probe import failure
from quantforge_kernels.problem import Kernel, Packed
from quantforge_kernels.select import select


class PackedLinear(nn.Module):
    """``y = x W^T + bias`` with a quantized ``W`` ``[out_features, in_features]``.

    Args:
        tensor: the weight.
        bias: ``[out_features]``, or None.
        dtype: of activations.
        device: where the weight is kept.
        kernel: to be used; the first that accepts the problem when left out.

    Attributes:
        problem: what is multiplied.
        chosen: the kernel.
        failure: why the kernel that was meant for it does not multiply it, or None.

    Raises:
        RefusedError: its input is quantized in a way that is not computed here.
        ValueError: no kernel knows its grid (see `problems.known`).
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
        stated = state(tensor, dtype, device)
        if stated is None:
            raise ValueError(f"no kernel knows {tensor.scheme}")
        self.problem = stated.problem
        self.chosen = kernel or select(stated.problem)
        self._input = None if stated.problem.activation else tensor.input
        if self._input is not None:
            activations.check(self._input)
        self._input_scale: Tensor | None = None
        if tensor.input is not None and not tensor.input.dynamic:
            self._input_scale = tensor.parameters["input_scale"].to(device)
        self.failure: str | None = None
        packed = self._prepared(stated)
        self._names = list(packed)
        for name, value in packed.items():
            self.register_buffer(name, value)
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias.to(device, dtype), requires_grad=False)

    def _prepared(self, stated: Stated) -> Packed:
        """Prepare the weight, and try the kernel where it was compiled for this machine."""
        packed = self.chosen.prepare(stated.codes, stated.parameters, stated.problem)
        if self.chosen.restore is None:
            return packed
        self.failure = failure(self.chosen, packed, stated.problem)
        if self.failure is None:
            return packed
        self.failure = f"{self.chosen.name}: {self.failure}"
        self.chosen = reference.KERNEL
        return self.chosen.prepare(stated.codes, stated.parameters, stated.problem)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` ``[..., in_features]``."""
        rows = x.reshape(-1, self.problem.in_features)
        if self._input is not None:
            rows = activations.rounded(rows, self._input, self._input_scale)
        y = self.chosen.matmul(rows, self.packed, self.problem)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.problem.out_features)

    @property
    def packed(self) -> Packed:
        """The weight as the kernel keeps it."""
        return {name: self.get_buffer(name) for name in self._names}

    @property
    def takes_plain_input(self) -> bool:
        """Whether ``x`` is multiplied as it comes."""
        return self._input is None

    @property
    def kernel(self) -> str:
        """Name of the kernel that multiplies."""
        return self.chosen.name

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.problem.out_features * self.problem.in_features

    @property
    def weight_bytes(self) -> int:
        """Bytes held for the weight: codes and parameters as the kernel keeps them."""
        return sum(value.nbytes for value in self.packed.values())
