"""Blocks as columns, side by side: what the quantizers of `reference_rows` take and give."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantforge.packers.ggml.ggml_search import root

Found = tuple[Tensor, dict[str, Tensor]]  # codes [columns, blocks] and parameters [n, blocks]


@dataclass(frozen=True, slots=True)
class BlockColumns:
    """Blocks as columns.

    Attributes:
        x: ``[columns, blocks]``, float32.
        importance: of the same shape, or None.
        row_mean: mean of ``x^2`` over the whole row of each block, where there is an importance.
    """

    x: Tensor
    importance: Tensor | None
    row_mean: Tensor | None

    def groups(self, size: int) -> Tensor:
        """Return the values as ``[size, groups of a block, blocks]``."""
        return self.x.view(-1, size, self.x.shape[1]).transpose(0, 1)

    def weights(self, size: int, mean: Tensor) -> Tensor:
        """Return ``importance * sqrt(mean + x^2)`` in groups of ``size``."""
        assert self.importance is not None
        weights = self.importance * root(mean + self.x * self.x)
        return weights.view(-1, size, self.x.shape[1]).transpose(0, 1)

    def by_row(self) -> Tensor:
        """Return ``importance * sqrt(mean + x^2)``, the mean of the whole row."""
        assert self.importance is not None
        assert self.row_mean is not None
        return self.importance * root(self.row_mean + self.x * self.x)
