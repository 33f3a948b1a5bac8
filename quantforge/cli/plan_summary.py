"""What is shown of a plan: by ``quantforge plan``, and by ``--dry-run`` of the verbs that would carry it out.

Three things are shown of a plan: what becomes of the tensors, what the run takes (`Forecast`), and, where a load is
named, what the result needs in use (`Deployment`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.api.output import SPARE_BYTES, memory_hint
from quantforge.artifacts.number_text import significant, size, size_and_bytes
from quantforge.cli.console import Console
from quantforge.cli.path_arguments import shown
from quantforge.cli.progress_bar import duration
from quantforge.engines import with_output_path
from quantforge.errors import UsageError
from quantforge.files.disk import free_bytes
from quantforge.planning import typed_quantities
from quantforge.planning.capacity import (
    PREFILL_CHUNK,
    USABLE_MEMORY_SHARE,
    Capacity,
    CardCapacity,
    Load,
)
from quantforge.planning.coverage import coverage
from quantforge.planning.gpu_cards import CARDS, Card, card_of
from quantforge.planning.run_work import (
    BYTES_PER_SECOND,
    OPERATIONS_PER_SECOND,
    RATE_BASIS,
    seconds_of,
)
from quantforge.plans import Action, Plan, RunWork, TensorPlan, substitution_notes
from quantforge.settings import Settings, memory_bytes, rounding_workers

if TYPE_CHECKING:
    from quantforge.api import Exported, Outcome

DISK, MEMORY = "disk", "memory"
_NUMBER = re.compile(r"\.\d+(?=\.)")


def show_plan(
    console: Console, plan: Plan, output: Path, took: Forecast | None, *, every: bool
) -> None:
    """Print a plan: totals, what its run takes, what happens to which layers, engines, substitutions."""
    if every:
        rows = [
            (
                tensor.name,
                "x".join(map(str, tensor.shape)),
                tensor.dtype,
                _becomes(tensor),
                size(tensor.output_bytes),
                tensor.rule,
            )
            for tensor in plan.tensors
        ]
        console.table(("tensor", "shape", "type", "becomes", "bytes", "rule"), rows)
    else:
        console.table(("layers", "tensors", "becomes", "bytes", "rule"), _summary(plan))
    console.text()
    for name, said in (
        ("method", f"{plan.method}  ->  {plan.format}"),
        ("density", plan.density),
        ("output", shown(output)),
        ("files", f"{size_and_bytes(plan.output_bytes)} in {len(plan.shards)}"),
        ("coverage", str(coverage(plan.tensors))),
        ("peak memory", f"{size(plan.peak_memory_bytes)} above the imports"),
    ):
        if (
            plan.peak_memory_bytes or name != "peak memory"
        ):  # which is not forecast of a mere conversion
            console.entry(name, said)
    if took is not None:
        _show_forecast(console, took, shown(output))
    for note in (*plan.notes, *plan.left_behind):
        console.entry("note", with_output_path(note, shown(output)))
    for text in substitution_notes(plan):
        console.text(text)
    console.text()
    console.table(
        ("engine", "loads", "why"),
        [(v.engine, v.word, v.reason) for v in plan.engines],
    )


def _summary(plan: Plan) -> list[tuple[str, ...]]:
    """Return rows that join the layers of all blocks that share name, action, scheme and rule."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for tensor in plan.tensors:
        key = (_generic(tensor), _becomes(tensor), tensor.rule)
        groups.setdefault(key, []).append(tensor.output_bytes)
    return [
        (name, str(len(stored)), made, size(sum(stored)), rule)
        for (name, made, rule), stored in groups.items()
    ]


def _becomes(tensor: TensorPlan) -> str:
    """Return the scheme that a tensor gets, or what else is done with it."""
    return str(tensor.scheme or tensor.action.value)


