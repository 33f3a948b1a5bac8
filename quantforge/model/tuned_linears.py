"""Linears of a module that are codes under scales that are learned: decoded before a pass, moved behind it.

Both are done in runs of rows of their matrices, side by side: what a run makes is still in the cache of its core when
the next step wants it, and the result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from quantforge.model.tuned_matrix import Seen, TunedMatrix
from quantforge.numerics.team import side_by_side
from quantforge.numerics.threads import one_thread

Place = tuple[str, str]  # of a linear and one of its parameters, of a norm and ""


class TunedLinears:
    """Linears of a module.

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
