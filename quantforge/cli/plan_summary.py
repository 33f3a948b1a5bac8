"""Print a plan, for ``quantforge plan`` and for ``--dry-run`` of other verbs.

Three things are shown: what happens to the tensors, time and memory of the run (`Forecast`), and, if a load is given,
memory and speed of the result in use (`Deployment`).
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
from quantforge.cli.path_arguments import display_path
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
_NUMBER_IN_NAME = re.compile(r"\.\d+(?=\.)")


def show_plan(
    console: Console, plan: Plan, output: Path, run_forecast: Forecast | None, *, all_tensors: bool
) -> None:
    """Print a plan: actions on layers or tensors, totals, forecast of the run, engines, substitutions."""
    if all_tensors:
        rows = [
            (
                tensor.name,
                "x".join(map(str, tensor.shape)),
                tensor.dtype,
                _action_text(tensor),
                size(tensor.output_bytes),
                tensor.rule,
            )
            for tensor in plan.tensors
        ]
        console.print_table(("tensor", "shape", "type", "becomes", "bytes", "rule"), rows)
    else:
        console.print_table(("layers", "tensors", "becomes", "bytes", "rule"), _summary(plan))
    console.print_text()
    for name, entry_text in (
        ("method", f"{plan.method}  ->  {plan.format}"),
        ("density", plan.density),
        ("output", display_path(output)),
        ("files", f"{size_and_bytes(plan.output_bytes)} in {len(plan.shards)}"),
        ("coverage", str(coverage(plan.tensors))),
        ("peak memory", f"{size(plan.peak_memory_bytes)} above the imports"),
    ):
        if plan.peak_memory_bytes or name != "peak memory":  # conversions have no memory forecast
            console.print_entry(name, entry_text)
    if run_forecast is not None:
        _show_forecast(console, run_forecast, display_path(output))
    for note in (*plan.notes, *plan.not_copied):
        console.print_entry("note", with_output_path(note, display_path(output)))
    for text in substitution_notes(plan):
        console.print_text(text)
    console.print_text()
    console.print_table(
        ("engine", "loads", "why"),
        [(v.engine, v.word, v.reason) for v in plan.engines],
    )


def _summary(plan: Plan) -> list[tuple[str, ...]]:
    """Return table rows, one for all layers with the same name, action, scheme and rule."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for tensor in plan.tensors:
        key = (_generic_name(tensor), _action_text(tensor), tensor.rule)
        groups.setdefault(key, []).append(tensor.output_bytes)
    return [
        (name, str(len(sizes)), action_text, size(sum(sizes)), rule)
        for (name, action_text, rule), sizes in groups.items()
    ]


def _action_text(tensor: TensorPlan) -> str:
    """Return the scheme of a tensor, or the name of another action."""
    return str(tensor.scheme or tensor.action.value)


def _generic_name(tensor: TensorPlan) -> str:
    """Return the name of a layer with block and expert numbers replaced: ``layers.*.mlp.up_proj``.

    Outside of the blocks, as in vision towers, all numbers are replaced.
    """
    name = tensor.name.removesuffix(".weight")
    if tensor.block < 0:
        return _NUMBER_IN_NAME.sub(".*", name)
    blocks, separator, layer = f".{name}".partition(f".{tensor.block}.")
    if not separator:
        return name
    if tensor.expert >= 0:
        layer = ".*.".join(layer.rsplit(f".{tensor.expert}.", 1))
    return f"{blocks.rpartition('.')[2]}.*.{layer}".lstrip(".")


