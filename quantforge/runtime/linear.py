"""A linear layer whose weight stays packed in memory.

It describes its `QuantizedTensor` as a problem of the kernels (which grid, which parameters, in their plain terms;
nothing is rounded on the way), gives codes and parameters to the first kernel that accepts them, keeps only what that
kernel prepared, and multiplies. Which kernel it was is part of every report. A kernel that fails on this machine, which
is found out at once, gives the weight to the fallback kernel, and ``find_kernel_failure`` says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantforge.events import Event
from quantforge.grids import Tile
from quantforge.packers import packer_of
from quantforge.packers.input_rounding import simulate
from quantforge.packers.tensor import OF_INPUT, QuantizedTensor
from quantforge_kernels import fallback
from quantforge_kernels.cpu import many_rows
from quantforge_kernels.grouped import GroupedKernel
from quantforge_kernels.layers import add_bias, linear
from quantforge_kernels.matmul_spec import Kernel, MatmulSpec, PackedWeight
from quantforge_kernels.select import find_kernel_failure, select_kernel

if TYPE_CHECKING:
    from quantforge.runtime.tensor_parallel import Cut, Share

EXACT = 16  # bits of a rounded activation, which hold all that bfloat16 does
DECODED_BYTES = 256 << 20  # of decoded weights that are kept while a small model is evaluated


@dataclass(frozen=True, slots=True)
class KernelWeight:
    """A quantized weight as kernels take it: the product it is for, and what `Kernel.prepare` lays out."""

    problem: MatmulSpec
    codes: Tensor
    parameters: dict[str, Tensor]


def kernel_weight(
    tensor: QuantizedTensor, dtype: torch.dtype, device: torch.device
) -> KernelWeight:
    """Return a quantized weight as kernels take it; the packer of its grid says what codes and parameters are.

    Args:
        tensor: the weight.
        dtype: of the activations that it is multiplied by.
        device: where it is kept.
    """
    scheme, (rows, columns) = tensor.scheme, tensor.shape
    own = {key: part for key, part in tensor.parameters.items() if key not in OF_INPUT}
    terms = packer_of(scheme).kernel_terms(replace(tensor, parameters=own))
    parameters = terms.parameters
    tile_rows = scheme.granularity.rows if isinstance(scheme.granularity, Tile) else 1
    problem = MatmulSpec(
        out_features=rows,
        in_features=columns,
        bits=scheme.bits,
        group_size=scheme.group_size(columns),
        symmetric=not {"zeros", "mins"} & parameters.keys(),
        dtype=dtype,
        device=str(device),
        grid=terms.grid,
        tile_rows=tile_rows,
        activation_kind=_activation(tensor),
        has_minima="mins" in parameters,
        superblock_size=terms.superblock,
        lower_encoding=terms.lower,
    )
    if tile_rows == 1:  # one row of parameters for every row, also where one serves the matrix
        for name in {"scales", "zeros", "mins"} & parameters.keys():
            parameters[name] = parameters[name].expand(rows, -1)
    moved = {name: value.to(device) for name, value in parameters.items()}
    return KernelWeight(problem, terms.codes.to(device), moved)


def _activation(tensor: QuantizedTensor) -> str:
    """Name the input that a kernel can quantize on the way: whole rows, to a range that it finds itself; "" if none."""
    taken = tensor.input
    if taken is None or not taken.dynamic or taken.granularity != "token" or taken.threshold:
        return ""
    return {"int8": "int8", "fp8_e4m3": "fp8"}.get(taken.grid, "")


class PackedWeights(nn.Module, ABC):
    """A module whose weights stay packed: they are held as the kernel that was chosen keeps them.

    Attributes:
        chosen: the kernel.
    """

    chosen: Kernel | GroupedKernel

    def __init__(self) -> None:
        super().__init__()
        self._names: list[str] = []

    def hold(self, packed: PackedWeight) -> None:
        """Keep the tensors that the kernel prepared, in the place of those before."""
        for name in self._names:
            delattr(self, name)
        self._names = list(packed)
        for name, value in packed.items():
            self.register_buffer(name, value)

    @property
    def packed(self) -> PackedWeight:
        """Return the weights as the kernel keeps them."""
        return {name: self.get_buffer(name) for name in self._names}

    @property
    def kernel(self) -> str:
        """Return the name of the kernel that multiplies."""
        return self.chosen.name

    @property
    def weight_bytes(self) -> int:
        """Return the bytes held for the weights, parameters of their grid included."""
        return sum(value.nbytes for value in self.packed.values())

    @property
    @abstractmethod
    def weights(self) -> int:
        """Return the number of weights."""

    @abstractmethod
    def round_inputs(self, bits: int) -> bool:
        """Let a kernel round activations to so many bits (`MatmulSpec.input_bits`); return whether one does."""

    @abstractmethod
    def keep_decoded(self, keep: bool) -> None:
        """Keep what the fallback kernel decodes for the products that follow, or let go of it."""


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
        weight = kernel_weight(tensor, dtype, device)
        weight = weight if cut is None else cut.kernel_weight(weight)
        self.problem = weight.problem
        self.chosen: Kernel = select_kernel(weight.problem)
        self._input = None if weight.problem.activation_kind else tensor.input
        scale, columns = tensor.parameters.get("input_scale"), tensor.outlier_columns
        self._input_scale = None if scale is None else scale.to(device)
        self._columns = None if columns is None else columns.to(device)
        self._outliers: Tensor | None = None  # [columns, out]: what is multiplied in 16 bits
        if columns is not None:
            kept = tensor.parameters["outlier_weight"][:, : len(columns)]
            self._outliers = kept.T.contiguous().to(device)
        self._tiles: dict[int, Tensor] | None = None  # decoded ones, see `decoded_once`
        self.failure: str | None = None
        self.hold(self._prepared(weight))
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias.to(device, dtype), requires_grad=False)

    def _prepared(self, weight: KernelWeight) -> PackedWeight:
        """Prepare the weight and try the kernel; where it fails, the fallback kernel takes the weight."""
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
            seen = simulate(rows, self._input, self._input_scale, self._columns)
            if self._columns is not None:
                seen[:, self._columns] = 0
            rows = seen.to(x.dtype)
        if self._tiles is None:
            y = self.chosen.matmul(rows, self.packed, self.problem)
        else:
            y = fallback.matmul(rows, self.packed, self.problem, self._tiles)
        if self._outliers is not None:
            taken = x.reshape(-1, self.problem.in_features)[:, self._columns]
            y = y + many_rows.matmul(taken, self._outliers)
        if self.bias is not None:
            y = add_bias(y, self.bias)
        return y.view(*x.shape[:-1], self.problem.out_features)

    def decoded_rows(self, part: slice) -> Tensor | None:
        """Return some decoded rows of the weight, in the type of activations; None but of the fallback kernel."""
        exact_input = self.takes_plain_input and not self.problem.activation_kind
        if self.chosen is not fallback.KERNEL or not exact_input:
            return None
        return fallback.decode_rows(self.packed, self.problem, part).to(self.problem.dtype)

    @property
    def weight(self) -> Tensor:
        """Return ``[out_features, in_features]`` of NaN without memory, for blocks that ask a weight for its type."""
        empty = torch.full((), torch.nan, dtype=self.problem.dtype, device=self._device)
        return empty.expand(self.problem.out_features, self.problem.in_features)

    @property
    def takes_plain_input(self) -> bool:
        """Return whether ``x`` goes to the kernel as it comes; the kernel may still round it."""
        return self._input is None

    @property
    def weights(self) -> int:
        """Return the number of weights."""
        return self.problem.out_features * self.problem.in_features

    @property
    def weight_bytes(self) -> int:
        """Return the bytes held for the weight: codes and parameters as the kernel keeps them, and 16-bit columns."""
        outliers = 0 if self._outliers is None else self._outliers.nbytes
        return outliers + super().weight_bytes

    def round_inputs(self, bits: int) -> bool:
        """Round activations, by a kernel of the same layout or in place of the fallback; return whether one does."""
        problem = replace(self.problem, input_bits=bits)
        chosen, packed = select_kernel(problem), self.packed
        if chosen is self.chosen:
            return False
        if chosen.prepare is not self.chosen.prepare:
            if self.chosen is not fallback.KERNEL:
                return False
            packed = chosen.prepare(*fallback.unpack_weight(packed, self.problem), problem)
        if find_kernel_failure(chosen, packed, problem) is not None:
            return False
        self.problem, self.chosen = problem, chosen
        self.hold(packed)
        return True

    def keep_decoded(self, keep: bool) -> None:
        """Keep what the fallback kernel decodes for the products that follow, or let go of it."""
        self._tiles = {} if keep and self.chosen is fallback.KERNEL else None


class SummedLinear(nn.Module):
    """A linear layer of which every process holds some columns.

    Args:
        part: what is here of it; its bias is taken from it.
        share: of this process.
    """

    def __init__(self, part: nn.Module, share: Share) -> None:
        super().__init__()
        self.ranks = share.ranks
        self._total = share.total
        bias = part.bias
        assert bias is None or isinstance(bias, Tensor)
        self.bias = bias
        if bias is not None:
            part.register_parameter("bias", None)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """Multiply this process's ``x`` ``[..., columns]``; return the sum of all, ``[..., out_features]``."""
        y = self._total(multiply(self.part, x.reshape(-1, x.shape[-1])))
        y = y if self.bias is None else add_bias(y, self.bias)
        return y.view(*x.shape[:-1], -1)


def multiply(module: nn.Module, x: Tensor) -> Tensor:
    """Multiply rows by a layer, packed or not."""
    if type(module) is nn.Linear:
        return linear(x, module.weight, module.bias)
    y: Tensor = module(x)
    return y


def ranks_of(model: nn.Module) -> int:
    """Return how many processes share a model; 1: it is whole."""
    return next((one.ranks for one in model.modules() if isinstance(one, SummedLinear)), 1)


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
