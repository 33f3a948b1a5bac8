"""A linear whose scales are learned, and maybe its codes.

Every grid's values are a sum over its scales (and minima, and what a block multiplies them with): each times what the
codes make of it. So the gradient of one is that of the matrix times what the packer decodes with it 1 and the others 0.
Codes, and the integers that groups have as scales under a scale of their block, are learned in whole steps: the
gradient is that of the matrix times what the packer decodes with 1, less what it decodes with 0.

Of plain integers with scales by group or row all of that is a product or two with the codes and the scales, and one run
of rows at a time is decoded, and gone back through, while it is in a core's cache (`TunedMatrix.runs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from quantforge.packers import packer_of
from quantforge.packers.integer import code_range
from quantforge.packers.tensor import OF_INPUT, OF_MATRIX, QuantizedTensor
from quantforge.quantizers.tuning.learned import ALL, Learned, LearnedCodes, LearnedPlaces
from quantforge.scheme import Scheme

CODES = "codes"
INTEGERS = ("scales", "mins")  # parameters that are integers under a scale of their block
RATE = 1e-2  # of factors under codes of 0 bits
IN_BLOCKS = 0.3  # of it, where one multiplies the scales of all groups of a block
RUN = 1 << 16  # weights of a run of rows, whose temporaries stay in the second cache


class Seen(NamedTuple):
    """Gradients of factors that a run of rows makes of its own, and what `LearnedCodes.seen` wants, by name."""

    factors: dict[str, Tensor]
    sums: dict[str, Tensor]


@dataclass(slots=True, eq=False)
class TunedMatrix:
    """A linear whose scales are learned.

    Attributes:
        tensor: as it was written.
        scales: what of its parameters is learned, by their names.
        steps: what is learned in whole steps: integers among its parameters by their names, and its `CODES`.
        held: the scales of plain integers as they are now, float32, where they are asked for again and again.
    """

    tensor: QuantizedTensor
    scales: dict[str, Learned]
    steps: dict[str, LearnedCodes]
    held: Tensor | None = None

    @classmethod
    def of(cls, tensor: QuantizedTensor, rate: float) -> TunedMatrix:
        """Begin with a linear as it was written.

        Args:
            tensor: the linear.
            rate: with which codes and integers are learned at first, 0 for frozen ones.
        """
        first = factor_rate(tensor.scheme)
        scales = {
            key: Learned.of(value, value.dtype, first)
            for key, value in tensor.parameters.items()
            if value.is_floating_point() and key not in (*OF_INPUT, *OF_MATRIX)
        }
        return cls(tensor, scales, _in_steps(tensor, rate) if rate else {})

    @property
    def device(self) -> torch.device:
        """Return where its codes are, and all that is learned."""
        return self.tensor.codes.device

    def result(self) -> QuantizedTensor:
        """Return the linear as it is now."""
        changed = {key: one.stored() for key, one in self.scales.items()}
        changed |= {key: one.stored() for key, one in self.steps.items()}
        codes = changed.pop(CODES, self.tensor.codes)
        return replace(self.tensor, codes=codes, parameters={**self.tensor.parameters, **changed})

    def hold(self) -> None:
        """Hold what `weight` and `see` want of the scales, until `let_go`, or until they are moved."""
        self.held = self._now(ALL) if self._plain else None

    def let_go(self) -> None:
        """Hold nothing any more."""
        self.held = None

    def runs(self) -> Sequence[slice]:
        """Return runs of rows that may be worked on side by side: all at once where rows depend on each other."""
        rows, columns = self.tensor.shape
        step = max(1, RUN // columns) if self._plain and self.device.type == "cpu" else rows
        return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]

    def weight(self, rows: slice = ALL) -> Tensor:
        """Return the matrix ``[out_features, in_features]`` as it is now, of one of the `runs` or whole."""
        if not self._plain:
            return self.result().decode()
        return self._scaled(self._values(rows), rows)

    def see(self, gradient: Tensor, rows: slice, weight: Tensor) -> Seen:
        """Take the gradient of one of the `runs` of the matrix, which is used up; `move` then moves it.

        Args:
            gradient: of ``weight``.
            rows: that run.
            weight: what `weight` has returned of it.

        Returns:
            What `seen` wants, together with that of the other runs.
        """
        if not self._plain:
            steps = self.of_steps(gradient)
            return Seen(self.of_scales(gradient), {k: self.steps[k].see(steps[k]) for k in steps})
        scales, now = self.scales["scales"], self._now(rows)
        codes, moved = self.steps.get(CODES), dict[str, Tensor]()
        sums = _by_group(gradient * weight, scales.start).sum(-1)
        if codes is not None:
            moved[CODES] = codes.see(self._scaled(gradient, rows), rows)
        return Seen({"scales": scales.gradient((sums / now).where(now != 0, 0), rows)}, moved)

    def seen(self, runs: Iterable[Seen], share: float) -> dict[str, Tensor]:
        """Return the gradients of the factors of all runs together, in their order, before these are moved.

        Of the first rate of what is learned in steps ``share`` is left.
        """
        found = [*runs]
        for key, one in self.steps.items():
            one.seen([run.sums[key] for run in found], share)
        return {key: torch.cat([run.factors[key] for run in found]) for key in self.scales}

    def move(self, rows: slice) -> None:
        """Move what is learned in steps of one of the `runs`."""
        for one in self.steps.values():
            one.move(rows if self._plain else ALL)

    def of_scales(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the gradients of the factors, given that of the matrix ``[out_features, in_features]``."""
        if self._plain:
            scales = self.scales["scales"]
            products = self._values(ALL).mul_(gradient)
            return {"scales": scales.gradient(_by_group(products, scales.start).sum(-1))}
        now, found = self.result(), {}
        none = {key: torch.zeros_like(one.start) for key, one in self.scales.items()}
        for key, one in self.scales.items():
            products = gradient * _decoded(now, none | {key: torch.ones_like(one.start)})
            found[key] = one.gradient(products.reshape(*one.start.shape, -1).sum(-1))
        return found

    def of_steps(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the gradients of what is learned in steps, given that of the matrix."""
        if self._plain and self.steps:
            return {CODES: self._scaled(gradient.clone(), ALL)}
        now, found = self.result(), {}
        for key, one in self.steps.items():
            step = _decoded(now, {key: torch.ones_like(one.start)})
            step -= _decoded(now, {key: torch.zeros_like(one.start)})
            found[key] = (gradient * step).reshape(*one.start.shape, -1).sum(-1)
        return found

    @property
    def _plain(self) -> bool:
        """Return whether it is integers under one scale for each group or row, and nothing else."""
        plain = self.tensor.scheme.integer and [*self.scales] == ["scales"]
        by_row = plain and len(self.scales["scales"].start) == len(self.tensor.codes)
        return by_row and "outlier_columns" not in self.tensor.parameters

    def _values(self, rows: slice) -> Tensor:
        """Return what the scales of plain integers are multiplied with, of a run of rows."""
        codes = self.steps[CODES].stored(rows) if CODES in self.steps else self.tensor.codes[rows]
        values = codes.float()
        if (zeros := self.tensor.parameters.get("zeros")) is not None:
            _by_group(values, zeros).sub_(zeros[rows][..., None])
        return values

    def _scaled(self, values: Tensor, rows: slice) -> Tensor:
        """Multiply values of a run of rows of plain integers with their scales, in place."""
        scales = self._now(rows)
        _by_group(values, scales).mul_(scales[..., None])
        return values

    def _now(self, rows: slice) -> Tensor:
        """Return the scales of a run of rows of plain integers."""
        if self.held is not None:
            return self.held[rows]
        return self.scales["scales"].stored(rows).float()


def factor_rate(scheme: Scheme) -> float:
    """Return the rate with which factors of a scheme's scales are learned at first."""
    shared = scheme.scaled and scheme.block is not None
    return RATE * (IN_BLOCKS if shared else 1.0) / 2 ** (scheme.weight_bits / 2)


def _by_group(values: Tensor, scales: Tensor) -> Tensor:
    """Return a view ``[rows, groups, size]`` of rows that have as many groups as ``scales`` has columns."""
    return values.view(len(values), scales.shape[1], -1)


def _in_steps(tensor: QuantizedTensor, rate: float) -> dict[str, LearnedCodes]:
    scheme = tensor.scheme
    if scheme.integer:
        return {CODES: LearnedCodes(tensor.codes, code_range(scheme), rate)}
    block, found = scheme.block, dict[str, LearnedCodes]()
    if block is not None and block.units is not None:
        kept = (key for key in INTEGERS if key in tensor.parameters)
        found = {key: LearnedCodes(tensor.parameters[key], block.units, rate) for key in kept}
    if scheme.table:
        found[CODES] = LearnedPlaces.of(tensor.codes, scheme.table, rate)
    elif block is not None and block.vector == 1:  # else a code picks a point
        found[CODES] = LearnedCodes(tensor.codes, (block.codes[0], block.codes[1]), rate)
    return found


def _decoded(tensor: QuantizedTensor, changed: Mapping[str, Tensor]) -> Tensor:
    """Return the values of a linear with other parameters, or codes."""
    codes = changed.get(CODES, tensor.codes)
    return packer_of(tensor.scheme).decode(codes, {**tensor.parameters, **changed}, tensor.scheme)