def _generic(tensor: TensorPlan) -> str:
    """Return the name of a layer, that of all blocks and of all experts together: ``layers.*.mlp.up_proj``.

    Outside of the blocks, as in towers, layers of all numbers are one.
    """
    name = tensor.name.removesuffix(".weight")
    if tensor.block < 0:
        return _NUMBER.sub(".*", name)
    blocks, found, layer = f".{name}".partition(f".{tensor.block}.")
    if not found:
        return name
    if tensor.expert >= 0:
        layer = ".*.".join(layer.rsplit(f".{tensor.expert}.", 1))
    return f"{blocks.rpartition('.')[2]}.*.{layer}".lstrip(".")


def plan_document(plan: Plan, output: Path, took: Forecast | None) -> dict[str, object]:
    """Return the plan as plain data (``quantforge.plan/1``)."""
    return {
        "schema": "quantforge.plan/1",
        "model": plan.model,
        "output": str(output),
        "model_type": plan.model_type,
        "method": plan.method,
        "format": plan.format,
        "bits_per_weight": plan.bits_per_weight,
        "bits_per_weight_in_blocks": plan.bits_per_weight_in_blocks,
        "bits_per_weight_total": plan.bits_per_weight_total,
        "block_share_quantized": coverage(plan.tensors).share,
        "kept_in_blocks": dict(coverage(plan.tensors).kept),
        "output_bytes": plan.output_bytes,
        "files": len(plan.shards),
        "peak_memory_bytes": plan.peak_memory_bytes,
        "forecast": _forecast_document(took) if took else None,
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "action": tensor.action.value,
                "scheme": str(tensor.scheme) if tensor.scheme else None,
                "rule": tensor.rule,
                "bytes": tensor.output_bytes if tensor.action is not Action.DROP else 0,
            }
            for tensor in plan.tensors
        ],
        "engines": [
            {"engine": v.engine, "loads": v.loads, "reason": v.reason} for v in plan.engines
        ],
        "substitutions": [event.to_json() for event in plan.substitutions],
        "notes": [with_output_path(note, output) for note in plan.notes],
        "left_behind": plan.left_behind,
    }


# ---- what a run takes


@dataclass(frozen=True, slots=True)
class Forecast:
    """Needs of a run, and what there is.

    Attributes:
        work: of the run.
        seconds: by step.
        threads: that share the work.
        on_disk: whether activations wait there.
        peak: bytes of memory, above the imports.
        free: bytes at the place of the output.
        memory: bytes of this machine, None where the system does not tell.
    """

    work: RunWork
    seconds: dict[str, float]
    threads: int
    on_disk: bool
    peak: int
    free: int
    memory: int | None

    @property
    def disk(self) -> int:
        """Return the bytes that a run takes on the disk at most."""
        states = self.work.states_bytes if self.on_disk else 0
        return self.work.output_bytes + states + self.work.guide_bytes + SPARE_BYTES


def forecast(plan: Plan, output: Path, settings: Settings) -> Forecast | None:
    """Return the forecast of a plan's run; None for a plan that quantizes nothing.

    Args:
        plan: of the run.
        output: its result.
        settings: its threads, and where activations wait.
    """
    if plan.work is None:
        return None
    threads = rounding_workers(settings)
    return Forecast(
        plan.work,
        seconds_of(plan.work, threads),
        threads,
        settings.activations == DISK,
        plan.peak_memory_bytes,
        free_bytes(output.absolute().parent),
        memory_bytes(),
    )


def _show_forecast(console: Console, found: Forecast, output: str) -> None:
    """Print what a run takes, by what basis, and what is missing for it."""
    whole = sum(found.seconds.values())
    parts = [
        f"{step} {duration(seconds)}"
        for step, seconds in found.seconds.items()
        if seconds >= 0.01 * whole
    ]
    threads = f"{found.threads} thread{'s' * (found.threads > 1)}"
    console.entry("time", f"about {duration(whole)} on {threads}: {', '.join(parts)}")
    console.entry(
        "by",
        f"{significant(OPERATIONS_PER_SECOND / 1e9)} GFLOP/s and {size(BYTES_PER_SECOND)}/s read and digested,"
        f" {RATE_BASIS}",
    )
    console.entry(
        "source", f"{size(found.work.source_bytes)}, read {found.work.reads} times, never copied"
    )
    console.entry("disk", _disk(found, output))
    for what, said in _lacks(found, output):
        console.entry("beyond", f"{what}: {said}")


