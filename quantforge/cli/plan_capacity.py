"""Show what a planned result needs in use: memory, devices that it fits on, time and price of a token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantforge.cli.console import Console
from quantforge.errors import UsageError
from quantforge.planning import quantities
from quantforge.planning.capacity import CHUNK, MARGIN, Capacity, Load, OnCard
from quantforge.planning.cards import CARDS, Card, card_of
from quantforge.results.significant import significant, size


@dataclass(frozen=True, slots=True)
class Deployment:
    """Options of `plan` about the device and the load of a result in use, as they are typed; None if absent."""

    context: str | None = None
    batch: int | None = None
    cache: str | None = None
    memory: str | None = None
    bandwidth: str | None = None
    compute: str | None = None
    device_name: str | None = None
    price: str | None = None

    @property
    def given(self) -> bool:
        """Return whether any option is given."""
        return self != Deployment()

    def load(self, devices: int | None) -> Load:
        """Return the load to plan for; raise UsageError for a value that is malformed or out of range."""
        context = None if self.context is None else quantities.tokens(self.context, "--context")
        values = {"context": context, "batch": self.batch, "cache": self.cache, "devices": devices}
        given: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
        return Load(**given)

    def cards(self) -> Mapping[str, Card]:
        """Return the described device, or all known ones; raise UsageError for a malformed value or unknown name."""
        described: dict[str, Any] = {
            name: parse(text, f"--{name}")
            for name, parse, text in (
                ("memory", quantities.memory, self.memory),
                ("bandwidth", quantities.bandwidth, self.bandwidth),
                ("compute", quantities.compute, self.compute),
            )
            if text is not None
        }
        if self.device_name is not None:
            return {self.device_name.lower(): replace(card_of(self.device_name), **described)}
        if described:
            return {"given": replace(Card(0.0, 0.0, 0.0, "the command line"), **described)}
        return CARDS

    def rows(self, found: Capacity) -> list[OnCard]:
        """Return the load on each device; raise UsageError as `cards`, or for a price without a device."""
        price = None if self.price is None else quantities.price(self.price, "--price")
        cards = self.cards()
        if price is not None and (cards is CARDS or not all(c.bandwidth for c in cards.values())):
            raise UsageError(
                f"--price {self.price}: of which device, and how fast",
                "add --device-name or --bandwidth",
            )
        return [found.on(name, card, price) for name, card in cards.items()]


def show(console: Console, found: Capacity, rows: list[OnCard]) -> None:
    """Print what a result needs, and the devices that are looked at."""
    load, cache = found.load, found.cache
    devices = f" on each of {load.devices} devices" if load.devices > 1 else ""
    sequences = "1 sequence" if load.batch == 1 else f"{load.batch} sequences"
    console.text()
    console.text(f"memory{devices}, {sequences} of {load.context:,} tokens, cache in {load.cache}")
    each = f"{cache.token_bytes:,.0f} bytes a token"
    if cache.lasting_token_bytes != cache.token_bytes:
        each += f", {cache.lasting_token_bytes:,.0f} behind the windows"
    if cache.fixed_bytes:
        each += f", {size(cache.fixed_bytes)} of states"
    for name, nbytes, why in (
        ("weights", found.weights_bytes, "as they are stored"),
        ("cache", found.cache_bytes, each),
        (
            "activations",
            found.activation_bytes(),
            f"a step of {max(load.batch, CHUNK):,} tokens, and logits",
        ),
        ("together", found.needed(), ""),
        ("read a step", found.step_bytes(), "weights and the whole cache, once"),
    ):
        console.text(f"  {name:<12}{size(nbytes):>9}  {why}".rstrip())
    console.text()
    priced = any(row.cost_per_million is not None for row in rows)
    headers = ["device", "memory", "fits", "batch", "context", "ms/token", "tokens/s", "bound by"]
    console.table(
        [*headers, *(["per 1M"] if priced else [])], [tuple(_cells(row, priced)) for row in rows]
    )
    console.text()
    console.wrapped(
        f"fits: in {MARGIN:.0%} of the memory; batch, context: the largest that do. Times are a roofline, no"
        " measurement: bytes of a step over bandwidth, or products over compute, nothing else."
    )


def _cells(row: OnCard, priced: bool) -> Iterator[str]:
    known = bool(row.card.memory)
    yield row.name
    yield size(row.card.memory) if known else "-"
    yield ("yes" if row.fits else "no") if known else "-"
    yield str(row.largest_batch) if known else "-"
    yield str(row.largest_context) if known else "-"
    yield "-" if row.seconds_per_token is None else significant(1e3 * row.seconds_per_token)
    yield "-" if row.tokens_per_second is None else significant(row.tokens_per_second)
    yield row.bound or "-"
    if priced:
        yield "-" if row.cost_per_million is None else significant(row.cost_per_million)


def document(found: Capacity, rows: list[OnCard]) -> dict[str, object]:
    """Return what a result needs as plain data: the key ``capacity`` of a plan's document."""
    load, cache = found.load, found.cache
    return {
        "context": load.context,
        "batch": load.batch,
        "cache": load.cache,
        "devices": load.devices,
        "weights_bytes": round(found.weights_bytes),
        "cache_token_bytes": round(cache.token_bytes),
        "cache_token_bytes_behind_windows": round(cache.lasting_token_bytes),
        "cache_state_bytes": round(cache.fixed_bytes),
        "cache_sequence_bytes": round(cache.sequence_bytes(load.context)),
        "cache_bytes": round(found.cache_bytes),
        "activation_bytes": round(found.activation_bytes()),
        "needed_bytes": round(found.needed()),
        "step_bytes": round(found.step_bytes()),
        "step_weight_bytes": round(found.traffic.step_bytes(load.batch) / load.devices),
        "weights_per_token": round(found.traffic.token_weights),
        "usable_share": MARGIN,
        "cards": [
            {
                "name": row.name,
                "memory_bytes": round(row.card.memory) or None,
                "bandwidth": row.card.bandwidth or None,
                "compute": row.card.compute or None,
                "source": row.card.source,
                "fits": row.fits if row.card.memory else None,
                "largest_batch": row.largest_batch if row.card.memory else None,
                "largest_context": row.largest_context if row.card.memory else None,
                "seconds_per_token": row.seconds_per_token,
                "tokens_per_second": row.tokens_per_second,
                "bound": row.bound or None,
                "cost_per_million": row.cost_per_million,
            }
            for row in rows
        ],
    }
