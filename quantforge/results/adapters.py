"""Adapters that were merged into a model on the way to a result, as manifests and views of a source tell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.checkpoint.prepared import ADAPTER
from quantforge.checkpoint.reader import Checkpoint
from quantforge.results import manifest


def stated_adapters(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a manifest, and those that it passes on, say of adapters, the first that was merged first."""
    found: list[str] = []
    told: Any = document
    while isinstance(told, Mapping):
        source = told.get("source")
        said = source.get(ADAPTER) if isinstance(source, Mapping) else None
        found += [said] if isinstance(said, str) else []
        told = told.get("lineage")
    return tuple(reversed(found))


def adapters_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what is said of the adapters of a model: by the manifest that it has, and as it is read."""
    read = checkpoint.facts.get(ADAPTER)
    earlier = stated_adapters(manifest.read(checkpoint.path) or {})
    return earlier if read is None else (*earlier, read)


def adapter_name(said: str) -> str:
    """Return the name of an adapter, which stands before what is said of it."""
    return said.rpartition(": ")[0] or said