def _disk(found: Forecast, output: str) -> str:
    parts = [f"{size(found.work.output_bytes)} of weights"]
    states, guide = found.work.states_bytes, found.work.guide_bytes
    if states:
        where = "hidden states" if found.on_disk else "more with --activations disk"
        parts.append(f"{size(states)} {where}")
    if guide:
        parts.append(f"{size(guide)} for the backward pass")
    return f"{', '.join(parts)}, beside {output}; {size(found.free)} are free there"


def _lacks(found: Forecast, output: str) -> Iterator[tuple[str, str]]:
    """Yield what this machine has too little of, and what to type."""
    if found.disk > found.free:
        yield DISK, f"{size(found.disk)} are needed for {output}: -o on another disk"
    if found.memory is not None and found.peak > found.memory:
        yield MEMORY, memory_hint(found.peak, found.memory, on_disk=found.on_disk)


def _forecast_document(found: Forecast) -> dict[str, object]:
    """Return a forecast as plain data: the key ``forecast`` of a plan's document."""
    return {
        "seconds": {step: round(seconds, 1) for step, seconds in found.seconds.items()},
        "total_seconds": math.ceil(sum(found.seconds.values())),
        "threads": found.threads,
        "products_per_second": OPERATIONS_PER_SECOND,
        "digested_bytes_per_second": BYTES_PER_SECOND,
        "basis": RATE_BASIS,
        "source_bytes": found.work.source_bytes,
        "source_reads": found.work.reads,
        "states_bytes": found.work.states_bytes,
        "guide_bytes": found.work.guide_bytes,
        "disk_bytes": found.disk,
        "free_bytes": found.free,
        "memory_bytes": found.memory,
        "beyond": [what for what, _ in _lacks(found, "")],
    }


# ---- what the result needs in use


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
        context = (
            None if self.context is None else typed_quantities.tokens(self.context, "--context")
        )
        values = {"context": context, "batch": self.batch, "cache": self.cache, "devices": devices}
        given: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
        return Load(**given)

    def cards(self) -> Mapping[str, Card]:
        """Return the described device, or all known ones; raise UsageError for a malformed value or unknown name."""
        described: dict[str, Any] = {
            name: parse(text, f"--{name}")
            for name, parse, text in (
                ("memory", typed_quantities.memory, self.memory),
                ("bandwidth", typed_quantities.bandwidth, self.bandwidth),
                ("compute", typed_quantities.compute, self.compute),
            )
            if text is not None
        }
        if self.device_name is not None:
            return {self.device_name.lower(): replace(card_of(self.device_name), **described)}
        if described:
            return {"given": replace(Card(0.0, 0.0, 0.0, "the command line"), **described)}
        return CARDS

    def rows(self, found: Capacity) -> list[CardCapacity]:
        """Return the load on each device; raise UsageError as `cards`, or for a price without a device."""
        price = None if self.price is None else typed_quantities.price(self.price, "--price")
        cards = self.cards()
        if price is not None and (cards is CARDS or not all(c.bandwidth for c in cards.values())):
            raise UsageError(
                f"--price {self.price}: of which device, and how fast",
                "add --device-name or --bandwidth",
            )
        return [found.on(name, card, price) for name, card in cards.items()]


