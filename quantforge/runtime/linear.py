"""Linear layers that keep quantized weights packed in memory and multiply with a matching kernel.

A layer describes its `QuantizedTensor` to the kernels (grid and parameters, without further rounding), passes codes and
parameters to the first kernel that accepts them, keeps only the tensors that this kernel prepared, and multiplies.
Reports list the kernel. Every kernel is tried once when the layer is created; if it fails on this machine, the fallback
kernel is used and ``failure`` holds the reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantforge.events import Event
from quantforge.packers.input_rounding import fake_quantize_input
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.kernel_weight import KernelWeight, to_kernel_weight
from quantforge_kernels import fallback
from quantforge_kernels.cpu import many_rows
from quantforge_kernels.grouped import GroupedKernel
from quantforge_kernels.layers import add_bias, linear
from quantforge_kernels.matmul_spec import Kernel, PackedWeight
from quantforge_kernels.select import find_kernel_failure, select_kernel

if TYPE_CHECKING:
    from quantforge.runtime.tensor_parallel import TensorParallelRank, WeightShard

UNROUNDED_BITS = 16  # activations of this many bits are not rounded: it is the width of bfloat16
# Most bytes of decoded weights that are kept while a small model is evaluated
MAX_DECODED_BYTES = 256 << 20


class PackedWeights(nn.Module, ABC):
    """Base class of modules that hold quantized weights in the layout of the selected kernel.

    Attributes:
        chosen: the selected kernel.
    """

    chosen: Kernel | GroupedKernel

    def __init__(self) -> None:
        super().__init__()
        self._buffer_names: list[str] = []

    def store_packed(self, packed: PackedWeight) -> None:
        """Store the tensors that the kernel prepared as buffers, replacing earlier ones."""
        for name in self._buffer_names:
            delattr(self, name)
        self._buffer_names = list(packed)
        for name, value in packed.items():
            self.register_buffer(name, value)

    @property
    def packed(self) -> PackedWeight:
        """Return the weights in the layout of the kernel."""
        return {name: self.get_buffer(name) for name in self._buffer_names}

    @property
    def kernel(self) -> str:
        """Return the name of the kernel that multiplies."""
        return self.chosen.name

    @property
    def weight_bytes(self) -> int:
        """Return the memory of the weights in bytes, including quantization parameters."""
        return sum(value.nbytes for value in self.packed.values())

    @property
    @abstractmethod
    def weights(self) -> int:
        """Return the number of weights."""

    @abstractmethod
    def round_inputs(self, bits: int) -> bool:
        """Switch to a kernel that rounds activations to ``bits`` bits (`MatmulSpec.input_bits`); return success.

        The current kernel is kept if there is none.
        """

    @abstractmethod
    def cache_decoded(self, enabled: bool) -> None:
        """Enable or disable caching of the tiles that the fallback kernel decodes."""


class PackedLinear(PackedWeights):
    """``y = x W^T + bias`` with a quantized ``W`` ``[out_features, in_features]``.

    Args:
        tensor: the quantized weight.
        bias: ``[out_features]``, or None.
        dtype: type of the activations.
        device: device of the weight.
        shard: the part of the weight that this process holds, under tensor parallelism; the bias is not sliced.

    Attributes:
        problem: description of the product for the kernels.
        chosen: the selected kernel.
        failure: why the preferred kernel is not used, or None.
    """

    def __init__(
        self,
        tensor: QuantizedTensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        shard: WeightShard | None = None,
    ) -> None:
        super().__init__()
        self._device = device
        weight = to_kernel_weight(tensor, dtype, device)
        weight = weight if shard is None else shard.slice_kernel_weight(weight)
        self.problem = weight.problem
        self.chosen: Kernel = select_kernel(weight.problem)
        self._input = None if weight.problem.activation_kind else tensor.input
        scale, columns = tensor.parameters.get("input_scale"), tensor.outlier_columns
        self._input_scale = None if scale is None else scale.to(device)
        self._outlier_columns = None if columns is None else columns.to(device)
        self._outliers: Tensor | None = None  # [columns, out]: outlier columns kept in 16 bits
        if columns is not None:
            outlier_weight = tensor.parameters["outlier_weight"][:, : len(columns)]
            self._outliers = outlier_weight.T.contiguous().to(device)
        # Cached decoded tiles, see `cache_decoded_weights`
        self._decoded_tiles: dict[int, Tensor] | None = None
        self.failure: str | None = None
        self.store_packed(self._prepare_with_fallback(weight))
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias.to(device, dtype), requires_grad=False)

    def _prepare_with_fallback(self, weight: KernelWeight) -> PackedWeight:
        """Prepare the weight for the selected kernel and try it; switch to the fallback kernel if it fails."""
        packed = self.chosen.prepare(weight.codes, weight.parameters, weight.problem)
        if self.chosen is fallback.KERNEL:
            return packed
        self.failure = find_kernel_failure(self.chosen, packed, weight.problem)
        if self.failure is None:
            return packed
        self.failure = f"{self.chosen.name}: {self.failure}"
        self.chosen = fallback.KERNEL
        return self.chosen.prepare(weight.codes, weight.parameters, weight.problem)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` ``[..., in_features]``; return ``[..., out_features]``."""
        rows = x.reshape(-1, self.problem.in_features)
        if self._input is not None:
            rounded_input = fake_quantize_input(
                rows, self._input, self._input_scale, self._outlier_columns
            )
            if self._outlier_columns is not None:
                rounded_input[:, self._outlier_columns] = 0
            rows = rounded_input.to(x.dtype)
        if self._decoded_tiles is None:
            y = self.chosen.matmul(rows, self.packed, self.problem)
        else:
            y = fallback.matmul(rows, self.packed, self.problem, self._decoded_tiles)
        if self._outliers is not None:
            outlier_input = x.reshape(-1, self.problem.in_features)[:, self._outlier_columns]
            y = y + many_rows.matmul(outlier_input, self._outliers)
        if self.bias is not None:
            y = add_bias(y, self.bias)
        return y.view(*x.shape[:-1], self.problem.out_features)

    def decoded_rows(self, rows: slice) -> Tensor | None:
        """Decode some rows of the weight to the activation type; None unless the fallback kernel is used."""
        exact_input = self.takes_plain_input and not self.problem.activation_kind
        if self.chosen is not fallback.KERNEL or not exact_input:
            return None
        return fallback.decode_rows(self.packed, self.problem, rows).to(self.problem.dtype)

    @property
    def weight(self) -> Tensor:
        """Return a NaN placeholder ``[out_features, in_features]`` without storage, for code that reads its dtype."""
        empty = torch.full((), torch.nan, dtype=self.problem.dtype, device=self._device)
        return empty.expand(self.problem.out_features, self.problem.in_features)

    @property
    def takes_plain_input(self) -> bool:
        """Return whether ``x`` is passed to the kernel unchanged; the kernel itself may still round it."""
        return self._input is None

    @property
    def weights(self) -> int:
        """Return the number of weights."""
        return self.problem.out_features * self.problem.in_features

    @property
    def weight_bytes(self) -> int:
        """Return the memory of the weight in bytes: packed codes, parameters and 16-bit outlier columns."""
        outliers = 0 if self._outliers is None else self._outliers.nbytes
        return outliers + super().weight_bytes

    def round_inputs(self, bits: int) -> bool:
        """Switch to a kernel that rounds activations, if one exists for the layout or replaces the fallback kernel."""
        problem = replace(self.problem, input_bits=bits)
        kernel, packed = select_kernel(problem), self.packed
        if kernel is self.chosen:
            return False
        if kernel.prepare is not self.chosen.prepare:
            if self.chosen is not fallback.KERNEL:
                return False
            packed = kernel.prepare(*fallback.unpack_weight(packed, self.problem), problem)
        if find_kernel_failure(kernel, packed, problem) is not None:
            return False
        self.problem, self.chosen = problem, kernel
        self.store_packed(packed)
        return True

    def cache_decoded(self, enabled: bool) -> None:
        """Enable or disable caching of the tiles that the fallback kernel decodes."""
        self._decoded_tiles = {} if enabled and self.chosen is fallback.KERNEL else None


