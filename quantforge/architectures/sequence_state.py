"""State of a sequence that one layer keeps between tokens: what a cache has to hold.

Attention keeps the keys and values of every token that it may still look at, all of them or those of a window. Latent
attention keeps the narrow latent that they are made of. Delta nets and state spaces keep one matrix per head, and
convolutions their last inputs, however long the sequence is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

KEYS, VALUES = "keys", "values"


class StateType(StrEnum):
    """Types in which a state is held."""

    CACHE = "cache"  # that of the cache, which may be quantized
    ACTIVATIONS = "activations"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class LayerState:
    """One state of a layer, its sizes in named dimensions as those of a `Parameter`.

    Attributes:
        rows: rows of numbers; a quantized cache scales each by itself.
        width: numbers of a row.
        each_token: whether there is one for every token, or one for the whole sequence.
        held: its type.
        part: of keys and values, which may be stored differently; "" is neither.
        shared: the dimension by which devices share it, "" where each of them holds all of it.
    """

    rows: str
    width: str
    each_token: bool = True
    held: StateType = StateType.CACHE
    shared: str = ""
    part: str = ""


def keys_and_values(heads: str = "kv_heads", head: str = "head") -> tuple[LayerState, ...]:
    """Declare what attention keeps: a key and a value of every token and head."""
    return tuple(LayerState(heads, head, shared=heads, part=part) for part in (KEYS, VALUES))


def latent(width: str) -> tuple[LayerState, ...]:
    """Declare a vector of every token, which all heads read."""
    return (LayerState("1", width),)


def convolution(channels: str) -> tuple[LayerState, ...]:
    """Declare the last ``kernel`` inputs of a depthwise convolution."""
    return (
        LayerState(
            channels, "kernel", each_token=False, held=StateType.ACTIVATIONS, shared=channels
        ),
    )


def recurrent(
    heads: str, matrix: str, held: StateType = StateType.FLOAT32
) -> tuple[LayerState, ...]:
    """Declare a matrix of every head; ``matrix`` is the product of its sides."""
    return (LayerState(heads, matrix, each_token=False, held=held, shared=heads),)