def plan_document(plan: Plan, output: Path, run_forecast: Forecast | None) -> dict[str, object]:
    """Return the plan as plain data (``quantforge.plan/2``)."""
    return {
        "schema": "quantforge.plan/2",
        "model": plan.model,
        "output": str(output),
        "model_type": plan.model_type,
        "method": plan.method,
        "format": plan.format,
        "bits_per_weight": plan.bits_per_weight,
        "bits_per_weight_in_blocks": plan.bits_per_weight_in_blocks,
        "bits_per_weight_total": plan.bits_per_weight_total,
        "quantized_share_in_blocks": coverage(plan.tensors).share,
        "unquantized_in_blocks": dict(coverage(plan.tensors).kept),
        "output_bytes": plan.output_bytes,
        "files": len(plan.shards),
        "peak_memory_bytes": plan.peak_memory_bytes,
        "forecast": _forecast_document(run_forecast) if run_forecast else None,
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
        "not_copied": plan.not_copied,
    }


# ---- what a run takes


@dataclass(frozen=True, slots=True)
class Forecast:
    """Time, memory and disk space of a run, and what is available.

    Attributes:
        work: amount of work of the run.
        seconds: estimated time by step.
        threads: number of threads.
        states_on_disk: whether hidden states are kept on disk.
        peak_bytes: peak memory in bytes, above that of the imports.
        free_disk_bytes: free disk space in bytes at the output.
        machine_memory: memory of this machine in bytes; None if unknown.
    """

    work: RunWork
    seconds: dict[str, float]
    threads: int
    states_on_disk: bool
    peak_bytes: int
    free_disk_bytes: int
    machine_memory: int | None

    @property
    def needed_disk_bytes(self) -> int:
        """Return the maximum disk space of the run in bytes."""
        states_bytes = self.work.states_bytes if self.states_on_disk else 0
        return self.work.output_bytes + states_bytes + self.work.guide_bytes + SPARE_BYTES


def forecast(plan: Plan, output: Path, settings: Settings) -> Forecast | None:
    """Return the forecast of the run of a plan; None if nothing is quantized.

    Args:
        plan: the plan.
        output: path of the result.
        settings: number of threads, and where hidden states are kept.
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


def _show_forecast(console: Console, run_forecast: Forecast, output: str) -> None:
    """Print time and disk space of a run, how they are estimated, and shortages."""
    total_seconds = sum(run_forecast.seconds.values())
    phase_texts = [
        f"{step} {duration(seconds)}"
        for step, seconds in run_forecast.seconds.items()
        if seconds >= 0.01 * total_seconds
    ]
    threads = f"{run_forecast.threads} thread{'s' * (run_forecast.threads > 1)}"
    console.print_entry(
        "time", f"about {duration(total_seconds)} on {threads}: {', '.join(phase_texts)}"
    )
    console.print_entry(
        "by",
        f"{significant(OPERATIONS_PER_SECOND / 1e9)} GFLOP/s and {size(BYTES_PER_SECOND)}/s read and digested,"
        f" {RATE_BASIS}",
    )
    console.print_entry(
        "source",
        f"{size(run_forecast.work.source_bytes)}, read {run_forecast.work.source_reads} times, never copied",
    )
    console.print_entry("disk", _disk_text(run_forecast, output))
    for resource, text in _shortages(run_forecast, output):
        console.print_entry("beyond", f"{resource}: {text}")


def _disk_text(run_forecast: Forecast, output: str) -> str:
    size_texts = [f"{size(run_forecast.work.output_bytes)} of weights"]
    states_bytes, guide_bytes = run_forecast.work.states_bytes, run_forecast.work.guide_bytes
    if states_bytes:
        reason = "hidden states" if run_forecast.states_on_disk else "more with --activations disk"
        size_texts.append(f"{size(states_bytes)} {reason}")
    if guide_bytes:
        size_texts.append(f"{size(guide_bytes)} for the backward pass")
    return f"{', '.join(size_texts)}, beside {output}; {size(run_forecast.free_disk_bytes)} are free there"


def _shortages(run_forecast: Forecast, output: str) -> Iterator[tuple[str, str]]:
    """Yield resources that are too small for the run, with a remedy."""
    if run_forecast.needed_disk_bytes > run_forecast.free_disk_bytes:
        yield (
            DISK,
            f"{size(run_forecast.needed_disk_bytes)} are needed for {output}: -o on another disk",
        )
    if (
        run_forecast.machine_memory is not None
        and run_forecast.peak_bytes > run_forecast.machine_memory
    ):
        yield (
            MEMORY,
            memory_hint(
                run_forecast.peak_bytes,
                run_forecast.machine_memory,
                on_disk=run_forecast.states_on_disk,
            ),
        )


def _forecast_document(run_forecast: Forecast) -> dict[str, object]:
    """Return a forecast as plain data, the key ``forecast`` of a plan's document."""
    return {
        "seconds": {step: round(seconds, 1) for step, seconds in run_forecast.seconds.items()},
        "total_seconds": math.ceil(sum(run_forecast.seconds.values())),
        "threads": run_forecast.threads,
        "operations_per_second": OPERATIONS_PER_SECOND,
        "hashed_bytes_per_second": BYTES_PER_SECOND,
        "basis": RATE_BASIS,
        "source_bytes": run_forecast.work.source_bytes,
        "source_reads": run_forecast.work.source_reads,
        "hidden_states_bytes": run_forecast.work.states_bytes,
        "gradient_bytes": run_forecast.work.guide_bytes,
        "disk_bytes": run_forecast.needed_disk_bytes,
        "free_bytes": run_forecast.free_disk_bytes,
        "memory_bytes": run_forecast.machine_memory,
        "beyond": [resource for resource, _ in _shortages(run_forecast, "")],
    }