class RowParallelLinear(nn.Module):
    """A linear layer whose input columns are split over processes; their outputs are summed (row parallelism).

    Args:
        part: the columns that this process holds; the bias is moved out of it.
        share: tensor-parallel rank of this process.
    """

    def __init__(self, linear: nn.Module, rank: TensorParallelRank) -> None:
        super().__init__()
        self.ranks = rank.ranks
        self._total = rank.all_reduce
        bias = linear.bias
        assert bias is None or isinstance(bias, Tensor)
        self.bias = bias
        if bias is not None:
            linear.register_parameter("bias", None)
        self.part = linear

    def forward(self, x: Tensor) -> Tensor:
        """Multiply this process's ``x`` ``[..., columns]``; return the sum over processes, ``[..., out_features]``."""
        y = self._total(apply_linear(self.part, x.reshape(-1, x.shape[-1])))
        y = y if self.bias is None else add_bias(y, self.bias)
        return y.view(*x.shape[:-1], -1)


def apply_linear(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a plain or packed linear layer to rows ``[rows, in_features]``."""
    if type(module) is nn.Linear:
        return linear(x, module.weight, module.bias)
    y: Tensor = module(x)
    return y


def tensor_parallel_size(model: nn.Module) -> int:
    """Return the number of tensor-parallel processes of a model; 1 if it is not split."""
    return next(
        (module.ranks for module in model.modules() if isinstance(module, RowParallelLinear)), 1
    )


@contextmanager
def cache_decoded_weights(model: nn.Module) -> Iterator[None]:
    """Context manager that caches the decoded weights of a small CPU model for all products in the block.

    Models whose decoded weights exceed `MAX_DECODED_BYTES` are not cached. Results are identical.
    """
    layers = [module for module in model.modules() if isinstance(module, PackedWeights)]
    size = sum(layer.weights * 4 for layer in layers)
    small = size <= MAX_DECODED_BYTES and all(
        value.device.type == "cpu" for value in model.buffers()
    )
    for layer in layers:
        layer.cache_decoded(small)
    try:
        yield
    finally:
        for layer in layers:
            layer.cache_decoded(False)


def round_inputs(model: nn.Module, bits: int) -> list[Event]:
    """Switch packed layers to kernels that round activations to integers of ``bits`` bits, where one exists.

    Returns:
        An event if some layers keep 16-bit activations, otherwise an empty list.
    """
    packed = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, PackedWeights)
    }
    unrounded = {
        name: layer.weights for name, layer in packed.items() if not layer.round_inputs(bits)
    }
    if packed and not unrounded:
        return []
    if not packed:
        detail = (
            f"no linear is quantized, and with no others are activations rounded to {bits} bits"
        )
        return [Event("kernel-fallback", "model", detail)]
    total = sum(layer.weights for layer in packed.values())
    detail = f"{sum(unrounded.values()):,} of {total:,} packed weights keep activations of {UNROUNDED_BITS} bits"
    return [Event("kernel-fallback", next(iter(unrounded)), detail)]
