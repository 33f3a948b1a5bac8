"""Capacity: whether a planned result fits beside its cache, how fast it can decode at best, and what a token costs.

Attention of a usual kind keeps 2 x heads x width numbers of every token and layer; layers with a window those of its
tokens alone, latent attention one narrow vector, delta nets and state spaces a state that does not grow. What a layer
keeps is declared with its kind (`quantforge.architectures.layer_kind`).

With ``w`` bytes of weights that a step reads, ``c`` bytes of cache of each of ``b`` sequences, and ``p`` weights that a
token is multiplied by, a step of decoding, which makes one token of every sequence, takes at least

    max((w + b c) / bandwidth, 2 p b / compute)

the roofline: every byte is read once, every product computed once, and nothing else takes time. No engine is faster;
how near one comes is measured, never computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.layer_kind import KEYS, VALUES, LayerState, StateType
from quantforge.architectures.match import ModelLayout
from quantforge.arguments import strict_fields
from quantforge.cache_kinds import PLAIN, kinds_of
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.planning.gpu_cards import Card
from quantforge.planning.weight_traffic import WeightTraffic, weight_traffic
from quantforge.plans import Plan
from quantforge_kernels import kv_row_layout

MARGIN = 0.9  # of the memory: the rest is for code, graphs and the allocator
CHUNK = 2048  # tokens of a step that reads a prompt, at least
CONTEXT = 4096  # tokens, where nothing is said and the model has as many positions
MOST = 1 << 30  # tokens or sequences that are asked for
ACTIVATION, FLOAT32 = 2, 4  # bytes
_MILLION, _HOUR = 1e6, 3600
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
        return kv_row_layout.row_bytes(width, values if part == VALUES else keys, ACTIVATION)

    return row


def cache_size(model_layout: ModelLayout, row: RowBytes, devices: int = 1) -> CacheSize:
    """Return what one device holds of a sequence of a model.

    Args:
        model_layout: the model.
        row: bytes of a row of channels, see `rows_of`.
        devices: that share the model by tensors: each holds its share of the heads, one at least, and all of a latent.

    Raises:
        InputError: what the layers of the family keep is not declared.
    """
    family, sizes = model_layout.architecture, model_layout.dimensions
    kinds = [kind.states for kind in model_layout.layers]
    if family is None or sizes is None or None in kinds:
        raise InputError(
            f"model_type {model_layout.model_type!r} is not declared: what its layers keep of a sequence is not known",
            "leave --context, --batch, --memory and what belongs to them out; quantforge help plan",
        )
    layers = []
    windows = family.windows.of_layers(model_layout.config, len(kinds))
    for states, window in zip(kinds, windows, strict=True):
        sums = {True: 0.0, False: 0.0}  # bytes of each token, and of a sequence whatever its length
        for state in states or ():
            sums[state.each_token] += _bytes(state, sizes, row, devices)
        layers.append(LayerCache(sums[True], window, sums[False]))
    return CacheSize(tuple(layers))


def _bytes(state: LayerState, sizes: Dimensions, row: RowBytes, devices: int) -> float:
    """Return the bytes of a state on one device."""
    rows, width = sizes.size(state.rows), sizes.size(state.width)
    if state.shared:
        heads = sizes.size(state.shared)
        rows = rows // heads * -(-heads // devices)
    if state.held is StateType.CACHE:
        return rows * row(width, state.part)
    return rows * width * (ACTIVATION if state.held is StateType.ACTIVATIONS else FLOAT32)


@strict_fields
@dataclass(frozen=True, slots=True)
class Load:
    """Load that is planned for.

    Attributes:
        context: tokens of a sequence, those of the prompt and of the answer; 0 is `CONTEXT`, or the positions that the
            model has.
        batch: sequences at a time.
        cache: type of the cache, see `quantforge.cache_kinds`.
        devices: that share the model by tensors.

    Raises:
        UsageError: a number is out of range, or there is no such type.
    """

    context: int = 0
    batch: int = 1
    cache: str = PLAIN
    devices: int = 1

    def __post_init__(self) -> None:
        for name, value in (
            ("context", self.context),
            ("batch", self.batch),
            ("tensor-parallel", self.devices),
        ):
            if type(value) is not int or not (name != "context") <= value <= MOST:
                raise UsageError(f"--{name} {value}: out of range", f"a number from 1 to {MOST}")
        rows_of(self.cache)


@dataclass(frozen=True, slots=True)
class OnCard:
    """A load on one kind of device.

    Attributes:
        name: of the card, or "given".
        card: the device.
        fits: whether all of it has room in `MARGIN` of the memory of every device.
        largest_batch: sequences of the context that would, 0 for none.
        largest_context: tokens of every sequence that would, as far as the model has positions; 0 for none.
        seconds_per_token: of each sequence, by the roofline; None where the card states no bandwidth.
        tokens_per_second: of all sequences together, by the roofline.
        bound: what the roofline is bound by: ``bandwidth`` or ``compute``.
        cost_per_million: price of a million tokens; None without a price.
    """

    name: str
    card: Card
    fits: bool
    largest_batch: int
    largest_context: int
    seconds_per_token: float | None
    tokens_per_second: float | None
    bound: str
    cost_per_million: float | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """A planned result under a load; bytes are of one device.

    Attributes:
        load: what is planned for.
        positions: that the model has.
        weights_bytes: of all weights.
        cache: of one sequence.
        activation_bytes: of a step.
        traffic: the weights as they are read, on all devices together.
        vocabulary: number of logits of a token.
        hidden: width of the residuals.
    """

    load: Load
    positions: int
    traffic: WeightTraffic
    cache: CacheSize
    vocabulary: int
    hidden: int

    @property
    def weights_bytes(self) -> float:
        """Return the bytes of weights on one device."""
        return self.traffic.held / self.load.devices

    @property
    def cache_bytes(self) -> float:
        """Return the bytes of the cache of all sequences on one device."""
        return self.load.batch * self.cache.sequence_bytes(self.load.context)

    def activation_bytes(self, batch: int | None = None) -> float:
        """Return the bytes of a step: at the widest place of a block, and logits of every sequence in float32."""
        batch = batch or self.load.batch
        wide = 2 * self.hidden + self.traffic.widest / self.load.devices
        return ACTIVATION * max(batch, CHUNK) * wide + FLOAT32 * batch * self.vocabulary

    def needed(self, batch: int | None = None, context: int | None = None) -> float:
        """Return the bytes that one device needs, in all."""
        batch, context = batch or self.load.batch, context or self.load.context
        kept = batch * self.cache.sequence_bytes(context)
        return self.weights_bytes + kept + self.activation_bytes(batch)

    def step_bytes(self) -> float:
        """Return the bytes that a step of decoding reads on one device, at the whole context."""
        weights = self.traffic.step_bytes(self.load.batch) / self.load.devices
        return weights + self.cache_bytes

    def on(self, name: str, card: Card, price: float | None = None) -> OnCard:
        """Return the load on a kind of device.

        Args:
            name: of the card.
            card: the device.
            price: of all devices for an hour.
        """
        load, room = self.load, MARGIN * card.memory
        seconds, bound = None, ""
        if card.bandwidth:
            reads = self.step_bytes() / card.bandwidth
            products = 2 * self.traffic.token_weights * load.batch / load.devices
            computes = products / card.compute if card.compute else 0.0
            seconds = max(reads, computes)
            bound = "compute" if computes > reads else "bandwidth"
        rate = load.batch / seconds if seconds else None
        return OnCard(
            name=name,
            card=card,
            fits=bool(card.memory) and self.needed() <= room,
            largest_batch=_largest(lambda n: self.needed(batch=n) <= room, MOST),
            largest_context=_largest(lambda n: self.needed(context=n) <= room, self.positions),
            seconds_per_token=seconds,
            tokens_per_second=rate,
            bound=bound,
            cost_per_million=None
            if price is None or not rate
            else price * _MILLION / (_HOUR * rate),
        )


def capacity(plan: Plan, model_layout: ModelLayout, load: Load) -> Capacity:
    """Return a planned result under a load.

    Args:
        plan: of the result.
        model_layout: the model.
        load: what is planned for.

    Raises:
        UsageError: no such type of cache, or more tokens than the model has positions.
        InputError: what the layers of the family keep is not declared, or its sizes are not known.
    """
    cache = cache_size(model_layout, rows_of(load.cache), load.devices)
    sizes = model_layout.dimensions
    assert sizes is not None  # as `cache_size` has seen
    load = replace(load, context=load.context or min(CONTEXT, sizes.positions))
    if load.context > sizes.positions:
        raise UsageError(
            f"--context {load.context}: the model has {sizes.positions} positions",
            f"--context {sizes.positions}, or fewer",
        )
    traffic = weight_traffic(plan, model_layout)
    return Capacity(load, sizes.positions, traffic, cache, sizes.vocab, sizes.hidden)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to ``most`` that fits, 0 for none; what fits does so with less."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))
