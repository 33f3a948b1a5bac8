"""Record that a finished part of a run leaves in the journal: events, figures, and checksums of what it has written."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from quantforge.events import Event
from quantforge.execution.progress import Progress, place
from quantforge.plans import StoredTensor
from quantforge_files import system

COPY_BYTES = 1 << 25  # of the strips in which tensors are only copied or checked

Record = dict[str, Any]  # "events", "figures", "sums", "transform"


def merge(record: Record, other: Record) -> None:
    """Add the events and figures of a step to those of its part."""
    for key, value in other.items():
        if isinstance(value, list):
            record[key] = [*record.get(key, []), *value]
        else:
            record[key] = {**record.get(key, {}), **value}


def events_of(records: Iterable[Record]) -> list[Event]:
    """Return every event, in the order of the parts."""
    return [Event(**event) for record in records for event in record.get("events", [])]


def figures_of(records: Iterable[Record]) -> dict[str, dict[str, float]]:
    """Return the figures of every rounded tensor, by name."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        for name, values in record.get("figures", {}).items():
            found[name] = {**found.get(name, {}), **values}
    return found


def scaled_of(records: Iterable[Record]) -> tuple[int, int] | None:
    """Return for how many activations factors were better than none, and for how many they were searched; or None."""
    searched = [
        figures["family"] != "none"
        for record in records
        for figures in record.get("transform", {}).values()
        if "family" in figures
    ]
    return (sum(searched), len(searched)) if searched else None


def runs(stored: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield strips of rows of about `COPY_BYTES` as ``(first, last)``; a scalar is one strip."""
    rows = stored.shape[0] if stored.shape else 1
    step = max(1, COPY_BYTES * rows // max(1, stored.nbytes))
    for first in range(0, max(rows, 1), step):
        yield first, min(first + step, rows)


def checksum(value: Tensor, before: int) -> int:
    """Return the CRC-32 of the bytes of a tensor, continued from ``before``: against accidents, not attackers."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data, before)


def progress_of(unit: str, record: Record, done: int, total: int, start: float) -> Progress:
    """Return the report of a finished unit that was begun at ``start``, in seconds of the monotonic clock."""
    figures = record.get("figures", {}).values()
    errors = [values["error"] for values in figures if "error" in values]
    phase, share = place()
    return Progress(
        part=unit,
        phase=phase,
        share=share,
        done=done,
        total=total,
        seconds=time.monotonic() - start,
        error=sum(errors) / len(errors) if errors else None,
        peak_bytes=system.peak_bytes(),
    )
