"""A block whose linears are codes under scales that are learned, with the gains of its norms and maybe the codes.

Experts are decoded when their turn comes, and let go of again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quantforge.architectures import Absorbs
from quantforge.architectures import Place as ExpertPlace
from quantforge.model.block import Batch, BlockPart
from quantforge.model.experts import Experts, RoutedTokens
from quantforge.model.hidden_states import InMemory
from quantforge.numerics.products import cutting_linears
from quantforge.numerics.threads import one_thread, side_by_side, threads_of
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers.guidance.gradients import (
    MixtureGradients,
    OutputGradients,
    OutputListener,
    Passed,
)
from quantforge.quantizers.tuning.learned import Learned, LearnedCodes
from quantforge.quantizers.tuning.matrix import Seen, TunedMatrix, factor_rate

Place = tuple[str, str]  # of a linear and one of its parameters, of a norm and ""
Aim = Callable[[int, Tensor], Tensor]
Run = Callable[[int, Batch], Tensor]
Visit = Callable[[str, Tensor], None]
CPU = torch.device("cpu")


class TunedLinears:
    """Linears of a module that are codes: decoded before a pass, moved after it.

    Both are done in runs of rows of their matrices, side by side: what a run makes is still in the cache of its core
    when the next step wants it, and the result does not depend on the number of threads.

    Attributes:
        matrices: by the names of the linears in the module.
    """

    def __init__(
        self, module: nn.Module, matrices: Mapping[str, TunedMatrix], *, transposed: bool
    ) -> None:
        """Stand for linears of a module, whose weights are ``[in, out]`` where these are ``transposed``."""
        self._module, self.matrices, self._transposed = module, matrices, transposed

    def fill(self) -> None:
        """Give the module the weights that are meant now."""
        weights = {name: torch.empty(0) for name in self.matrices}
        for name, matrix in self.matrices.items():
            matrix.hold()
            weights[name] = torch.empty(matrix.tensor.shape, device=matrix.device)

        def decode(place: tuple[str, slice]) -> None:
            name, rows = place
            with one_thread():
                weights[name][rows] = self.matrices[name].weight(rows)

        side_by_side(decode, self._runs())
        for name, weight in weights.items():
            self._parameter(name).data = self._turned(weight).contiguous()

    def release(self) -> None:
        """Let go of the weights."""
        for name, matrix in self.matrices.items():
            matrix.let_go()
            self._parameter(name).data = torch.empty(0, device=matrix.device)

    def learn(
        self, rows: Sequence[Mapping[str, tuple[Tensor, Tensor]]], share: float
    ) -> dict[Place, Tensor]:
        """Move the codes, and return the gradients of the factors of the scales; the module is filled.

        Args:
            rows: of each row, by the names of linears, what a linear reads and the gradients of its output. Those that
                are left out (what chooses tokens has no gradient) do not move.
            share: of the first rate of codes that is left.
        """

        def see(place: tuple[str, slice]) -> Seen:
            name, run = place
            with one_thread():
                parts = (
                    gradients.flatten(0, -2)[:, run].T @ inputs.flatten(0, -2)
                    for inputs, gradients in (row[name] for row in rows)
                )
                weight = self._turned(self._parameter(name).data)
                return self.matrices[name].see(reduce(torch.add, parts), run, weight[run])

        def move(place: tuple[str, slice]) -> None:
            name, run = place
            with one_thread():
                self.matrices[name].move(run)

        runs = [(name, run) for name, run in self._runs() if all(name in row for row in rows)]
        parts: dict[str, list[Seen]] = {}
        for (name, _), seen in zip(runs, side_by_side(see, runs), strict=True):
            parts.setdefault(name, []).append(seen)
        found: dict[Place, Tensor] = {}
        for name, some in parts.items():
            sums = self.matrices[name].seen(some, share)
            found |= {(name, key): one for key, one in sums.items()}
        side_by_side(move, runs)
        return found

    def _runs(self) -> list[tuple[str, slice]]:
        """Return runs of rows that may be worked on side by side."""
        return [(name, rows) for name, one in self.matrices.items() for rows in one.runs()]

    def _parameter(self, name: str) -> nn.Parameter:
        return self._module.get_parameter(f"{name}.weight")

    def _turned(self, value: Tensor) -> Tensor:
        """Return a weight of the module as ``[out, in]``, or the other way round."""
        return value.T if self._transposed else value


class TunedExperts:
    """Experts of a block, of which some matrices are codes.

    Rows pass the block as they do elsewhere (`model.experts`, `guidance.gradients`): as far as the experts, which then
    run their own tokens one after the other, and once more with what these returned in their place. Tokens are numbered
    over the rows of a step. The router stays as it is; gradients pass through the weights that it gives a token to the
    states that it reads.

    Attributes:
        name: the canonical one.
        numbers: of those that have matrices in codes.
    """

    def __init__(self, experts: Experts, linears: Mapping[str, TunedMatrix], run: Run) -> None:
        """Let matrices be decoded from now on, wherever the experts compute.

        Args:
            experts: those of the block.
            linears: those that are codes; others are read from the source every time.
            run: runs the block on a row, given its place in the step.
        """
        self._experts, self._linears, self._run = experts, linears, run
        self._source = experts.read_with(self._read)
        self.name = experts.name
        self._expert_of = {
            linear: number
            for number in experts.numbers
            for linear in experts.places(number)
            if linear in linears
        }
        self.numbers = tuple(dict.fromkeys(self._expert_of.values()))
        self._reached: set[int] = set()

    @property
    def missed(self) -> list[int]:
        """Return the numbers of those to which no token was sent of all rows that gradients were computed of."""
        return [number for number in self.numbers if number not in self._reached]

    @contextmanager
    def returning(self, rows: Sequence[Batch]) -> Iterator[None]:
        """Let the experts return what they make of the tokens of rows, while these pass; errors as `Experts.run`."""
        self._collect(rows)
        with self._experts.returning():
            yield
        self._experts.forget_tokens()

    @contextmanager
    def known(
        self, rows: Sequence[Batch], behind: Sequence[Tensor], visit: Visit
    ) -> Iterator[None]:
        """Go back through the experts, and let what they hand back stand for that, while rows pass and go back.

        Args:
            rows: of the step.
            behind: gradients of what the block returns for each.
            visit: takes the gradient ``[out_features, in_features]`` of every matrix that is codes, in a fixed order,
                maybe in several parts; those of an expert without tokens are left out.

        Errors as of `MixtureGradients.back`.
        """
        self._collect(rows)
        mixture = MixtureGradients(self._experts)

        def meet(numbered: tuple[int, tuple[Batch, Tensor]]) -> None:
            number, (row, gradients) = numbered
            mixture.meet(number, lambda: self._run(number, row), gradients)

        def seen(one: OutputGradients) -> None:
            linear = one.name.removeprefix(prefix)
            if len(one.inputs) and linear in self._linears:
                self._reached.add(self._expert_of[linear])
                with one_thread():
                    visit(linear, one.gradients.T @ one.inputs)

        with mixture.listening():
            side_by_side(meet, [*enumerate(zip(rows, behind, strict=True))])
        prefix = self._experts.name.removesuffix(self._experts.path)
        mixture.back(prefix, seen)
        with mixture.known():
            yield
        self._experts.forget_tokens()

    def _collect(self, rows: Sequence[Batch]) -> None:
        """Keep the tokens of rows that are sent to experts, and what these return for them."""
        count, length = len(rows), rows[0].states.shape[1]
        tokens = RoutedTokens(
            (count, length),
            lambda width: InMemory(count, length, width),
            [row.start for row in rows],
        )

        def keep(numbered: tuple[int, Batch]) -> None:
            with one_thread(), torch.no_grad():
                self._run(*numbered)

        with self._experts.collecting(tokens):
            side_by_side(keep, [*enumerate(rows)])
        self._experts.run_all()

    def _read(self, number: int, places: Mapping[str, ExpertPlace]) -> dict[str, Tensor]:
        """Return the parameters of an expert, ``[1, ...]`` each."""
        codes = [linear for linear in places if linear in self._linears]
        kept = {linear: place for linear, place in places.items() if linear not in codes}
        found = self._source(number, kept)

        def decode(linear: str) -> None:
            place = places[linear]
            matrix = place.stack.matrix(found[place.stack.parameter], place.position, 0)
            matrix.copy_(self._linears[linear].weight())

        side_by_side(decode, codes)
        return found


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
        """Return everything that is learned but codes, in a fixed order."""
        scales = [one for matrix in self.matrices.values() for one in matrix.scales.values()]
        return [*scales, *self.gains.values()]

    @property
    def steps(self) -> list[LearnedCodes]:
        """Return what is learned in whole steps, in a fixed order."""
        return [one for matrix in self.matrices.values() for one in matrix.steps.values()]

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
        factors = [found.get(place) for place in (*scales, *((name, "") for name in self.gains))]
        return [one.gradients for one, _ in passed], factors

    def fill(self) -> None:
        """Give the module the weights that are meant now; experts are filled when they compute."""
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
