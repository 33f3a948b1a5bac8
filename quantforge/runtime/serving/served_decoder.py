"""Interface of a decoder towards an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quantforge.runtime.cache import PagedCache
from quantforge.runtime.ragged import Span


class ServedDecoder(Protocol):
    """Needs of an engine: `quantforge.runtime.decoder.Decoder`, where methods are described."""

    positions: int
    vocabulary: int
    device: torch.device

    def cache(
        self,
        sequences: int,
        tokens: int,
        kind: str = "",
        pages: int | None = None,
        ahead: int = 0,
    ) -> PagedCache:
        """Make a cache."""

    def hidden_of(self, ids: Tensor, spans: Sequence[Span], cache: PagedCache) -> Tensor:
        """Compute spans of new tokens."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits."""
