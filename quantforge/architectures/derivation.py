"""Facts that a derived declaration has beside a written one: sizes and kinds of layers as they are, not as rules."""

from __future__ import annotations

from dataclasses import dataclass

from quantforge.architectures.dimensions import Dimensions


@dataclass(frozen=True, slots=True)
class Derivation:
    """Facts of one model that a declared family would compute from the configuration.

    Attributes:
        source: the code that was run, e.g. ``transformers 5.23.0, GPTNeoXForCausalLM``.
        dimensions: the sizes.
        kinds: the name of every layer's kind.
        tied: whether the head is the embedding.
        unobserved: modules of blocks that hold a matrix and are never called with what it reads, relative to the block.
    """

    source: str
    dimensions: Dimensions
    kinds: tuple[str, ...]
    tied: bool = False
    unobserved: tuple[str, ...] = ()