# ---- what the result needs in use


@dataclass(frozen=True, slots=True)
class Deployment:
    """Options of `plan` about device and load of a result in use, as typed; None if not given."""

    context: str | None = None
    batch: int | None = None
    cache: str | None = None
    memory: str | None = None
    bandwidth: str | None = None
    compute: str | None = None
    device_name: str | None = None
    price: str | None = None

    @property
    def is_given(self) -> bool:
        """Return whether any option is given."""
        return self != Deployment()

    def load(self, devices: int | None) -> Load:
        """Return the load to plan for; raise UsageError for a value that is malformed or out of range."""
        context = (
            None if self.context is None else typed_quantities.tokens(self.context, "--context")
        )
        values = {"context": context, "batch": self.batch, "cache": self.cache, "devices": devices}
        load_options: dict[str, Any] = {
            key: value for key, value in values.items() if value is not None
        }
        return Load(**load_options)

    def cards(self) -> Mapping[str, Card]:
        """Return the given device, or all known ones; raise UsageError for a malformed value or unknown name."""
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

    def rows(self, capacity: Capacity) -> list[CardCapacity]:
        """Return memory and speed on each device; raise UsageError as `cards`, or for a price without a device."""
        price = None if self.price is None else typed_quantities.price(self.price, "--price")
        cards = self.cards()
        if price is not None and (cards is CARDS or not all(c.bandwidth for c in cards.values())):
            raise UsageError(
                f"--price {self.price}: of which device, and how fast",
                "add --device-name or --bandwidth",
            )
        return [capacity.on_card(name, card, price) for name, card in cards.items()]


