"""Tokens on their way into the blocks of a decoder: embeddings, places in the cache, angles."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantforge.runtime.ragged import RaggedBatch


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Tokens on their way into the blocks.

    Attributes:
        x: embeddings ``[tokens of all sequences, hidden]``.
        slots: places of the tokens in the cache, by key of a layer (`CacheLayout.keys`).
        angles: cosines and sines by kind of rotary, see `Layer.rotary`.
        ragged: spans of different lengths; None: as many tokens of every sequence of the cache.
    """

    x: Tensor
    slots: dict[int, Tensor]
    angles: dict[str, tuple[Tensor, Tensor]]
    ragged: RaggedBatch | None = None

    def note(self, block: int, x: Tensor) -> None:
        """Put what goes into a block ``[tokens, hidden]`` where it is asked for."""
        if self.ragged is not None and self.ragged.taps and block in self.ragged.taps:
            self.ragged.taps[block] = x

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in one order."""
        return [
            self.x,
            *(self.slots[key] for key in sorted(self.slots)),
            *(part for key in sorted(self.angles) for part in self.angles[key]),
        ]
