"""A linear whose scales are learned, and maybe its codes.

Every grid's values are a sum over its scales (and minima, and what a block multiplies them with): each times what the
codes make of it. So the gradient of one is that of the matrix times what the packer decodes with it 1 and the others 0.
Codes, and the integers that groups have as scales under a scale of their block, are learned in whole steps, where these
are even: the gradient is that of the matrix times what the packer decodes with 1, less what it decodes with 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantforge.model.learned_codes import FIRST, SECOND, LearnedCodes
from quantforge.model.tuning_bounds import MOST
from quantforge.packers import packer_of
from quantforge.packers.integer import code_range
from quantforge.packers.tensor import OF_INPUT, OF_MATRIX, QuantizedTensor

CODES = "codes"
INTEGERS = ("scales", "mins")  # parameters that are integers under a scale of their block
EPSILON = 1e-8  # of Adam
RATE = 1e-2  # of factors under codes of 0 bits
IN_BLOCKS = 0.3  # of it, where one multiplies the scales of all groups of a block


@dataclass(slots=True, eq=False)
class Learned:
    """One tensor of scales, or the gains of one norm.

    Attributes:
        start: float32, what it was.
        dtype: in which it is stored.
        factor: what is learned, 0 for no change.
        rate: with which it is learned at first.
        offset: that the norm adds to what is stored.
        known: a factor, and what is stored at it.
    """

    start: Tensor
    dtype: torch.dtype
    factor: Tensor
    rate: float
    offset: float = 0.0
    known: tuple[Tensor, Tensor] | None = None
    _moments: tuple[Tensor, Tensor] | None = None
    _steps: int = 0

    @classmethod
    def of(cls, value: Tensor, dtype: torch.dtype, rate: float, offset: float = 0.0) -> Learned:
        """Begin with a value."""
        start = value.detach().float().clone()
        return cls(start, dtype, torch.zeros_like(start), rate, offset)

    @classmethod
    def at(cls, start: Tensor, now: Tensor, rate: float, offset: float) -> Learned:
        """Go on with a value that was ``start`` and is stored as ``now``."""
        one = cls.of(start, now.dtype, rate, offset)
        factor = (now.float() + offset) / (one.start + offset) - 1
        one.factor.copy_(torch.where(factor.isfinite(), factor, 0).clamp(-MOST, MOST))
        one.known = (one.factor.clone(), now)
        return one

    def stored(self) -> Tensor:
        """Return the present value in its stored type."""
        start = self.start + self.offset
        value = (start + start * self.factor - self.offset).to(self.dtype)
        seen = value.float()  # of floats of 8 bits torch compares none
        kept = seen.isfinite() & ((seen != 0) | (self.start == 0))
        found = torch.where(kept, seen, self.start)
        if self.known is not None:  # to the last bit
            factor, now = self.known
            found = torch.where(self.factor == factor, now.float(), found)
        return found.to(self.dtype)

    def step(self, gradient: Tensor | None, share: float) -> None:
        """Move the factor as Adam does, within its bounds; nothing without a gradient.

        Of torch's Adam only the formula is taken: importing it takes two seconds and 160 MB.

        Args:
            gradient: of the loss by the factor.
            share: of the first rate that is left.
        """
        if gradient is None:
            return
        if self._moments is None:
            self._moments = torch.zeros_like(gradient), torch.zeros_like(gradient)
        self._steps += 1
        mean, square = self._moments
        mean.lerp_(gradient, 1 - FIRST)
        square.lerp_(gradient.square(), 1 - SECOND)
        size = (square / (1 - SECOND**self._steps)).sqrt_().add_(EPSILON)
        rate = self.rate * share / (1 - FIRST**self._steps)
        self.factor.sub_(mean / size, alpha=rate).clamp_(-MOST, MOST)

    def gradient(self, of_value: Tensor) -> Tensor:
        """Return the gradient of the factor, given that of the value."""
        return of_value * (self.start + self.offset)


@dataclass(slots=True, eq=False)
class TunedMatrix:
    """A linear whose scales are learned.

    Attributes:
        tensor: as it was written.
        scales: what of its parameters is learned, by their names.
        steps: what is learned in whole steps: integers among its parameters by their names, and its `CODES`.
    """

    tensor: QuantizedTensor
    scales: dict[str, Learned]
    steps: dict[str, LearnedCodes]

    @classmethod
    def of(cls, tensor: QuantizedTensor, rate: float) -> TunedMatrix:
        """Begin with a linear as it was written.

        Args:
            tensor: the linear.
            rate: with which codes and integers are learned at first, 0 for frozen ones.
        """
        most = RATE * (IN_BLOCKS if tensor.scheme.block else 1.0)
        first = most / 2 ** (tensor.scheme.weight_bits / 2)
        scales = {
            key: Learned.of(value, value.dtype, first)
            for key, value in tensor.parameters.items()
            if value.is_floating_point() and key not in (*OF_INPUT, *OF_MATRIX)
        }
        return cls(tensor, scales, _in_steps(tensor, rate) if rate else {})

    def result(self) -> QuantizedTensor:
        """Return the linear as it is now."""
        changed = {key: one.stored() for key, one in self.scales.items()}
        changed |= {key: one.stored() for key, one in self.steps.items()}
        codes = changed.pop(CODES, self.tensor.codes)
        return replace(self.tensor, codes=codes, parameters={**self.tensor.parameters, **changed})

    def of_scales(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the gradients of the factors, given that of the matrix ``[out_features, in_features]``."""
        now, found = self.result(), {}
        none = {key: torch.zeros_like(one.start) for key, one in self.scales.items()}
        for key, one in self.scales.items():
            products = gradient * _decoded(now, none | {key: torch.ones_like(one.start)})
            found[key] = one.gradient(products.reshape(*one.start.shape, -1).sum(-1))
        return found

    def of_steps(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the gradients of what is learned in steps, given that of the matrix."""
        now, found = self.result(), {}
        for key, one in self.steps.items():
            step = _decoded(now, {key: torch.ones_like(one.start)})
            step -= _decoded(now, {key: torch.zeros_like(one.start)})
            found[key] = (gradient * step).reshape(*one.start.shape, -1).sum(-1)
        return found


def _in_steps(tensor: QuantizedTensor, rate: float) -> dict[str, LearnedCodes]:
    scheme = tensor.scheme
    if scheme.integer:
        return {CODES: LearnedCodes(tensor.codes, code_range(scheme), rate)}
    if (block := scheme.block) is None:
        return {}
    found = {
        key: LearnedCodes(value, block.units, rate)
        for key, value in tensor.parameters.items()
        if block.units is not None and key in INTEGERS
    }
    if (
        block.vector == 1 and len(block.codes) == 2
    ):  # else a code picks a point, or a value of a table
        found[CODES] = LearnedCodes(tensor.codes, (block.codes[0], block.codes[1]), rate)
    return found


def _decoded(tensor: QuantizedTensor, changed: Mapping[str, Tensor]) -> Tensor:
    """Return the values of a linear with other parameters, or codes."""
    codes = changed.get(CODES, tensor.codes)
    return packer_of(tensor.scheme).decode(codes, {**tensor.parameters, **changed}, tensor.scheme)
