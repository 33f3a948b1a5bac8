"""A linear layer whose weight stays packed in memory.

It gives the codes and parameters of a `QuantizedTensor` to the first kernel that accepts them, keeps
only what that kernel prepared, and multiplies. Which kernel it was is part of every report. A kernel
that fails on this machine, which is found out at once, gives the weight back to the reference, and
``failure`` says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantforge.events import Event
from quantforge.packers.input_rounding import simulate
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.problems import Stated, state
from quantforge.runtime.weight_cuts import Cut
from quantforge_kernels import reference
from quantforge_kernels.cpu import many_rows
from quantforge_kernels.layers import add_bias
from quantforge_kernels.probe import failure
from quantforge_kernels.problem import Packed
from quantforge_kernels.select import select

EXACT = 16  # bits of a rounded activation, which hold all that bfloat16 does
DECODED_BYTES = 256 << 20  # of decoded weights that are kept while a small model is evaluated


class PackedWeights(nn.Module, ABC):
    """A module whose weights stay packed, for whoever counts them."""

    @property
    @abstractmethod
    def kernel(self) -> str:
        """Return the name of the kernel that multiplies."""

    @property
    @abstractmethod
    def weights(self) -> int:
        """Return the number of weights."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Return the bytes held for the weights, parameters of their grid included."""

    @abstractmethod
    def round_inputs(self, bits: int) -> bool:
        """Let a kernel round activations to so many bits (`Problem.input_bits`); return whether one does."""

    @abstractmethod
    def keep_decoded(self, keep: bool) -> None:
        """Keep what the reference kernel decodes for the products that follow, or let go of it."""