def show_capacity(console: Console, found: Capacity, rows: list[CardCapacity]) -> None:
    """Print what a result needs, and the devices that are looked at."""
    load, cache = found.load, found.cache
    devices = f" on each of {load.devices} devices" if load.devices > 1 else ""
    sequences = "1 sequence" if load.batch == 1 else f"{load.batch} sequences"
    console.text()
    console.text(f"memory{devices}, {sequences} of {load.context:,} tokens, cache in {load.cache}")
    each = f"{cache.token_bytes:,.0f} bytes a token"
    if cache.token_bytes_after_windows != cache.token_bytes:
        each += f", {cache.token_bytes_after_windows:,.0f} behind the windows"
    if cache.fixed_bytes:
        each += f", {size(cache.fixed_bytes)} of states"
    for name, nbytes, why in (
        ("weights", found.weights_bytes, "as they are stored"),
        ("cache", found.cache_bytes, each),
        (
            "activations",
            found.activation_bytes(),
            f"a step of {max(load.batch, PREFILL_CHUNK):,} tokens, and logits",
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
        f"fits: in {USABLE_MEMORY_SHARE:.0%} of the memory; batch, context: the largest that do. Times are a"
        " roofline, no measurement: bytes of a step over bandwidth, or products over compute, nothing else."
    )


def _cells(row: CardCapacity, priced: bool) -> Iterator[str]:
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


def capacity_document(found: Capacity, rows: list[CardCapacity]) -> dict[str, object]:
    """Return what a result needs as plain data: the key ``capacity`` of a plan's document."""
    load, cache = found.load, found.cache
    return {
        "context": load.context,
        "batch": load.batch,
        "cache": load.cache,
        "devices": load.devices,
        "weights_bytes": round(found.weights_bytes),
        "cache_token_bytes": round(cache.token_bytes),
        "cache_token_bytes_behind_windows": round(cache.token_bytes_after_windows),
        "cache_state_bytes": round(cache.fixed_bytes),
        "cache_sequence_bytes": round(cache.sequence_bytes(load.context)),
        "cache_bytes": round(found.cache_bytes),
        "activation_bytes": round(found.activation_bytes()),
        "needed_bytes": round(found.needed()),
        "step_bytes": round(found.step_bytes()),
        "step_weight_bytes": round(found.traffic.step_bytes(load.batch) / load.devices),
        "weights_per_token": round(found.traffic.token_weights),
        "usable_share": USABLE_MEMORY_SHARE,
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


# ---- --dry-run of other verbs


class _Announced(Exception):  # no error, it ends the run
    def __init__(self, plan: Plan, out: Path) -> None:
        super().__init__()
        self.plan, self.out = plan, out


def show_dry_run(
    console: Console,
    settings: Settings,
    imatrix: Path | None,
    run: Callable[..., Outcome | Exported],
    size: str | None = None,
) -> None:
    """Show what a run would do, with all that it decides and refuses before its work; nothing is written.

    Raises:
        QuantForgeError: as the run; an importance file is missing, which a run would make first, or a ``size`` is
            asked for, which is met by a measurement.
    """
    if size is not None:
        raise UsageError(
            f"--dry-run: it measures nothing, and what has the size {size} is found by a measurement",
            "quantforge plan with the same options says what headers tell",
        )
    if imatrix is not None and not imatrix.exists():
        raise UsageError(
            f"--imatrix {imatrix}: is missing, and --dry-run makes nothing", "leave one of them out"
        )

    def stop(announced: Plan, out: Path) -> None:
        raise _Announced(announced, out)

    try:
        done = run(settings=replace(settings, announce=stop))
    except _Announced as reached:
        asked, place = reached.plan, reached.out
    else:
        from quantforge.api import Exported

        assert not isinstance(done, Exported)  # an export is never found finished
        asked, place = done.plan, done.out
        console.note(f"{shown(place)}: this command has made it, and would end at once")
    took = forecast(asked, place, settings)
    if console.as_json:
        console.document(plan_document(asked, place, took))
    else:
        show_plan(console, asked, place, took, every=False)
