"""Changes of a whole model on the way to a result, as manifests and views of a source tell them.

These are the adapters that were merged into it, and how many experts it kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quantforge.checkpoint.prepared import ADAPTER, KEPT_EXPERTS
from quantforge.checkpoint.reader import Checkpoint
from quantforge.results import manifest

_COUNTS = re.compile(r"(\d+) of (\d+)")


def stated_adapters(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a manifest, and those that it passes on, say of adapters, the first that was merged first."""
    return _stated(document, ADAPTER)


def stated_experts(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what they say of experts that were kept where others were removed, in the order of the removals."""
    return _stated(document, KEPT_EXPERTS)


def _stated(document: Mapping[str, Any], subject: str) -> tuple[str, ...]:
    found: list[str] = []
    told: Any = document
    while isinstance(told, Mapping):
        source = told.get("source")
        said = source.get(subject) if isinstance(source, Mapping) else None
        found += [said] if isinstance(said, str) else []
        told = told.get("lineage")
    return tuple(reversed(found))


def adapters_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what is said of the adapters of a model: by the manifest that it has, and as it is read."""
    return _of(checkpoint, ADAPTER)


def experts_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what is said of the experts that a model kept: by the manifest that it has, and as it is read."""
    return _of(checkpoint, KEPT_EXPERTS)


def _of(checkpoint: Checkpoint, subject: str) -> tuple[str, ...]:
    read = checkpoint.facts.get(subject)
    earlier = _stated(manifest.read(checkpoint.path) or {}, subject)
    return earlier if read is None else (*earlier, read)


def adapter_name(said: str) -> str:
    """Return the name of an adapter, which stands before what is said of it."""
    return said.rpartition(": ")[0] or said


def experts_word(said: str) -> str:
    """Return what a name of a result says of the experts that were kept: ``6of8experts``; "" for foreign words."""
    counts = _COUNTS.match(said)
    return f"{counts[1]}of{counts[2]}experts" if counts else ""
