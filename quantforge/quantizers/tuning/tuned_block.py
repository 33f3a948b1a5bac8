"""A rounded block whose scales, norm gains and optionally codes are tuned.

Norm gains are unquantized tensors of the plan (`Action.KEEP`); tuning changes them too.
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
from quantforge.model.block import DecoderBlock, MicroBatch
from quantforge.numerics.products import tiled_linears
from quantforge.numerics.threads import one_thread, run_parallel, threads_per_part
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers.guidance.gradients import OutputRecorder, RowGradients
from quantforge.quantizers.tuning.tuned_experts import TunedExperts
from quantforge.quantizers.tuning.tuned_matrix import (
    LearnedCodes,
    LearnedFactor,
    StripGradients,
    TunedMatrix,
    factor_rate,
)

ParameterName = tuple[str, str]  # a linear and one of its parameters, or a norm and ""
OutputGradient = Callable[[int, Tensor], Tensor]
CPU = torch.device("cpu")


class TunedLinears:
    """Quantized linears of a module: decoded before a forward pass, updated after the backward pass.

    Both process strips of rows in parallel: the results of a strip are still in the cache of its core for the next
    step, and do not depend on the number of threads.

    Attributes:
        matrices: tuned matrices by the names of the linears in the module.
    """

    def __init__(
        self, module: nn.Module, matrices: Mapping[str, TunedMatrix], *, transposed: bool
    ) -> None:
        """Use linears of a module; its weights are ``[in, out]`` if ``transposed``."""
        self._module, self.matrices, self._transposed = module, matrices, transposed

    def fill(self) -> None:
        """Decode the current weights into the module."""
        weights = {name: torch.empty(0) for name in self.matrices}
        for name, matrix in self.matrices.items():
            matrix.cache_scales()
            weights[name] = torch.empty(matrix.tensor.shape, device=matrix.device)

        def decode(strip: tuple[str, slice]) -> None:
            name, rows = strip
            with one_thread():
                weights[name][rows] = self.matrices[name].weight(rows)

        run_parallel(decode, self._strips())
        for name, weight in weights.items():
            self._parameter(name).data = self._to_module_layout(weight).contiguous()

    def release(self) -> None:
        """Free the decoded weights."""
        for name, matrix in self.matrices.items():
            matrix.drop_scales()
            self._parameter(name).data = torch.empty(0, device=matrix.device)

    def update(
        self, rows: Sequence[Mapping[str, tuple[Tensor, Tensor]]], rate_share: float
    ) -> dict[ParameterName, Tensor]:
        """Update the codes; return the gradients of the scale factors. The module must be filled.

        Args:
            rows: for each calibration row, the input of each linear and the gradient of its output, by name. Missing
                linears (the choice of experts has no gradient) are not updated.
            rate_share: current share of the initial learning rate of codes.
        """

        def accumulate(strip: tuple[str, slice]) -> StripGradients:
            name, of_strip = strip
            with one_thread():
                parts = (
                    gradients.flatten(0, -2)[:, of_strip].T @ inputs.flatten(0, -2)
                    for inputs, gradients in (row[name] for row in rows)
                )
                weight = self._to_module_layout(self._parameter(name).data)
                return self.matrices[name].accumulate(
                    reduce(torch.add, parts), of_strip, weight[of_strip]
                )

        def update_strip(strip: tuple[str, slice]) -> None:
            name, of_strip = strip
            with one_thread():
                self.matrices[name].update_strip(of_strip)

        strips = [strip for strip in self._strips() if all(strip[0] in row for row in rows)]
        strip_gradients: dict[str, list[StripGradients]] = {}
        for (name, _), seen in zip(strips, run_parallel(accumulate, strips), strict=True):
            strip_gradients.setdefault(name, []).append(seen)
        combined: dict[ParameterName, Tensor] = {}
        for name, gradients_of_matrix in strip_gradients.items():
            sums = self.matrices[name].combine_strips(gradients_of_matrix, rate_share)
            combined |= {(name, key): gradient for key, gradient in sums.items()}
        run_parallel(update_strip, strips)
        return combined

    def _strips(self) -> list[tuple[str, slice]]:
        """Return strips of rows that may be processed in parallel."""
        return [(name, rows) for name, matrix in self.matrices.items() for rows in matrix.strips()]

    def _parameter(self, name: str) -> nn.Parameter:
        return self._module.get_parameter(f"{name}.weight")

    def _to_module_layout(self, value: Tensor) -> Tensor:
        """Transpose a weight between the layout of the module and ``[out, in]`` if they differ."""
        return value.T if self._transposed else value


class WrittenBlock(NamedTuple):
    """The tensors of a block as they were written.

    Attributes:
        tensors: quantized linears, by name in the block.
        read_unquantized: reads one of the other parameters by name, in its stored type.
    """

    tensors: dict[str, QuantizedTensor]
    read_unquantized: Callable[[str], Tensor]


@dataclass(slots=True, eq=False)
class TunedBlock:
    """A block whose scales, norm gains and optionally codes are tuned.

    Attributes:
        decoder_block: the block with its unquantized parameters; weights of linears are empty between passes.
        matrices: all quantized linears, including those of experts.
        gains: tuned norm gains, by the name of the weight.
        linears: quantized linears outside of experts.
        experts: tuned experts of a mixture; None without experts.
    """

    decoder_block: DecoderBlock
    matrices: dict[str, TunedMatrix]
    gains: dict[str, LearnedFactor]
    linears: TunedLinears
    experts: TunedExperts | None = field(init=False, default=None)

    @classmethod
    def of(
        cls,
        decoder_block: DecoderBlock,
        written_block: WrittenBlock,
        rate: float,
        device: torch.device = CPU,
    ) -> TunedBlock:
        """Create from a block as it was written; frees the weights of its linears.

        Args:
            decoder_block: the block.
            written_block: the written tensors.
            rate: initial learning rate of codes, 0 to freeze them.
            device: device of the block and of all tuned values.
        """
        matrices = {
            name: TunedMatrix.of(tensor.to(device), rate)
            for name, tensor in written_block.tensors.items()
        }
        rates = (factor_rate(tensor.scheme) for tensor in written_block.tensors.values())
        min_rate = min(rates, default=0.0)
        gains = {
            name: LearnedFactor.resume(
                decoder_block.parameter(name),
                written_block.read_unquantized(name).to(device),
                min_rate,
                offset,
            )
            for name, offset in norm_offsets(decoder_block).items()
        }
        for name in gains:
            decoder_block.module.get_parameter(name).requires_grad_()
        linears = TunedLinears(
            decoder_block.module,
            {name: matrices[name] for name in decoder_block.separate_linears if name in matrices},
            transposed=decoder_block.architecture.transposed,
        )
        block = cls(decoder_block, matrices, gains, linears)
        if decoder_block.experts is not None:
            block.experts = TunedExperts(decoder_block.experts, matrices, block.run)
        linears.release()
        return block

    @property
    def learned(self) -> list[LearnedFactor]:
        """Return all tuned scales and gains, in a fixed order."""
        scales = [scale for matrix in self.matrices.values() for scale in matrix.scales.values()]
        return [*scales, *self.gains.values()]

    @property
    def codes(self) -> list[LearnedCodes]:
        """Return all tuned codes and integer parameters, in a fixed order."""
        return [
            learned_codes
            for matrix in self.matrices.values()
            for learned_codes in matrix.codes.values()
        ]

    def run(self, number: int, row: MicroBatch) -> Tensor:
        """Run the filled block on a row, given its index among the rows of the pass."""
        if self.decoder_block.experts is not None:
            self.decoder_block.experts.set_row(number)
        return row.run(self.decoder_block.module, record=False)

    def forward(self, rows: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the outputs of the block for ``rows``; errors as `Experts.run`."""

        def passed(numbered_row: tuple[int, MicroBatch]) -> Tensor:
            with one_thread(), torch.no_grad():
                return self.run(*numbered_row)

        self.fill()
        with self.experts.returning(rows) if self.experts else nullcontext():
            outputs = run_parallel(passed, [*enumerate(rows)])
        self.linears.release()
        return outputs

    def backward(
        self, rows: Sequence[MicroBatch], output_gradient: OutputGradient, rate_share: float
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Run the block forward and backward, and update its codes.

        Args:
            rows: inputs of the block.
            output_gradient: returns the gradient of the loss with respect to the output of a row, given its number and
                that output.
            rate_share: current share of the initial learning rate of codes.

        Returns:
            Gradients of the input of each row, and of all factors, summed over the rows in order; None for factors of
            an expert without tokens in the rows. Errors as `MixtureGradients.backward` and ``output_gradient``.
        """
        gradients: dict[ParameterName, Tensor] = {}
        code_gradients: dict[ParameterName, Tensor] = {}

        def visit(linear: str, gradient: Tensor) -> None:
            matrix = self.matrices[linear]
            for key, one in matrix.scale_gradients(gradient).items():
                _accumulate(gradients, (linear, key), one)
            if code_gradients and _module_of(linear) != _module_of(next(iter(code_gradients))[0]):
                self._update_codes(code_gradients, rate_share)  # of an expert that is finished
            for key, one in matrix.code_gradients(gradient).items():
                _accumulate(code_gradients, (linear, key), one)

        output_gradients = None
        without_experts: AbstractContextManager[None] = nullcontext()
        if self.experts is not None:  # they run backward first and need the output gradients
            output_gradients = [
                output_gradient(row.start, outputs)
                for row, outputs in zip(rows, self.forward(rows), strict=True)
            ]
            without_experts = self.experts.known(rows, output_gradients, visit)
        self.fill()
        with without_experts, ExitStack() as hooks:
            recorder = OutputRecorder(self.decoder_block.module, self.linears.matrices, hooks)
            backward_row = partial(
                self._backward_row,
                recorder,
                output_gradient,
                output_gradients,
                threads_per_part(len(rows)),
            )
            row_results = run_parallel(backward_row, [*enumerate(rows)])
        self._update_codes(code_gradients, rate_share)
        gradients |= self.linears.update(
            [parameter_gradient.linears for parameter_gradient, _ in row_results], rate_share
        )
        self.linears.release()
        for _, vectors in row_results:
            for name, gradient in zip(self.gains, vectors, strict=True):
                _accumulate(gradients, (name, ""), gradient)
        scales = [(name, key) for name, matrix in self.matrices.items() for key in matrix.scales]
        factors = [gradients.get(name) for name in (*scales, *((norm, "") for norm in self.gains))]
        return [parameter_gradient.gradients for parameter_gradient, _ in row_results], factors

    def fill(self) -> None:
        """Fill the module with the current weights and gains; experts are filled when they run."""
        self.linears.fill()
        for name, gains in self.gains.items():
            self.decoder_block.module.get_parameter(name).data = gains.stored().float()

    def _backward_row(
        self,
        recorder: OutputRecorder,
        output_gradient: OutputGradient,
        known_gradients: Sequence[Tensor] | None,
        threads: int,
        numbered_row: tuple[int, MicroBatch],
    ) -> tuple[RowGradients, list[Tensor]]:
        """Return the gradients of a row: of its input, the outputs of linears (with their inputs), and gain factors.

        The gradients of matrices, which are products of these, are computed later, in parallel.
        """
        number, row = numbered_row
        gains = [self.decoder_block.module.get_parameter(name) for name in self.gains]

        def run(states: Tensor) -> Tensor:
            with tiled_linears(threads):
                return self.run(number, row._replace(states=states))

        row_gradients = recorder.backward(
            run,
            row.states,
            partial(output_gradient, row.start)
            if known_gradients is None
            else lambda _: known_gradients[number],
            gains,
        )
        pairs = zip(self.gains.values(), row_gradients.others, strict=True)
        return row_gradients, [
            call_recorder.gradient(gradient) for call_recorder, gradient in pairs
        ]

    def _update_codes(self, code_gradients: dict[ParameterName, Tensor], rate_share: float) -> None:
        """Update codes by their gradients, and free the gradients."""
        for name, key in [*code_gradients]:
            self.matrices[name].codes[key].step(code_gradients.pop((name, key)), rate_share)


def _module_of(linear: str) -> str:
    """Return the name of the module that contains a linear."""
    return linear.rpartition(".")[0]


def norm_offsets(decoder_block: DecoderBlock) -> Mapping[str, float]:
    """Return the weights of norms that precede linears, by name, with the offset that the norm adds to its weight."""
    offsets = {}
    for shared in decoder_block.inputs:
        scale_fold = shared.scale_fold
        if scale_fold is None or scale_fold.kind is FoldKind.ROWS:
            continue
        name = f"{scale_fold.module}.weight"
        if decoder_block.has_parameter(name) and not decoder_block.is_outside_module(name):
            offsets[name] = 1.0 if scale_fold.kind is FoldKind.NORM_PLUS_ONE else 0.0
    return offsets


def _accumulate(sums: dict[ParameterName, Tensor], name: ParameterName, gradient: Tensor) -> None:
    sums[name] = sums[name] + gradient if name in sums else gradient
