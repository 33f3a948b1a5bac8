"""A block of a rounded model whose scales, gains of norms and maybe codes are learned.

Gains of norms are tensors that the plan keeps (`Action.KEEP`): tuning changes them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quantforge.architectures import FoldKind
from quantforge.model.block import Batch, DecoderBlock
from quantforge.numerics.products import cutting_linears
from quantforge.numerics.threads import one_thread, side_by_side, threads_of
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers.guidance.gradients import OutputListener, Passed
from quantforge.quantizers.tuning.tuned_experts import TunedExperts
from quantforge.quantizers.tuning.tuned_matrix import (
    Learned,
    LearnedCodes,
    StripGradients,
    TunedMatrix,
    factor_rate,
)

ParameterName = tuple[str, str]  # a linear and one of its parameters, or a norm and ""
Aim = Callable[[int, Tensor], Tensor]
CPU = torch.device("cpu")


class TunedLinears:
    """Quantized linears of a module: decoded before a forward pass, updated after the backward pass.

    Both work on strips of rows in parallel: what a strip computes is still in the cache of its core when the next step
    reads it, and the result does not depend on the number of threads.

    Attributes:
        matrices: by the names of the linears in the module.
    """

    def __init__(
        self, module: nn.Module, matrices: Mapping[str, TunedMatrix], *, transposed: bool
    ) -> None:
        """Take linears of a module, whose weights are ``[in, out]`` if ``transposed``."""
        self._module, self.matrices, self._transposed = module, matrices, transposed

    def fill(self) -> None:
        """Decode the current weights into the module."""
        weights = {name: torch.empty(0) for name in self.matrices}
        for name, matrix in self.matrices.items():
            matrix.hold()
            weights[name] = torch.empty(matrix.tensor.shape, device=matrix.device)

        def decode(strip: tuple[str, slice]) -> None:
            name, rows = strip
            with one_thread():
                weights[name][rows] = self.matrices[name].weight(rows)

        side_by_side(decode, self._strips())
        for name, weight in weights.items():
            self._parameter(name).data = self._turned(weight).contiguous()

    def release(self) -> None:
        """Free the weights."""
        for name, matrix in self.matrices.items():
            matrix.let_go()
            self._parameter(name).data = torch.empty(0, device=matrix.device)

    def learn(
        self, rows: Sequence[Mapping[str, tuple[Tensor, Tensor]]], share: float
    ) -> dict[ParameterName, Tensor]:
        """Update the codes, and return the gradients of the factors of the scales; the module has to be filled.

        Args:
            rows: of each calibration row, the input of each linear and the gradient of its output, by name. Linears
            that
                are missing (the choice of experts has no gradient) are not updated.
            share: of the initial learning rate of codes.
        """

        def see(strip: tuple[str, slice]) -> StripGradients:
            name, of_strip = strip
            with one_thread():
                parts = (
                    gradients.flatten(0, -2)[:, of_strip].T @ inputs.flatten(0, -2)
                    for inputs, gradients in (row[name] for row in rows)
                )
                weight = self._turned(self._parameter(name).data)
                return self.matrices[name].see(reduce(torch.add, parts), of_strip, weight[of_strip])

        def move(strip: tuple[str, slice]) -> None:
            name, of_strip = strip
            with one_thread():
                self.matrices[name].move(of_strip)

        strips = [strip for strip in self._strips() if all(strip[0] in row for row in rows)]
        parts: dict[str, list[StripGradients]] = {}
        for (name, _), seen in zip(strips, side_by_side(see, strips), strict=True):
            parts.setdefault(name, []).append(seen)
        found: dict[ParameterName, Tensor] = {}
        for name, some in parts.items():
            sums = self.matrices[name].seen(some, share)
            found |= {(name, key): one for key, one in sums.items()}
        side_by_side(move, strips)
        return found

    def _strips(self) -> list[tuple[str, slice]]:
        """Return strips of rows that may be processed in parallel."""
        return [(name, rows) for name, one in self.matrices.items() for rows in one.strips()]

    def _parameter(self, name: str) -> nn.Parameter:
        return self._module.get_parameter(f"{name}.weight")

    def _turned(self, value: Tensor) -> Tensor:
        """Transpose a weight between the layout of the module and ``[out, in]``, if they differ."""
        return value.T if self._transposed else value


class Written(NamedTuple):
    """A block as it was written.

    Attributes:
        tensors: its quantized linears, by name in the block.
        kept: reads one of its other parameters by name, in its stored type.
    """

    tensors: dict[str, QuantizedTensor]
    kept: Callable[[str], Tensor]


@dataclass(slots=True, eq=False)
class TunedBlock:
    """A block whose scales, gains and maybe codes are learned.

    Attributes:
        part: the block with its kept parameters; weights of linears are empty between two passes.
        matrices: all quantized linears, including those of experts.
        gains: of norms, by the name of the weight.
        linears: quantized linears outside of experts.
        experts: of a mixture, None without one.
    """

    part: DecoderBlock
    matrices: dict[str, TunedMatrix]
    gains: dict[str, Learned]
    linears: TunedLinears
    experts: TunedExperts | None = field(init=False, default=None)

    @classmethod
    def of(
        cls, part: DecoderBlock, written: Written, rate: float, device: torch.device = CPU
    ) -> TunedBlock:
        """Start from a block as it was written; frees the weights of its linears.

        Args:
            part: the block.
            written: its tensors in the result.
            rate: initial learning rate of codes, 0 to freeze them.
            device: of the block, and of everything that is learned.
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
        for name in gains:
            part.module.get_parameter(name).requires_grad_()
        linears = TunedLinears(
            part.module,
            {name: matrices[name] for name in part.own_linears if name in matrices},
            transposed=part.architecture.transposed,
        )
        block = cls(part, matrices, gains, linears)
        if part.experts is not None:
            block.experts = TunedExperts(part.experts, matrices, block.run)
        linears.release()
        return block

    @property
    def learned(self) -> list[Learned]:
        """Return all learned scales and gains, in a fixed order."""
        scales = [one for matrix in self.matrices.values() for one in matrix.scales.values()]
        return [*scales, *self.gains.values()]

    @property
    def codes(self) -> list[LearnedCodes]:
        """Return everything that is learned in whole steps, in a fixed order."""
        return [one for matrix in self.matrices.values() for one in matrix.codes.values()]

    def run(self, number: int, row: Batch) -> Tensor:
        """Run the block, which has to be filled, on a row, given its index among the rows of the pass."""
        if self.part.experts is not None:
            self.part.experts.at(number)
        return row.run(self.part.module, note=False)

    def forward(self, rows: Sequence[Batch]) -> list[Tensor]:
        """Return the outputs of the block for ``rows``; errors as `Experts.run`."""

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
        """Run the block forward and backward, and update its codes.

        Args:
            rows: inputs of the block.
            aim: returns the gradient of the loss with respect to the output of a row, given its number and that output.
            share: of the initial learning rate of codes.

        Returns:
            Gradients of the input of each row, and of all factors as sums over the rows in order; None for those of an
            expert without tokens in the rows. Errors as `MixtureGradients.back` and ``aim``.
        """
        found: dict[ParameterName, Tensor] = {}
        moves: dict[ParameterName, Tensor] = {}

        def visit(linear: str, gradient: Tensor) -> None:
            matrix = self.matrices[linear]
            for key, one in matrix.scale_gradients(gradient).items():
                _add(found, (linear, key), one)
            if moves and _owner(linear) != _owner(next(iter(moves))[0]):
                self._move(moves, share)  # of an expert whose turn is over
            for key, one in matrix.code_gradients(gradient).items():
                _add(moves, (linear, key), one)

        behind = None
        without_experts: AbstractContextManager[None] = nullcontext()
        if self.experts is not None:  # they go back first, and have to know from where
            behind = [
                aim(row.start, outputs)
                for row, outputs in zip(rows, self.forward(rows), strict=True)
            ]
            without_experts = self.experts.known(rows, behind, visit)
        self.fill()
        with without_experts, ExitStack() as hooks:
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
        factors = [found.get(name) for name in (*scales, *((norm, "") for norm in self.gains))]
        return [one.gradients for one, _ in passed], factors

    def fill(self) -> None:
        """Fill the module with the current weights and gains; experts are filled when they are computed."""
        self.linears.fill()
        for name, gains in self.gains.items():
            self.part.module.get_parameter(name).data = gains.stored().float()

    def _back(
        self,
        listener: OutputListener,
        aim: Aim,
        known: Sequence[Tensor] | None,
        threads: int,
        numbered: tuple[int, Batch],
    ) -> tuple[Passed, list[Tensor]]:
        """Return the gradients of a row: of its input, the outputs of linears (with their inputs), factors of gains.

        The gradients of matrices, which are products of these, are computed later, in parallel.
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

    def _move(self, moves: dict[ParameterName, Tensor], share: float) -> None:
        """Update codes by their gradients, and free these."""
        for name, key in [*moves]:
            self.matrices[name].codes[key].step(moves.pop((name, key)), share)


def _owner(linear: str) -> str:
    """Return the name of the module that contains a linear."""
    return linear.rpartition(".")[0]


def gains_of(part: DecoderBlock) -> Mapping[str, float]:
    """Return the weights of norms before linears, by name, with the offset that the norm adds to its weight."""
    found = {}
    for shared in part.inputs:
        scale_fold = shared.scale_fold
        if scale_fold is None or scale_fold.kind is FoldKind.ROWS:
            continue
        name = f"{scale_fold.module}.weight"
        if part.has(name) and not part.is_outside_module(name):
            found[name] = 1.0 if scale_fold.kind is FoldKind.NORM_PLUS_ONE else 0.0
    return found


def _add(sums: dict[ParameterName, Tensor], name: ParameterName, gradient: Tensor) -> None:
    sums[name] = sums[name] + gradient if name in sums else gradient
