"""Stacks of experts' matrices that stay packed: rows are multiplied by the matrices of their owners.

A stack is what transformers holds as one parameter of three dimensions: of every expert the rows of one linear, or of
gate and up. `PackedStack` gives all of them to one kernel for grouped products. Where the experts of a layer are
rounded to different schemes, or some are not rounded, or their inputs are rounded to ranges that files state,
`SeparateStack` multiplies by one `PackedLinear` after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.linear import KernelWeight, PackedLinear, PackedWeights, kernel_weight
from quantforge_kernels import reference
from quantforge_kernels.grouped import (
    SHARED,
    GroupedKernel,
    GroupedProblem,
    Owners,
    by_matrix,
    matrix,
    stack,
)
from quantforge_kernels.select import grouped_failure, select_grouped

# The weights of one expert in a stack, ``[out, in]`` each, in the order of their rows.
Parts = Sequence[QuantizedTensor | Tensor]


class DifferentError(Exception):
    """Matrices of a stack are not one problem of the kernels."""


class PackedStack(PackedWeights):
    """Matrices ``[out, in]`` of all experts, of one scheme.

    Args:
        parts: returns the weights of an expert.
        experts: how many there are.
        dtype: of activations.
        device: where they are kept.

    Attributes:
        problem: what is multiplied.
        chosen: the kernel.
        failure: why the kernel that was meant for it does not multiply it, or None.

    Raises:
        DifferentError: they are not of one scheme.
    """

    def __init__(
        self,
        parts: Callable[[int], Parts],
        experts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        first = joined(parts(0), dtype, device)
        self.problem = GroupedProblem(first.problem, experts)
        self.chosen: GroupedKernel = select_grouped(self.problem)
        self.failure = self._tried(first)
        if self.failure is not None:
            self.failure = f"{self.chosen.name}: {self.failure}"
            self.chosen = by_matrix(reference.KERNEL)
        self._kept: dict[int, dict[int, Tensor]] | None = None  # decoded tiles of each expert

        def weights() -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
            for expert in range(experts):
                weight = first if expert == 0 else joined(parts(expert), dtype, device)
                if weight.problem != first.problem:
                    raise DifferentError
                yield weight.codes, weight.parameters

        try:
            packed = stack(weights(), self.problem, self.chosen)
        except ValueError as error:
            raise DifferentError(str(error)) from error
        self.hold(packed)

    def _tried(self, first: KernelWeight) -> str | None:
        """Return why the kernel fails on the first matrix alone; None where it does not."""
        if self.chosen.layout is reference.KERNEL:
            return None
        alone = replace(self.problem, matrices=1)
        packed = stack(iter([(first.codes, first.parameters)]), alone, self.chosen)
        return grouped_failure(self.chosen, packed, alone)

    def forward(self, x: Tensor, owners: Owners) -> Tensor:
        """Multiply ``x`` ``[rows, in]``; return ``[pairs, out]`` in the order of the owners' pairs."""
        if self._kept is None:
            return self.chosen.matmul(x, owners, self.packed, self.problem)
        each = len(owners.pairs) // max(1, len(x))
        y = x.new_empty(len(owners.pairs), self.problem.each.out_features)
        for expert, pairs in owners.groups():
            kept = self._kept.setdefault(expert, {})
            part = matrix(self.packed, expert)
            y[pairs] = reference.matmul(x[pairs // each], part, self.problem.each, kept)
        return y

    @property
    def weights(self) -> int:
        """Return the number of weights of all experts."""
        each = self.problem.each
        return self.problem.matrices * each.out_features * each.in_features

    def round_inputs(self, bits: int) -> bool:
        """Let a kernel of the same layout, or in the reference's place, round activations; return whether one does."""
        problem = replace(self.problem, each=replace(self.problem.each, input_bits=bits))
        chosen, packed = select_grouped(problem), self.packed
        if chosen is self.chosen:
            return False
        if chosen.layout.prepare is not self.chosen.layout.prepare:
            if self.chosen.layout is not reference.KERNEL:
                return False
            each = (matrix(packed, number) for number in range(problem.matrices))
            packed = stack(
                (reference.restore(one, self.problem.each) for one in each), problem, chosen
            )
        alone = {name: value if name in SHARED else value[:1] for name, value in packed.items()}
        if grouped_failure(chosen, alone, replace(problem, matrices=1)) is not None:
            return False
        self.problem, self.chosen = problem, chosen
        self.hold(packed)
        return True

    def keep_decoded(self, keep: bool) -> None:
        """Keep what the reference kernel decodes for the products that follow, or let go of it."""
        self._kept = {} if keep and self.chosen.layout is reference.KERNEL else None


class SeparateStack(nn.Module):
    """Matrices of all experts, each in linear layers of its own; arguments as those of `PackedStack`."""

    def __init__(
        self,
        parts: Callable[[int], Parts],
        experts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._width = 0  # of a result
        layers = []
        for expert in range(experts):
            given = parts(expert)
            self._width = sum(part.shape[0] for part in given)
            layers.append(nn.ModuleList(_linear(part, dtype, device) for part in given))
        self.experts = nn.ModuleList(layers)

    @property
    def failure(self) -> str | None:
        """Return why a layer is not multiplied by the kernel meant for it, the first such reason."""
        found = (part.failure for part in self.modules() if isinstance(part, PackedLinear))
        return next((why for why in found if why is not None), None)

    def forward(self, x: Tensor, owners: Owners) -> Tensor:
        """Multiply as `PackedStack` does."""
        each = len(owners.pairs) // max(1, len(x))
        y = x.new_empty(len(owners.pairs), self._width)
        for expert, pairs in owners.groups():
            rows = x[pairs // each]
            y[pairs] = torch.cat([part(rows) for part in self._of(expert)], dim=-1)
        return y

    def _of(self, expert: int) -> nn.ModuleList:
        found = self.experts[expert]
        assert isinstance(found, nn.ModuleList)
        return found


def stack_of(
    parts: Callable[[int], Parts], experts: int, dtype: torch.dtype, device: torch.device
) -> PackedStack | SeparateStack:
    """Return the matrices of all experts for one kernel if they are of one scheme, else each in a layer of its own."""
    try:
        return PackedStack(parts, experts, dtype, device)
    except DifferentError:
        return SeparateStack(parts, experts, dtype, device)


def joined(parts: Parts, dtype: torch.dtype, device: torch.device) -> KernelWeight:
    """Return the rows of some matrices as those of one weight.

    Raises:
        DifferentError: one is not quantized, or to another scheme; or rows do not fill whole tiles of it.
    """
    packed = [part for part in parts if isinstance(part, QuantizedTensor)]
    weights = [kernel_weight(part, dtype, device) for part in packed]
    for tensor, one in zip(packed, weights, strict=True):
        if tensor.outlier_columns is not None or (tensor.input and not one.problem.activation):
            raise DifferentError
    problems = {replace(one.problem, out_features=0) for one in weights}
    if len(packed) < len(parts) or len(problems) > 1:
        raise DifferentError
    if len(weights) == 1:
        return weights[0]
    tile = weights[0].problem.tile_rows
    if any(one.problem.out_features % tile for one in weights[:-1]):
        raise DifferentError
    whole = sum(one.problem.out_features for one in weights)
    parameters = {}
    for name, value in weights[0].parameters.items():
        values = [one.parameters[name] for one in weights]
        if name in SHARED and not all(torch.equal(value, other) for other in values):
            raise DifferentError
        if len({other.dtype for other in values}) > 1:
            raise DifferentError
        parameters[name] = value if name in SHARED else torch.cat(values)
    codes = torch.cat([one.codes for one in weights])
    return KernelWeight(replace(weights[0].problem, out_features=whole), codes, parameters)


def _linear(part: QuantizedTensor | Tensor, dtype: torch.dtype, device: torch.device) -> nn.Module:
    if isinstance(part, QuantizedTensor):
        return PackedLinear(part, None, dtype, device)
    plain = nn.Linear(part.shape[1], part.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(part.to(device, dtype), requires_grad=False)
    return plain
