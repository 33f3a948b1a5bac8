"""Capacity planning: whether a quantized model and its KV cache fit on a GPU, its roofline speed and cost.

Standard attention caches 2 x heads x head dimension numbers per token and layer. Layers with a sliding window cache
only the tokens of the window, latent attention (MLA) one narrow vector per token, and linear-attention and state-space
layers a state of fixed size. What a layer caches is declared with its kind (`quantforge.architectures.layer_kind`).

Let ``w`` be the bytes of weights that a decoding step reads, ``c`` the bytes of cache of each of ``b`` sequences, and
``p`` the number of weights that a token is multiplied by. A step produces one token of every sequence and takes at
least

    max((w + b c) / bandwidth, 2 p b / compute)

This is the roofline model: every byte is read once, every product is computed once, and nothing else takes time. No
engine can be faster; how close an engine comes has to be measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.layer_kind import KEYS, VALUES, LayerState, StateType
from quantforge.architectures.match import ModelLayout
from quantforge.arguments import strict_fields
from quantforge.cache_kinds import PLAIN, parse_cache_kind
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.planning.gpu_cards import Card
from quantforge.planning.weight_traffic import WeightTraffic, weight_traffic
from quantforge.plans import Plan
from quantforge_kernels import kv_row_layout

USABLE_MEMORY_SHARE = 0.9  # the rest is left for code, CUDA graphs and the allocator
PREFILL_CHUNK = 2048  # minimum number of prompt tokens that a prefill step processes
DEFAULT_CONTEXT = 4096  # tokens, if none is given and the model has as many positions
MAX_COUNT = 1 << 30  # upper limit of requested tokens or sequences
ACTIVATION_BYTES, FLOAT32_BYTES = 2, 4  # of one number
_MILLION, _HOUR = 1e6, 3600
# Bytes of a cache row, by its width and by `LayerState.part`
RowBytes = Callable[[int, str], float]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Cache bytes of one layer and one sequence.

    Attributes:
        token_bytes: bytes for each cached token.
        window: maximum number of cached tokens; 0 if there is no limit.
        fixed_bytes: bytes that do not depend on the length of the sequence.
    """

    token_bytes: float
    window: int
    fixed_bytes: float


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of the cache of one sequence on one device."""

    layers: tuple[LayerCache, ...]

    @property
    def token_bytes(self) -> float:
        """Return the bytes of each token while no sliding window is full."""
        return sum(layer.token_bytes for layer in self.layers)

    @property
    def token_bytes_after_windows(self) -> float:
        """Return the bytes of each additional token once all sliding windows are full."""
        return sum(layer.token_bytes for layer in self.layers if not layer.window)

    @property
    def fixed_bytes(self) -> float:
        """Return the bytes of a sequence that do not depend on its length."""
        return sum(layer.fixed_bytes for layer in self.layers)

    def sequence_bytes(self, tokens: int) -> float:
        """Return the bytes of a sequence with the given number of tokens."""
        return self.fixed_bytes + sum(
            layer.token_bytes * (min(tokens, layer.window) if layer.window else tokens)
            for layer in self.layers
        )


def cache_row_bytes(kind: str) -> RowBytes:
    """Return a function that computes the bytes of one row of this runtime's KV cache, scales included.

    Args:
        kind: type of the cache, see `quantforge.cache_kinds`.

    Raises:
        UsageError: there is no such type of cache.
        RefusedError: (by the returned function) a layer caches one vector for keys and values together, and the cache
            stores keys and values differently.
    """
    keys, values = parse_cache_kind(kind)

    def row(width: int, role: str) -> float:
        if role not in {KEYS, VALUES} and keys != values:
            raise RefusedError(
                f"--cache {kind}: a layer keeps one vector for keys and values together",
                "one word for both",
            )
        return kv_row_layout.row_bytes(width, values if role == VALUES else keys, ACTIVATION_BYTES)

    return row


def cache_size(model_layout: ModelLayout, row_bytes: RowBytes, devices: int = 1) -> CacheSize:
    """Return the size of the cache of one sequence on one device.

    Args:
        model_layout: the model.
        row_bytes: returns the bytes of one cache row, see `cache_row_bytes`.
        devices: number of tensor-parallel devices: each holds its share of the heads, at least one, and every latent
            vector in full.

    Raises:
        InputError: what the layers of the model's family cache is not declared.
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
    for layer_states, window in zip(kinds, windows, strict=True):
        byte_sums = {True: 0.0, False: 0.0}  # bytes of each token, and of a sequence of any length
        for state in layer_states or ():
            byte_sums[state.per_token] += _state_bytes(state, sizes, row_bytes, devices)
        layers.append(LayerCache(byte_sums[True], window, byte_sums[False]))
    return CacheSize(tuple(layers))


def _state_bytes(state: LayerState, sizes: Dimensions, row_bytes: RowBytes, devices: int) -> float:
    """Return the bytes of one cached state on one device."""
    rows, width = sizes.size(state.rows), sizes.size(state.width)
    if state.shared:
        heads = sizes.size(state.shared)
        rows = rows // heads * -(-heads // devices)
    if state.dtype is StateType.CACHE:
        return rows * row_bytes(width, state.part)
    return (
        rows * width * (ACTIVATION_BYTES if state.dtype is StateType.ACTIVATIONS else FLOAT32_BYTES)
    )


