"""Capacity: whether a planned result fits beside its cache, how fast it can decode at best, and what a token costs.

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

from quantforge.architectures.cache_kinds import PLAIN
from quantforge.architectures.match import Matched
from quantforge.arguments import strict_fields
from quantforge.errors import UsageError
from quantforge.planning.cache_size import CacheSize, cache_size, rows_of
from quantforge.planning.cards import Card
from quantforge.planning.weight_traffic import WeightTraffic, weight_traffic
from quantforge.plans import Plan

MARGIN = 0.9  # of the memory: the rest is for code, graphs and the allocator
CHUNK = 2048  # tokens of a step that reads a prompt, at least
CONTEXT = 4096  # tokens, where nothing is said and the model has as many positions
MOST = 1 << 30  # tokens or sequences that are asked for
_ACTIVATION, _LOGIT = 2, 4  # bytes
_MILLION, _HOUR = 1e6, 3600


@strict_fields
@dataclass(frozen=True, slots=True)
class Load:
    """Load that is planned for.

    Attributes:
        context: tokens of a sequence, those of the prompt and of the answer; 0 is `CONTEXT`, or the positions that the
            model has.
        batch: sequences at a time.
        cache: type of the cache, see `quantforge.architectures.cache_kinds`.
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
        return _ACTIVATION * max(batch, CHUNK) * wide + _LOGIT * batch * self.vocabulary

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


def capacity(plan: Plan, matched: Matched, load: Load) -> Capacity:
    """Return a planned result under a load.

    Args:
        plan: of the result.
        matched: the model.
        load: what is planned for.

    Raises:
        UsageError: no such type of cache, or more tokens than the model has positions.
        InputError: what the layers of the family keep is not declared, or its sizes are not known.
    """
    cache = cache_size(matched, rows_of(load.cache), load.devices)
    sizes = matched.dimensions
    assert sizes is not None  # as `cache_size` has seen
    load = replace(load, context=load.context or min(CONTEXT, sizes.positions))
    if load.context > sizes.positions:
        raise UsageError(
            f"--context {load.context}: the model has {sizes.positions} positions",
            f"--context {sizes.positions}, or fewer",
        )
    traffic = weight_traffic(plan, matched)
    return Capacity(load, sizes.positions, traffic, cache, sizes.vocab, sizes.hidden)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to ``most`` that fits, 0 for none; what fits does so with less."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))
