"""Experts of a block under scales that are learned: each is decoded when its turn comes, and let go of again.

Rows pass the block as they do elsewhere (`quantforge.model.experts`, `quantforge.model.expert_gradients`): as far as
the experts, which then run their own tokens one after the other, and once more with what these returned in their place.
Tokens are numbered over the rows of a step. The router stays as it is; gradients pass through the weights that it gives
a token to the states that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quantforge.architectures import Place
from quantforge.model.block_rows import Batch
from quantforge.model.expert_gradients import MixtureGradients
from quantforge.model.experts import Experts
from quantforge.model.hidden_states import InMemory
from quantforge.model.output_gradients import OutputGradients
from quantforge.model.routed_tokens import RoutedTokens
from quantforge.numerics.team import side_by_side
from quantforge.numerics.threads import one_thread

Run = Callable[[int, Batch], Tensor]
Visit = Callable[[str, Tensor], None]


class TunedExperts:
    """Experts of a block, of which some matrices are codes.

    Attributes:
        name: the canonical one.
        numbers: of those that have matrices in codes.
    """

    def __init__(
        self, experts: Experts, linears: Collection[str], weight: Callable[[str], Tensor], run: Run
    ) -> None:
        """Let matrices be decoded from now on, wherever the experts compute.

        Args:
            experts: those of the block.
            linears: those that are codes; others are read from the source every time.
            weight: returns the matrix ``[out_features, in_features]`` that is meant now.
            run: runs the block on a row, given its place in the step.
        """
        self._experts, self._linears, self._weight, self._run = experts, linears, weight, run
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

    def _read(self, number: int, places: Mapping[str, Place]) -> dict[str, Tensor]:
        """Return the parameters of an expert, ``[1, ...]`` each."""
        codes = [linear for linear in places if linear in self._linears]
        kept = {linear: place for linear, place in places.items() if linear not in codes}
        found = self._source(number, kept)

        def decode(linear: str) -> None:
            place = places[linear]
            matrix = place.stack.matrix(found[place.stack.parameter], place.position, 0)
            matrix.copy_(self._weight(linear))

        side_by_side(decode, codes)
        return found
