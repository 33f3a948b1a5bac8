"""Size of a cache: what all layers of a model keep of a sequence, by its length.

Attention of a usual kind keeps 2 x heads x width numbers of every token and layer; layers with a window those of its
tokens alone, latent attention one narrow vector, delta nets and state spaces a state that does not grow. What a layer
keeps is declared with its kind (`quantforge.architectures.layer_kind`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quantforge.architectures.cache_kinds import kinds_of
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.layer_kind import KEYS, VALUES, LayerState, StateType
from quantforge.architectures.match import Matched
from quantforge.errors import InputError, RefusedError
from quantforge_kernels import kv_runs

ACTIVATION, FLOAT32 = 2, 4  # bytes
RowBytes = Callable[[int, str], float]  # of a row of so many channels of a part, see `LayerState`


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Bytes of one layer: of each of the last ``window`` tokens (0: of all), and of a sequence whatever its length."""

    token_bytes: float
    window: int
    fixed_bytes: float


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of the cache of one sequence on one device."""

    layers: tuple[LayerCache, ...]

    @property
    def token_bytes(self) -> float:
        """Return the bytes of a token as long as every window has room."""
        return sum(layer.token_bytes for layer in self.layers)

    @property
    def lasting_token_bytes(self) -> float:
        """Return the bytes by which a token makes the cache larger once all windows are full."""
        return sum(layer.token_bytes for layer in self.layers if not layer.window)

    @property
    def fixed_bytes(self) -> float:
        """Return the bytes of a sequence that do not depend on its length."""
        return sum(layer.fixed_bytes for layer in self.layers)

    def sequence_bytes(self, tokens: int) -> float:
        """Return the bytes of a sequence of so many tokens."""
        return self.fixed_bytes + sum(
            layer.token_bytes * (min(tokens, layer.window) if layer.window else tokens)
            for layer in self.layers
        )


def rows_of(kind: str) -> RowBytes:
    """Return the bytes of a row of channels in a cache of this runtime, scales included.

    Raises:
        UsageError: no such kind of cache.
        RefusedError: by the function that is returned: a row is neither of keys nor of values, which are stored
            differently.
    """
    keys, values = kinds_of(kind)

    def row(width: int, part: str) -> float:
        if part not in {KEYS, VALUES} and keys != values:
            raise RefusedError(
                f"--cache {kind}: a layer keeps one vector for keys and values together",
                "one word for both",
            )
        return kv_runs.row_bytes(width, values if part == VALUES else keys, ACTIVATION)

    return row


def cache_size(matched: Matched, row: RowBytes, devices: int = 1) -> CacheSize:
    """Return what one device holds of a sequence of a model.

    Args:
        matched: the model.
        row: bytes of a row of channels, see `rows_of`.
        devices: that share the model by tensors: each holds its share of the heads, one at least, and all of a latent.

    Raises:
        InputError: what the layers of the family keep is not declared.
    """
    family, sizes = matched.architecture, matched.dimensions
    kinds = [kind.states for kind in matched.layers]
    if family is None or sizes is None or None in kinds:
        raise InputError(
            f"model_type {matched.model_type!r} is not declared: what its layers keep of a sequence is not known",
            "leave --context, --batch, --memory and what belongs to them out; quantforge help plan",
        )
    layers = []
    windows = family.windows.of_layers(matched.config, len(kinds))
    for states, window in zip(kinds, windows, strict=True):
        sums = {True: 0.0, False: 0.0}  # bytes of each token, and of a sequence whatever its length
        for state in states or ():
            sums[state.each_token] += _bytes(state, sizes, row, devices)
        layers.append(LayerCache(sums[True], window, sums[False]))
    return CacheSize(tuple(layers))


def key_heads(matched: Matched, sizes: Dimensions) -> list[int]:
    """Return how many heads of keys every layer keeps, 0 where it reads those of another one."""
    found = []
    for kind in matched.layers:
        keys = next((state for state in kind.states or () if state.part == KEYS), None)
        found.append(sizes.size(keys.rows) if keys else 0 if kind.states == () else sizes.kv_heads)
    return found or [sizes.kv_heads] * matched.blocks


def _bytes(state: LayerState, sizes: Dimensions, row: RowBytes, devices: int) -> float:
    """Return the bytes of a state on one device."""
    rows, width = sizes.size(state.rows), sizes.size(state.width)
    if state.shared:
        heads = sizes.size(state.shared)
        rows = rows // heads * -(-heads // devices)
    if state.held is StateType.CACHE:
        return rows * row(width, state.part)
    return rows * width * (ACTIVATION if state.held is StateType.ACTIVATIONS else FLOAT32)
