"""A block whose linears are codes under scales that are learned, with the gains of its norms and maybe the codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from quantforge.architectures import Absorbs
from quantforge.model.block import BlockPart
from quantforge.model.block_rows import Batch
from quantforge.model.learned_codes import LearnedCodes
from quantforge.model.tuned_experts import TunedExperts, Visit
from quantforge.model.tuned_matrix import Learned, TunedMatrix
from quantforge.numerics.team import side_by_side
from quantforge.numerics.threads import one_thread
from quantforge.packers.tensor import QuantizedTensor

Aim = Callable[[int, Tensor], Tensor]
Place = tuple[str, str]  # of a linear and one of its parameters, of a norm and ""


class Written(NamedTuple):
    """Part of a result that is a block.

    Attributes:
        tensors: its quantized linears, by their names inside of it.
        kept: returns another of its parameters, by its name, in the type in which it is stored.
    """

    tensors: dict[str, QuantizedTensor]
    kept: Callable[[str], Tensor]


@dataclass(slots=True, eq=False)
class TunedBlock:
    """A block whose linears are codes under scales that are learned.

    Attributes:
        part: with its kept parameters; linears are empty between two visits.
        matrices: its quantized linears, those of experts too.
        gains: of its norms, by the name of the weight.
        own: the linears that are modules of their own.
        experts: those of a mixture, None without one.
    """

    part: BlockPart
    matrices: dict[str, TunedMatrix]
    gains: dict[str, Learned]
    own: tuple[str, ...]
    experts: TunedExperts | None = field(init=False, default=None)

    @classmethod
    def of(cls, part: BlockPart, written: Written, rate: float) -> TunedBlock:
        """Begin with a block as it was written; its linears are let go of.

        Args:
            part: the block.
            written: what was written of it.
            rate: with which codes are learned at first, 0 for frozen ones.
        """
        matrices = {name: TunedMatrix.of(tensor, rate) for name, tensor in written.tensors.items()}
        rates = (one.rate for matrix in matrices.values() for one in matrix.scales.values())
        least = min(rates, default=0.0)
        gains = {
            name: Learned.at(part.parameter(name), written.kept(name), least, offset)
            for name, offset in gains_of(part).items()
        }
        own = tuple(name for name in part.own_linears if name in matrices)
        for name in (*(f"{name}.weight" for name in own), *gains):
            part.module.get_parameter(name).requires_grad_()
        block = cls(part, matrices, gains, own)
        if part.experts is not None:
            block.experts = TunedExperts(part.experts, matrices, block.weight, block.run)
        block.release()
        return block

    @property
    def learned(self) -> list[Learned]:
        """Return everything that is learned but codes, in a fixed order."""
        scales = [one for matrix in self.matrices.values() for one in matrix.scales.values()]
        return [*scales, *self.gains.values()]

    @property
    def steps(self) -> list[LearnedCodes]:
        """Return what is learned in whole steps, in a fixed order."""
        return [one for matrix in self.matrices.values() for one in matrix.steps.values()]

    def weight(self, linear: str) -> Tensor:
        """Return the weight ``[out_features, in_features]`` of a linear as it is now."""
        return self.matrices[linear].result().decode()

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
        self, rows: Sequence[Batch], aim: Aim, share: float
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Go through the block and back, and move its codes.

        Args:
            rows: what reaches it.
            aim: returns the gradient of the loss at what the block makes of a row, given the row's number and that.
            share: of the rate of codes that is left.

        Returns:
            Gradients of the states of each row, and of all factors as sums over the rows in their order; None for those
            of an expert to which no token of the rows is sent. Errors as `MixtureGradients.back`, and those of ``aim``.
        """
        found: dict[Place, Tensor] = {}
        moves: dict[Place, Tensor] = {}

        def visit(linear: str, gradient: Tensor) -> None:
            matrix = self.matrices[linear]
            for key, one in matrix.of_scales(gradient).items():
                _add(found, (linear, key), one)
            if moves and _owner(linear) != _owner(next(iter(moves))[0]):
                self._move(moves, share)  # of an expert whose turn is over
            for key, one in matrix.of_steps(gradient).items():
                _add(moves, (linear, key), one)

        behind = None
        if self.experts is not None:  # they go back first, and have to know from where
            behind = [
                aim(row.start, outputs)
                for row, outputs in zip(rows, self.forward(rows), strict=True)
            ]
        self.fill()
        with self._without_experts(rows, behind, visit):
            passed = side_by_side(partial(self._back, aim, behind), [*enumerate(rows)])
        self.release()
        self._move(moves, share)

        def own(numbered: tuple[int, str]) -> dict[Place, Tensor]:
            number, name = numbered
            with one_thread():
                gradient = reduce(torch.add, (one[number] for _, one, _ in passed))
                matrix = self.matrices[name]
                sums = matrix.of_scales(gradient)
                for key, steps in matrix.of_steps(gradient).items():
                    matrix.steps[key].step(steps, share)
            return {(name, key): one for key, one in sums.items()}

        for sums in side_by_side(own, [*enumerate(self.own)]):
            found |= sums
        for _, _, vectors in passed:
            for name, gradient in zip(self.gains, vectors, strict=True):
                _add(found, (name, ""), gradient)
        scales = [(name, key) for name, matrix in self.matrices.items() for key in matrix.scales]
        factors = [found.get(place) for place in (*scales, *((name, "") for name in self.gains))]
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
        self, rows: Sequence[Batch], behind: Sequence[Tensor] | None, visit: Visit
    ) -> AbstractContextManager[None]:
        if self.experts is None or behind is None:
            return nullcontext()
        return self.experts.known(rows, behind, visit)

    def _back(
        self, aim: Aim, known: Sequence[Tensor] | None, numbered: tuple[int, Batch]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the gradients of the states of a row, of the matrices that the module holds, and of gains' factors."""
        number, row = numbered
        names = [*(f"{name}.weight" for name in self.own), *self.gains]
        values = [self.part.module.get_parameter(name) for name in names]
        with one_thread(), torch.enable_grad():
            states = row.states.detach().requires_grad_()
            outputs = self.run(number, row._replace(states=states))
            behind = aim(row.start, outputs.detach()) if known is None else known[number]
            first, *others = torch.autograd.grad(outputs, [states, *values], behind)
        matrices = [self._matrix(gradient) for gradient in others[: len(self.own)]]
        pairs = zip(self.gains.values(), others[len(self.own) :], strict=True)
        return first, matrices, [gains.gradient(gradient) for gains, gradient in pairs]

    def _move(self, moves: dict[Place, Tensor], share: float) -> None:
        """Move codes by their gradients, which are let go of."""
        for name, key in [*moves]:
            self.matrices[name].steps[key].step(moves.pop((name, key)), share)


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


def _add(sums: dict[Place, Tensor], place: Place, gradient: Tensor) -> None:
    sums[place] = sums[place] + gradient if place in sums else gradient