class PackedLinear(PackedWeights):
    """``y = x W^T + bias`` with a quantized ``W`` ``[out_features, in_features]``.

    Args:
        tensor: the weight.
        bias: ``[out_features]``, or None.
        dtype: of activations.
        device: where the weight is kept.
        cut: of the weight, where a part of it is held; the bias is as it is to be.

    Attributes:
        problem: what is multiplied.
        chosen: the kernel.
        failure: why the kernel that was meant for it does not multiply it, or None.
    """

    def __init__(
        self,
        tensor: QuantizedTensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        cut: Cut | None = None,
    ) -> None:
        super().__init__()
        self._device = device
        stated = state(tensor, dtype, device)
        stated = stated if cut is None else cut.stated(stated)
        self.problem = stated.problem
        self.chosen = select(stated.problem)
        self._input = None if stated.problem.activation else tensor.input
        scale, columns = tensor.parameters.get("input_scale"), tensor.outlier_columns
        self._input_scale = None if scale is None else scale.to(device)
        self._columns = None if columns is None else columns.to(device)
        self._outliers: Tensor | None = None  # [columns, out]: what is multiplied in 16 bits
        if columns is not None:
            kept = tensor.parameters["outlier_weight"][:, : len(columns)]
            self._outliers = kept.T.contiguous().to(device)
        self._kept: dict[int, Tensor] | None = None  # decoded tiles, see `decoded_once`
        self.failure: str | None = None
        self._names: list[str] = []
        self._hold(self._prepared(stated))
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias.to(device, dtype), requires_grad=False)

    def _prepared(self, stated: Stated) -> Packed:
        """Prepare the weight and try the kernel; where it fails, the reference takes the weight (`failure`: why)."""
        packed = self.chosen.prepare(stated.codes, stated.parameters, stated.problem)
        if self.chosen.restore is None:
            return packed
        self.failure = failure(self.chosen, packed, stated.problem)
        if self.failure is None:
            return packed
        self.failure = f"{self.chosen.name}: {self.failure}"
        self.chosen = reference.KERNEL
        return self.chosen.prepare(stated.codes, stated.parameters, stated.problem)

    def _hold(self, packed: Packed) -> None:
        for name in self._names:
            delattr(self, name)
        self._names = list(packed)
        for name, value in packed.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` ``[..., in_features]``; return ``[..., out_features]``."""
        rows = x.reshape(-1, self.problem.in_features)
        if self._input is not None:
            seen = simulate(rows, self._input, self._input_scale, self._columns)
            if self._columns is not None:
                seen[:, self._columns] = 0
            rows = seen.to(x.dtype)
        if self._kept is None:
            y = self.chosen.matmul(rows, self.packed, self.problem)
        else:
            y = reference.matmul(rows, self.packed, self.problem, self._kept)
        if self._outliers is not None:
            taken = x.reshape(-1, self.problem.in_features)[:, self._columns]
            y = y + many_rows.matmul(taken, self._outliers)
        if self.bias is not None:
            y = add_bias(y, self.bias)
        return y.view(*x.shape[:-1], self.problem.out_features)

    def rows(self, part: slice) -> Tensor | None:
        """Return some decoded rows of the weight, in the type of activations; None but of the reference kernel."""
        plain = self.takes_plain_input and not self.problem.activation
        if self.chosen is not reference.KERNEL or not plain:
            return None
        return reference.decode_rows(self.packed, self.problem, part).to(self.problem.dtype)

    @property
    def weight(self) -> Tensor:
        """Return ``[out_features, in_features]`` of NaN without memory, for blocks that ask a weight for its type."""
        empty = torch.full((), torch.nan, dtype=self.problem.dtype, device=self._device)
        return empty.expand(self.problem.out_features, self.problem.in_features)

    @property
    def packed(self) -> Packed:
        """Return the weight as the kernel keeps it."""
        return {name: self.get_buffer(name) for name in self._names}

    @property
    def takes_plain_input(self) -> bool:
        """Return whether ``x`` goes to the kernel as it comes; the kernel may still round it."""
        return self._input is None

    @property
    def kernel(self) -> str:
        """Return the name of the kernel that multiplies."""
        return self.chosen.name

    @property
    def weights(self) -> int:
        """Return the number of weights."""
        return self.problem.out_features * self.problem.in_features

    @property
    def weight_bytes(self) -> int:
        """Return the bytes held for the weight: codes and parameters as the kernel keeps them, and 16-bit columns."""
        outliers = 0 if self._outliers is None else self._outliers.nbytes
        return outliers + sum(value.nbytes for value in self.packed.values())

    def round_inputs(self, bits: int) -> bool:
        """Let a kernel of the same layout, or in the reference's place, round activations; return whether one does."""
        problem = replace(self.problem, input_bits=bits)
        chosen, packed = select(problem), self.packed
        if chosen is self.chosen:
            return False
        if chosen.prepare is not self.chosen.prepare:
            if self.chosen is not reference.KERNEL:
                return False
            packed = chosen.prepare(*reference.restore(packed, self.problem), problem)
        if failure(chosen, packed, problem) is not None:
            return False
        self.problem, self.chosen = problem, chosen
        self._hold(packed)
        return True

    def keep_decoded(self, keep: bool) -> None:
        """Keep what the reference kernel decodes for the products that follow, or let go of it."""
        self._kept = {} if keep and self.chosen is reference.KERNEL else None


@contextmanager
def decoded_once(model: nn.Module) -> Iterator[None]:
    """Decode the weights of a small model on a processor once, for all products of a ``with`` block.

    Nothing is kept of a model that would take more than `DECODED_BYTES` so. Values are the same.
    """
    layers = [module for module in model.modules() if isinstance(module, PackedWeights)]
    size = sum(layer.weights * 4 for layer in layers)
    small = size <= DECODED_BYTES and all(value.device.type == "cpu" for value in model.buffers())
    for layer in layers:
        layer.keep_decoded(small)
    try:
        yield
    finally:
        for layer in layers:
            layer.keep_decoded(False)


def round_inputs(model: nn.Module, bits: int) -> list[Event]:
    """Let products of packed weights round activations to integers of so many bits, where a kernel does.

    Returns:
        An event, where one of them keeps 16 bits.
    """
    if bits == EXACT:
        return []
    packed = {name: one for name, one in model.named_modules() if isinstance(one, PackedWeights)}
    kept = {name: one.weights for name, one in packed.items() if not one.round_inputs(bits)}
    if packed and not kept:
        return []
    if not packed:
        detail = (
            f"no linear is quantized, and with no others are activations rounded to {bits} bits"
        )
        return [Event("kernel-fallback", "model", detail)]
    whole = sum(one.weights for one in packed.values())
    detail = f"{sum(kept.values()):,} of {whole:,} packed weights keep activations of {EXACT} bits"
    return [Event("kernel-fallback", next(iter(kept)), detail)]
