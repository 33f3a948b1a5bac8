"""A block whose linears are codes, under scales that are learned together with the gains of its norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantforge.architectures import Absorbs
from quantforge.model.block import BlockPart
from quantforge.model.block_rows import Batch
from quantforge.model.block_weights import TORCH_DTYPES
from quantforge.numerics.threads import one_thread
from quantforge.packers import packer_of
from quantforge.packers.tensor import QuantizedTensor

RATE = 1e-2  # of factors under codes of 0 bits


@dataclass(slots=True, eq=False)
class Learned:
    """One tensor of scales, or the gains of one norm.

    Attributes:
        start: float32, what it was.
        dtype: in which it is stored.
        factor: what is learned, 0 for no change.
        rate: with which it is learned at first.
        offset: that the norm adds to what is stored.
    """

    start: Tensor
    dtype: torch.dtype
    factor: Tensor
    rate: float
    offset: float = 0.0

    @classmethod
    def of(cls, value: Tensor, dtype: torch.dtype, rate: float, offset: float = 0.0) -> Learned:
        """Begin with a value."""
        start = value.detach().float().clone()
        return cls(start, dtype, torch.zeros_like(start, requires_grad=True), rate, offset)

    def stored(self) -> Tensor:
        """Return the present value in its stored type."""
        start = self.start + self.offset
        value = (start + start * self.factor.detach() - self.offset).to(self.dtype)
        kept = value.isfinite() & ((value != 0) | (self.start == 0))
        return torch.where(kept, value, self.start.to(self.dtype))

    def gradient(self, of_value: Tensor) -> Tensor:
        """Return the gradient of the factor, given that of the value."""
        return of_value * (self.start + self.offset)


@dataclass(slots=True, eq=False)
class TunedBlock:
    """A block whose linears are codes under scales that are learned.

    Attributes:
        part: with its kept parameters; linears are empty between two visits.
        tensors: of its quantized linears.
        scales: of the same.
        gains: of its norms, by the name of the weight.
    """

    part: BlockPart
    tensors: dict[str, QuantizedTensor]
    scales: dict[str, Learned]
    gains: dict[str, Learned]

    @classmethod
    def of(cls, part: BlockPart, tensors: dict[str, QuantizedTensor]) -> TunedBlock:
        """Begin with a block as it was written; its linears are let go of."""
        scales = {
            name: Learned.of(value := tensor.parameters["scales"], value.dtype, _rate(tensor))
            for name, tensor in tensors.items()
        }
        least = min((one.rate for one in scales.values()), default=0.0)
        gains = {
            name: Learned.of(part.parameter(name), TORCH_DTYPES[part.dtype_of(name)], least, offset)
            for name, offset in gains_of(part).items()
        }
        for name in (*(f"{name}.weight" for name in tensors), *gains):
            part.module.get_parameter(name).requires_grad_()
        block = cls(part, tensors, scales, gains)
        block.release()
        return block

    @property
    def learned(self) -> list[Learned]:
        """Return everything that is learned, in a fixed order."""
        return [*self.scales.values(), *self.gains.values()]

    def result(self, linear: str) -> QuantizedTensor:
        """Return a linear as it is now."""
        tensor = self.tensors[linear]
        scales = self.scales[linear].stored()
        return replace(tensor, parameters={**tensor.parameters, "scales": scales})

    def fill(self) -> None:
        """Give the module the weights that are meant now."""
        for name in self.tensors:
            weight = self.result(name).decode()
            self.part.module.get_parameter(f"{name}.weight").data = self._matrix(
                weight
            ).contiguous()
        for name, gains in self.gains.items():
            self.part.module.get_parameter(name).data = gains.stored().float()

    def _matrix(self, value: Tensor) -> Tensor:
        """Return a weight of the module as ``[out, in]``, or the other way round."""
        return value.T if self.part.architecture.transposed else value

    def release(self) -> None:
        """Let go of the weights of the linears."""
        for name in self.tensors:
            self.part.module.get_parameter(f"{name}.weight").data = torch.empty(0)

    def back(self, passed: tuple[Batch, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of the states that reach the block, and of all factors.

        ``passed``: one row that reaches it, and the gradients of what the block returns for it.
        """
        row, behind = passed
        names = [*(f"{name}.weight" for name in self.tensors), *self.gains]
        values = [self.part.module.get_parameter(name) for name in names]
        with one_thread(), torch.enable_grad():
            states = row.states.detach().requires_grad_()
            outputs = row._replace(states=states).run(self.part.module, note=False)
            first, *others = torch.autograd.grad(outputs, [states, *values], behind)
        matrices, vectors = others[: len(self.tensors)], others[len(self.tensors) :]
        found = []
        for (name, tensor), gradient in zip(self.tensors.items(), matrices, strict=True):
            scales = self.scales[name]
            shape = scales.start.shape
            products = (self._matrix(gradient) * _unscaled(tensor)).reshape(*shape, -1)
            found.append(scales.gradient(products.sum(-1)))
        for gains, gradient in zip(self.gains.values(), vectors, strict=True):
            found.append(gains.gradient(gradient))
        return first, found


def gains_of(part: BlockPart) -> Mapping[str, float]:
    """Return the weights of the norms whose output linears read, with what the norm adds to what is stored."""
    found = {}
    for shared in part.inputs:
        absorber = shared.absorber
        if absorber is None or absorber.kind is Absorbs.ROWS:
            continue
        name = f"{absorber.module}.weight"
        if part.has(name) and not part.is_apart(name):
            found[name] = 1.0 if absorber.kind is Absorbs.NORM_PLUS_ONE else 0.0
    return found


def _rate(tensor: QuantizedTensor) -> float:
    """Return the rate of Adam: the wider the codes, the less there is to gain, and the further one can be off."""
    return float(RATE / 2 ** (tensor.scheme.bits / 2))


def _unscaled(tensor: QuantizedTensor) -> Tensor:
    """Return the values ``[out, in]`` of the codes under scales of 1."""
    ones = {**tensor.parameters, "scales": torch.ones_like(tensor.parameters["scales"])}
    return packer_of(tensor.scheme).decode(tensor.codes, ones, tensor.scheme)
