"""A block whose linears are codes under scales that are learned, with the gains of its norms and maybe the codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quantforge.architectures import Absorbs
from quantforge.model.block import BlockPart
from quantforge.model.block_rows import Batch
from quantforge.model.learned_codes import LearnedCodes
from quantforge.model.learned_scales import Learned
from quantforge.model.output_gradients import OutputListener, Passed
from quantforge.model.tuned_experts import TunedExperts, Visit
from quantforge.model.tuned_linears import Place, TunedLinears
from quantforge.model.tuned_matrix import TunedMatrix, factor_rate
from quantforge.numerics.linear_gradients import cutting_linears
from quantforge.numerics.team import side_by_side, threads_of
from quantforge.numerics.threads import one_thread
from quantforge.packers.tensor import QuantizedTensor

Aim = Callable[[int, Tensor], Tensor]
CPU = torch.device("cpu")


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
        linears: those that are modules of their own.
        experts: those of a mixture, None without one.
    """

    part: BlockPart
    matrices: dict[str, TunedMatrix]
    gains: dict[str, Learned]
    linears: TunedLinears
    experts: TunedExperts | None = field(init=False, default=None)

    @classmethod
    def of(
        cls, part: BlockPart, written: Written, rate: float, device: torch.device = CPU
    ) -> TunedBlock:
        """Begin with a block as it was written; its linears are let go of.

        Args:
            part: the block.
            written: what was written of it.
            rate: with which codes are learned at first, 0 for frozen ones.
            device: where the block is: codes and all that is learned are there, too.
        """
        matrices = {
            name: TunedMatrix.of(tensor.to(device), rate)
            for name, tensor in written.tensors.items()
        }
        rates = (factor_rate(tensor.scheme) for tensor in written.tensors.values())
        least = min(rates, default=0.0)
        gains = {
            name: Learned.at(part.parameter(name), written.kept(name).to(device), least, offset)
            for name, offset in gains_of(part).items()
        }
        own = tuple(name for name in part.own_linears if name in matrices)
        for name in gains:
            part.module.get_parameter(name).requires_grad_()
        linears = TunedLinears(
            part.module,
            {name: matrices[name] for name in own},
            transposed=part.architecture.transposed,
        )
        block = cls(part, matrices, gains, linears)
        if part.experts is not None:
            block.experts = TunedExperts(part.experts, matrices, block.weight, block.run)
        linears.release()
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
        return self.matrices[linear].weight()

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
        self.linears.release()
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
        with self._without_experts(rows, behind, visit), ExitStack() as hooks:
            listener = OutputListener(self.part.module, self.linears.matrices, hooks)
            back = partial(self._back, listener, aim, behind, threads_of(len(rows)))
            passed = side_by_side(back, [*enumerate(rows)])
        self._move(moves, share)
        found |= self.linears.learn([one.linears for one, _ in passed], share)
        self.linears.release()
        for _, vectors in passed:
            for name, gradient in zip(self.gains, vectors, strict=True):
                _add(found, (name, ""), gradient)
        scales = [(name, key) for name, matrix in self.matrices.items() for key in matrix.scales]
        factors = [found.get(place) for place in (*scales, *((name, "") for name in self.gains))]
        return [one.gradients for one, _ in passed], factors

    def fill(self) -> None:
        """Give the module the weights that are meant now; experts are filled when they compute."""
        self.linears.fill()
        for name, gains in self.gains.items():
            self.part.module.get_parameter(name).data = gains.stored().float()

    def _without_experts(
        self, rows: Sequence[Batch], behind: Sequence[Tensor] | None, visit: Visit
    ) -> AbstractContextManager[None]:
        if self.experts is None or behind is None:
            return nullcontext()
        return self.experts.known(rows, behind, visit)

    def _back(
        self,
        listener: OutputListener,
        aim: Aim,
        known: Sequence[Tensor] | None,
        threads: int,
        numbered: tuple[int, Batch],
    ) -> tuple[Passed, list[Tensor]]:
        """Return gradients of the states of a row, those of linears with what they read, and those of gains' factors.

        Gradients of matrices are products of these, which are left for later: they need not wait for each other.
        """
        number, row = numbered
        gains = [self.part.module.get_parameter(name) for name in self.gains]

        def run(states: Tensor) -> Tensor:
            with cutting_linears(threads):
                return self.run(number, row._replace(states=states))

        passed = listener.back(
            run,
            row.states,
            partial(aim, row.start) if known is None else lambda _: known[number],
            gains,
        )
        pairs = zip(self.gains.values(), passed.others, strict=True)
        return passed, [one.gradient(gradient) for one, gradient in pairs]

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
