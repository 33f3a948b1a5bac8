"""A block whose linears are codes under scales that are learned, with the gains of its norms and maybe the codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantforge.architectures import Absorbs
from quantforge.model.block import BlockPart
from quantforge.model.block_rows import Batch
from quantforge.model.block_weights import TORCH_DTYPES
from quantforge.model.learned_codes import LearnedCodes
from quantforge.model.tuned_experts import TunedExperts, Visit
from quantforge.numerics.team import side_by_side
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
        tensors: of its quantized linears, those of experts too.
        scales: of the same.
        gains: of its norms, by the name of the weight.
        own: the linears that are modules of their own.
        codes: of the linears; none where they are frozen.
        experts: those of a mixture, None without one.
    """

    part: BlockPart
    tensors: dict[str, QuantizedTensor]
    scales: dict[str, Learned]
    gains: dict[str, Learned]
    own: tuple[str, ...]
    codes: dict[str, LearnedCodes]
    experts: TunedExperts | None = field(init=False, default=None)

    @classmethod
    def of(cls, part: BlockPart, tensors: dict[str, QuantizedTensor], rate: float) -> TunedBlock:
        """Begin with a block as it was written; its linears are let go of.

        Args:
            part: the block.
            tensors: its quantized linears.
            rate: with which codes are learned at first, 0 for frozen ones.
        """
        scales = {
            name: Learned.of(value := tensor.parameters["scales"], value.dtype, _rate(tensor))
            for name, tensor in tensors.items()
        }
        least = min((one.rate for one in scales.values()), default=0.0)
        gains = {
            name: Learned.of(part.parameter(name), TORCH_DTYPES[part.dtype_of(name)], least, offset)
            for name, offset in gains_of(part).items()
        }
        own = tuple(name for name in part.own_linears if name in tensors)
        for name in (*(f"{name}.weight" for name in own), *gains):
            part.module.get_parameter(name).requires_grad_()
        codes = {name: LearnedCodes.of(tensor, rate) for name, tensor in tensors.items() if rate}
        block = cls(part, tensors, scales, gains, own, codes)
        if part.experts is not None:
            block.experts = TunedExperts(part.experts, tensors, block.weight, block.run)
        block.release()
        return block

    @property
    def learned(self) -> list[Learned]:
        """Return everything that is learned but codes, in a fixed order."""
        return [*self.scales.values(), *self.gains.values()]

    def result(self, linear: str) -> QuantizedTensor:
        """Return a linear as it is now."""
        tensor = self.tensors[linear]
        codes = self.codes[linear].stored() if self.codes else tensor.codes
        parameters = {**tensor.parameters, "scales": self.scales[linear].stored()}
        return replace(tensor, codes=codes, parameters=parameters)

    def weight(self, linear: str) -> Tensor:
        """Return the weight ``[out_features, in_features]`` of a linear as it is now."""
        return self.result(linear).decode()

    def run(self, number: int, row: Batch) -> Tensor:
        """Run the block, filled, on a row, given its place among those that pass together."""
        if self.part.experts is not None:
            self.part.experts.at(number)
        return row.run(self.part.module, note=False)

    def forward(self, rows: Sequence[Batch]) -> list[Tensor]:
        """Return what the block makes of rows; errors as `Experts.run`."""

        def passed(numbered: tuple[int, Batch]) -> Tensor:
            with one_thread(), torch.no_grad():
                return self.run(*numbered)

        self.fill()
        with self.experts.returning(rows) if self.experts else nullcontext():
            found = side_by_side(passed, [*enumerate(rows)])
        self.release()
        return found

    def backward(
        self, rows: Sequence[Batch], behind: Sequence[Tensor], share: float
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Go back through the block, and move its codes.

        Args:
            rows: what reaches it.
            behind: gradients of what the block returns for each.
            share: of the rate of codes that is left.

        Returns:
            Gradients of the states of each row, and of all factors as sums over the rows in their order; None for those
            of an expert to which no token of the rows is sent. Errors as `MixtureGradients.back`.
        """
        found: dict[str, Tensor] = {}
        moves: dict[str, Tensor] = {}

        def add(sums: dict[str, Tensor], name: str, gradient: Tensor) -> None:
            sums[name] = sums[name] + gradient if name in sums else gradient

        def visit(linear: str, gradient: Tensor) -> None:
            add(found, linear, self._of_scales(linear, gradient))
            if not self.codes:
                return
            if moves and _owner(linear) != _owner(next(iter(moves))) and linear not in self.own:
                self._move(moves, share)  # of an expert whose turn is over
            add(moves, linear, self._of_codes(linear, gradient))

        self.fill()
        with self._without_experts(rows, behind, visit):
            passed = side_by_side(self._back, [*enumerate(zip(rows, behind, strict=True))])
        self.release()
        for _, matrices, vectors in passed:
            for name, gradient in zip(self.own, matrices, strict=True):
                visit(name, gradient)
            for name, gradient in zip(self.gains, vectors, strict=True):
                add(found, name, gradient)
        self._move(moves, share)
        factors = [found.get(name) for name in (*self.scales, *self.gains)]
        return [first for first, _, _ in passed], factors

    def fill(self) -> None:
        """Give the module the weights that are meant now; experts are filled when they compute."""
        for name in self.own:
            weight = self._matrix(self.weight(name)).contiguous()
            self.part.module.get_parameter(f"{name}.weight").data = weight
        for name, gains in self.gains.items():
            self.part.module.get_parameter(name).data = gains.stored().float()

    def release(self) -> None:
        """Let go of the weights of the linears."""
        for name in self.own:
            self.part.module.get_parameter(f"{name}.weight").data = torch.empty(0)

    def _matrix(self, value: Tensor) -> Tensor:
        """Return a weight of the module as ``[out, in]``, or the other way round."""
        return value.T if self.part.architecture.transposed else value

    def _without_experts(
        self, rows: Sequence[Batch], behind: Sequence[Tensor], visit: Visit
    ) -> AbstractContextManager[None]:
        return self.experts.known(rows, behind, visit) if self.experts else nullcontext()

    def _back(
        self, numbered: tuple[int, tuple[Batch, Tensor]]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the gradients of the states of a row, of the matrices that the module holds, and of gains' factors."""
        number, (row, behind) = numbered
        names = [*(f"{name}.weight" for name in self.own), *self.gains]
        values = [self.part.module.get_parameter(name) for name in names]
        with one_thread(), torch.enable_grad():
            states = row.states.detach().requires_grad_()
            outputs = self.run(number, row._replace(states=states))
            first, *others = torch.autograd.grad(outputs, [states, *values], behind)
        matrices = [self._matrix(gradient) for gradient in others[: len(self.own)]]
        pairs = zip(self.gains.values(), others[len(self.own) :], strict=True)
        return first, matrices, [gains.gradient(gradient) for gains, gradient in pairs]

    def _of_scales(self, linear: str, gradient: Tensor) -> Tensor:
        """Return the gradient of the factors of scales, given that of the matrix ``[out_features, in_features]``."""
        scales = self.scales[linear]
        products = (gradient * _unscaled(self.result(linear))).reshape(*scales.start.shape, -1)
        return scales.gradient(products.sum(-1))

    def _move(self, moves: dict[str, Tensor], share: float) -> None:
        """Move codes by their gradients, which are let go of."""
        for name in [*moves]:
            self.codes[name].step(moves.pop(name), share)

    def _of_codes(self, linear: str, gradient: Tensor) -> Tensor:
        """Return the gradient of the offsets of codes, given that of the matrix."""
        scales = self.scales[linear].stored().float()
        return (gradient.reshape(*scales.shape, -1) * scales[..., None]).reshape_as(gradient)


def _owner(linear: str) -> str:
    """Return the module that a linear is part of."""
    return linear.rpartition(".")[0]


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
