"""Shape and type of what a cache holds for each token, and the bytes that it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantforge.architectures.cache_kinds import PLAIN, kinds_of
from quantforge.errors import InputError
from quantforge_kernels import kv


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape and type of the entries that a cache holds for each token.

    Attributes:
        layers: decoder blocks.
        kv_heads: key/value heads.
        head: width of a head.
        kind: see `quantforge.architectures.cache_kinds`; "" stores the type of the activations.
        dtype: of the activations.
        windows: of every layer, tokens that it looks at, 0 for all; none given is all.

    Raises:
        UsageError: no such kind.
        InputError: heads of an odd width for ``int4``.
    """

    layers: int
    kv_heads: int
    head: int
    kind: str
    dtype: torch.dtype
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if "int4" in self.kinds and self.head % 2:
            raise InputError(
                f"heads of {self.head} channels cannot be cached in 4 bits", "use int8 or fp8"
            )

    @property
    def kinds(self) -> tuple[str, str]:
        """Return how keys and how values are stored, each one of `quantforge_kernels.kv.KINDS`."""
        return kinds_of(self.kind or PLAIN)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token, keys and values of all layers."""
        return self.layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of one token in one layer."""
        return sum(
            kv.token_bytes(self.kv_heads, self.head, kind, self.dtype) for kind in self.kinds
        )
