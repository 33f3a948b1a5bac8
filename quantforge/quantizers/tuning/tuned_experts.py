"""Experts of a block during tuning: decoded when they run, and freed afterwards.

Rows are computed as elsewhere (`model.experts`, `guidance.gradients`): first up to the experts; then each expert on its
own tokens; then the whole block with the stored outputs of the experts. Tokens are numbered over the rows of a step.
The router is not trained; gradients flow through its weights to the hidden states that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quantforge.architectures import StackSlice
from quantforge.model.block import MicroBatch
from quantforge.model.experts import Experts, RoutedTokens
from quantforge.model.hidden_states import InMemory
from quantforge.numerics.threads import one_thread, run_parallel
from quantforge.quantizers.guidance.gradients import MixtureGradients, OutputGradients
from quantforge.quantizers.tuning.tuned_matrix import TunedMatrix

RunRow = Callable[[int, MicroBatch], Tensor]  # runs the block on a row, given its index in the step
# Receives the name of a linear and the gradient of its matrix
Visit = Callable[[str, Tensor], None]


class TunedExperts:
    """Experts of a block, some of whose matrices are quantized.

    Attributes:
        name: canonical name of the module.
        numbers: numbers of experts with quantized matrices.
    """

    def __init__(self, experts: Experts, linears: Mapping[str, TunedMatrix], run: RunRow) -> None:
        """Decode quantized matrices from now on whenever the experts run.

        Args:
            experts: experts of the block.
            linears: quantized linears; others are read from the source each time.
            run: runs the block on a row, given its index in the step.
        """
        self._experts, self._linears, self._run = experts, linears, run
        self._source = experts.replace_loader(self._read_parameters)
        self.name = experts.name
        self._expert_of = {
            linear: number
            for number in experts.numbers
            for linear in experts.linears_of(number)
            if linear in linears
        }
        self.numbers = tuple(dict.fromkeys(self._expert_of.values()))
        self._reached: set[int] = set()

    @property
    def without_tokens(self) -> list[int]:
        """Return the numbers of experts that have received no token so far."""
        return [number for number in self.numbers if number not in self._reached]

    @contextmanager
    def returning(self, rows: Sequence[MicroBatch]) -> Iterator[None]:
        """Run the experts for ``rows``, and use their stored outputs inside the context; errors as `Experts.run`."""
        self._collect_tokens(rows)
        with self._experts.returning_sums():
            yield
        self._experts.release_tokens()

    @contextmanager
    def known(
        self, rows: Sequence[MicroBatch], output_gradients: Sequence[Tensor], visit: Visit
    ) -> Iterator[None]:
        """Backpropagate through the experts, and use their stored gradients inside the context.

        Args:
            rows: rows of the step.
            output_gradients: gradient of the output of the block for each row.
            visit: called with the gradient ``[out_features, in_features]`` of each quantized matrix, in a fixed order,
                possibly in several parts; not called for experts without tokens.

        Errors as `MixtureGradients.backward`.
        """
        self._collect_tokens(rows)
        mixture = MixtureGradients(self._experts)

        def record_gradients(numbered_row: tuple[int, tuple[MicroBatch, Tensor]]) -> None:
            number, (row, gradients) = numbered_row
            mixture.record_gradients(number, lambda: self._run(number, row), gradients)

        def seen(output_gradients: OutputGradients) -> None:
            linear = output_gradients.name.removeprefix(prefix)
            if len(output_gradients.inputs) and linear in self._linears:
                self._reached.add(self._expert_of[linear])
                with one_thread():
                    visit(linear, output_gradients.gradients.T @ output_gradients.inputs)

        with mixture.recording():
            run_parallel(record_gradients, [*enumerate(zip(rows, output_gradients, strict=True))])
        prefix = self._experts.name.removesuffix(self._experts.path)
        mixture.backward(prefix, seen)
        with mixture.replaying():
            yield
        self._experts.release_tokens()

    def _collect_tokens(self, rows: Sequence[MicroBatch]) -> None:
        """Store the tokens of ``rows`` that are routed to experts, and the outputs of the experts for them."""
        count, length = len(rows), rows[0].states.shape[1]
        tokens = RoutedTokens(
            (count, length),
            lambda width: InMemory(count, length, width),
            [row.start for row in rows],
        )

        def keep(numbered_row: tuple[int, MicroBatch]) -> None:
            with one_thread(), torch.no_grad():
                self._run(*numbered_row)

        with self._experts.collecting_tokens(tokens):
            run_parallel(keep, [*enumerate(rows)])
        self._experts.run_all()

    def _read_parameters(
        self, number: int, stack_slices: Mapping[str, StackSlice]
    ) -> dict[str, Tensor]:
        """Return the parameters of an expert, each ``[1, ...]``."""
        codes = [linear for linear in stack_slices if linear in self._linears]
        untuned_slices = {
            linear: stack_slice
            for linear, stack_slice in stack_slices.items()
            if linear not in codes
        }
        parameters = self._source(number, untuned_slices)

        def decode(linear: str) -> None:
            place = stack_slices[linear]
            matrix = place.stack.matrix(parameters[place.stack.parameter], place.linear_index, 0)
            matrix.copy_(self._linears[linear].weight())

        run_parallel(decode, codes)
        return parameters