def show_capacity(console: Console, capacity: Capacity, rows: list[CardCapacity]) -> None:
    """Print the memory that a result needs, and memory and speed on each device."""
    load, cache = capacity.load, capacity.cache
    devices = f" on each of {load.devices} devices" if load.devices > 1 else ""
    sequences = "1 sequence" if load.batch == 1 else f"{load.batch} sequences"
    console.print_text()
    console.print_text(
        f"memory{devices}, {sequences} of {load.context:,} tokens, cache in {load.cache}"
    )
    cache_text = f"{cache.token_bytes:,.0f} bytes a token"
    if cache.token_bytes_after_windows != cache.token_bytes:
        cache_text += f", {cache.token_bytes_after_windows:,.0f} behind the windows"
    if cache.fixed_bytes:
        cache_text += f", {size(cache.fixed_bytes)} of states"
    for name, nbytes, explanation in (
        ("weights", capacity.weights_bytes, "as they are stored"),
        ("cache", capacity.cache_bytes, cache_text),
        (
            "activations",
            capacity.activation_bytes(),
            f"a step of {max(load.batch, PREFILL_CHUNK):,} tokens, and logits",
        ),
        ("together", capacity.needed_bytes(), ""),
        ("read a step", capacity.step_bytes(), "weights and the whole cache, once"),
    ):
        console.print_text(f"  {name:<12}{size(nbytes):>9}  {explanation}".rstrip())
    console.print_text()
    shows_price = any(row.cost_per_million is not None for row in rows)
    headers = ["device", "memory", "fits", "batch", "context", "ms/token", "tokens/s", "bound by"]
    console.print_table(
        [*headers, *(["per 1M"] if shows_price else [])],
        [tuple(_capacity_cells(row, shows_price)) for row in rows],
    )
    console.print_text()
    console.print_wrapped(
        f"fits: in {USABLE_MEMORY_SHARE:.0%} of the memory; batch, context: the largest that do. Times are a"
        " roofline, no measurement: bytes of a step over bandwidth, or products over compute, nothing else."
    )


def _capacity_cells(row: CardCapacity, priced: bool) -> Iterator[str]:
    has_memory = bool(row.card.memory)
    yield row.name
    yield size(row.card.memory) if has_memory else "-"
    yield ("yes" if row.fits else "no") if has_memory else "-"
    yield str(row.largest_batch) if has_memory else "-"
    yield str(row.largest_context) if has_memory else "-"
    yield "-" if row.seconds_per_token is None else significant(1e3 * row.seconds_per_token)
    yield "-" if row.tokens_per_second is None else significant(row.tokens_per_second)
    yield row.limited_by or "-"
    if priced:
        yield "-" if row.cost_per_million is None else significant(row.cost_per_million)


def capacity_document(capacity: Capacity, rows: list[CardCapacity]) -> dict[str, object]:
    """Return the needs of a result as plain data, the key ``capacity`` of a plan's document."""
    load, cache = capacity.load, capacity.cache
    return {
        "context": load.context,
        "batch": load.batch,
        "cache": load.cache,
        "devices": load.devices,
        "weights_bytes": round(capacity.weights_bytes),
        "cache_token_bytes": round(cache.token_bytes),
        "cache_token_bytes_behind_windows": round(cache.token_bytes_after_windows),
        "cache_state_bytes": round(cache.fixed_bytes),
        "cache_sequence_bytes": round(cache.sequence_bytes(load.context)),
        "cache_bytes": round(capacity.cache_bytes),
        "activation_bytes": round(capacity.activation_bytes()),
        "needed_bytes": round(capacity.needed_bytes()),
        "step_bytes": round(capacity.step_bytes()),
        "step_weight_bytes": round(capacity.traffic.step_bytes(load.batch) / load.devices),
        "weights_per_token": round(capacity.traffic.token_weights),
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
                "bound": row.limited_by or None,
                "cost_per_million": row.cost_per_million,
            }
            for row in rows
        ],
    }


# ---- --dry-run of other verbs


class _PlanAnnouncement(Exception):  # not an error: it ends the run
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
    """Print the plan of a run, with all checks before its work; nothing is written.

    Raises:
        QuantForgeError: as the run; also if an imatrix file is missing, which a run would make first, or if a target
            ``size`` is given, which needs a measurement.
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
        raise _PlanAnnouncement(announced, out)

    try:
        outcome = run(settings=replace(settings, announce=stop))
    except _PlanAnnouncement as announcement:
        plan, out_path = announcement.plan, announcement.out
    else:
        from quantforge.api import Exported

        assert not isinstance(outcome, Exported)  # an export is never found finished
        plan, out_path = outcome.plan, outcome.out
        console.note(f"{display_path(out_path)}: this command has made it, and would end at once")
    run_forecast = forecast(plan, out_path, settings)
    if console.as_json:
        console.print_document(plan_document(plan, out_path, run_forecast))
    else:
        show_plan(console, plan, out_path, run_forecast, all_tensors=False)