@strict_fields
@dataclass(frozen=True, slots=True)
class Load:
    """Serving load to plan for.

    Attributes:
        context: tokens of a sequence, prompt and completion together; 0 for the smaller of `DEFAULT_CONTEXT` and the
            model's maximum position.
        batch: number of concurrent sequences.
        cache: type of the KV cache, see `quantforge.cache_kinds`.
        devices: number of tensor-parallel devices.

    Raises:
        UsageError: a number is out of range, or there is no such type of cache.
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
            if type(value) is not int or not (name != "context") <= value <= MAX_COUNT:
                raise UsageError(
                    f"--{name} {value}: out of range", f"a number from 1 to {MAX_COUNT}"
                )
        cache_row_bytes(self.cache)


@dataclass(frozen=True, slots=True)
class CardCapacity:
    """A serving load on one kind of GPU.

    Attributes:
        name: name of the GPU, or "given" if the user specified its figures.
        card: its memory, bandwidth and compute.
        fits: whether everything fits into `USABLE_MEMORY_SHARE` of each device's memory.
        largest_batch: largest number of sequences of this context that fits; 0 if not even one fits.
        largest_context: largest context of all sequences that fits, up to the model's maximum position; 0 if none fits.
        seconds_per_token: roofline time of a decoding step; None if the bandwidth is unknown.
        tokens_per_second: roofline throughput of all sequences together.
        limited_by: what limits the roofline: ``bandwidth`` or ``compute``.
        cost_per_million: price of a million tokens; None without a price.
    """

    name: str
    card: Card
    fits: bool
    largest_batch: int
    largest_context: int
    seconds_per_token: float | None
    tokens_per_second: float | None
    limited_by: str
    cost_per_million: float | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory and roofline figures of a planned model under a serving load; bytes are those of one device.

    Attributes:
        load: the serving load.
        positions: maximum position of the model.
        traffic: bytes of weights held and read, on all devices together.
        cache: size of the cache of one sequence.
        vocabulary: number of logits of a token.
        hidden: hidden size of the model.
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
        """Return the cache bytes of all sequences on one device."""
        return self.load.batch * self.cache.sequence_bytes(self.load.context)

    def activation_bytes(self, batch: int | None = None) -> float:
        """Return the activation bytes of a step: the widest point of a block, and float32 logits of every sequence."""
        batch = batch or self.load.batch
        width = 2 * self.hidden + self.traffic.max_layer_values / self.load.devices
        return (
            ACTIVATION_BYTES * max(batch, PREFILL_CHUNK) * width
            + FLOAT32_BYTES * batch * self.vocabulary
        )

    def needed_bytes(self, batch: int | None = None, context: int | None = None) -> float:
        """Return the total bytes that one device needs."""
        batch, context = batch or self.load.batch, context or self.load.context
        cache_bytes = batch * self.cache.sequence_bytes(context)
        return self.weights_bytes + cache_bytes + self.activation_bytes(batch)

    def step_bytes(self) -> float:
        """Return the bytes that a decoding step reads on one device with all sequences at full context."""
        weights = self.traffic.step_bytes(self.load.batch) / self.load.devices
        return weights + self.cache_bytes

    def on_card(self, name: str, card: Card, price: float | None = None) -> CardCapacity:
        """Return the capacity and the roofline on one kind of GPU.

        Args:
            name: name of the GPU.
            card: its memory, bandwidth and compute.
            price: price of all devices for an hour, or None.
        """
        load, usable_bytes = self.load, USABLE_MEMORY_SHARE * card.memory
        seconds, bound = None, ""
        if card.bandwidth:
            read_seconds = self.step_bytes() / card.bandwidth
            operations = 2 * self.traffic.token_weights * load.batch / load.devices
            compute_seconds = operations / card.compute if card.compute else 0.0
            seconds = max(read_seconds, compute_seconds)
            bound = "compute" if compute_seconds > read_seconds else "bandwidth"
        rate = load.batch / seconds if seconds else None
        return CardCapacity(
            name=name,
            card=card,
            fits=bool(card.memory) and self.needed_bytes() <= usable_bytes,
            largest_batch=_largest_fitting(
                lambda n: self.needed_bytes(batch=n) <= usable_bytes, MAX_COUNT
            ),
            largest_context=_largest_fitting(
                lambda n: self.needed_bytes(context=n) <= usable_bytes, self.positions
            ),
            seconds_per_token=seconds,
            tokens_per_second=rate,
            limited_by=bound,
            cost_per_million=None
            if price is None or not rate
            else price * _MILLION / (_HOUR * rate),
        )


def capacity(plan: Plan, model_layout: ModelLayout, load: Load) -> Capacity:
    """Return the memory and roofline figures of a planned model under a serving load.

    Args:
        plan: plan of the model.
        model_layout: the source model.
        load: the serving load.

    Raises:
        UsageError: there is no such type of cache, or the context exceeds the model's maximum position.
        InputError: what the layers of the model's family cache is not declared, or its dimensions are unknown.
    """
    cache = cache_size(model_layout, cache_row_bytes(load.cache), load.devices)
    sizes = model_layout.dimensions
    assert sizes is not None  # as `cache_size` has seen
    load = replace(load, context=load.context or min(DEFAULT_CONTEXT, sizes.positions))
    if load.context > sizes.positions:
        raise UsageError(
            f"--context {load.context}: the model has {sizes.positions} positions",
            f"--context {sizes.positions}, or fewer",
        )
    traffic = weight_traffic(plan, model_layout)
    return Capacity(load, sizes.positions, traffic, cache, sizes.vocab, sizes.hidden)


def _largest_fitting(fits: Callable[[int], bool], upper_limit: int) -> int:
    """Return the largest number up to ``upper_limit`` that fits, 0 if none does; ``fits`` has to be monotonic."""
    return bisect_left(range(1, upper_limit + 1), True, key=lambda number: not fits(number))
