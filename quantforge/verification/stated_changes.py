"""Statements of a manifest about what became of the whole source before it was quantized.

A result may have been made of an earlier one, whose manifest it passes on (``lineage``): what any of them states holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quantforge.checkpoint.fewer_experts import FACT as EXPERTS
from quantforge.checkpoint.fewer_experts import Removed, from_text
from quantforge.checkpoint.fewer_heads import FACT as HEADS
from quantforge.checkpoint.prepared import RUNNING
from quantforge.errors import InputError, IntegrityError
from quantforge.formats.sources.adapter import open_adapter
from quantforge.quantizers import source_transforms
from quantforge.recipe import AdapterOptions, from_toml


@dataclass(frozen=True, slots=True)
class StatedChanges:
    """Changes of a whole source.

    Attributes:
        transforms: that were applied to it.
        removed: experts that it lost; None where all are there.
        headless: its heads for further tokens were dropped.
        running: its tensors have the form of the running model.
    """

    transforms: tuple[str, ...] = ()
    removed: Removed | None = None
    headless: bool = False
    running: bool = False

    @classmethod
    def of(cls, document: Mapping[str, Any] | None) -> Self:
        """Return what a manifest states.

        Raises:
            InputError: its statement on experts cannot be read.
        """
        methods = [item.get("method") for item in chain(document)]
        words = [source_transforms(method) for method in methods if isinstance(method, str)]
        facts: dict[str, Any] = {}
        for item in chain(document):
            source = item.get("source")
            facts = {**(source if isinstance(source, Mapping) else {}), **facts}
        return cls(
            tuple(word for group in reversed(words) for word in group),
            from_text(str(facts[EXPERTS])) if EXPERTS in facts else None,
            HEADS in facts,
            RUNNING in facts,
        )


def chain(document: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield a manifest, then those that it passes on."""
    while isinstance(document, Mapping):
        yield document
        document = document.get("lineage")


def stated_adapter(document: Mapping[str, Any] | None) -> AdapterOptions:
    """Return the adapter that a result has had, by the last recipe in its manifest and those that it passes on."""
    for item in chain(document):
        recipe = item.get("recipe")
        if isinstance(recipe, str) and recipe:
            return from_toml(recipe, "the recipe of its manifest").adapter
    return AdapterOptions()


def check_adapter(document: Mapping[str, Any] | None, adapter: Path | None) -> None:
    """Refuse a comparison without the adapter that the manifest of a result states, or with another.

    Raises:
        InputError: none is given.
        IntegrityError: it is another.
    """
    stated = stated_adapter(document)
    hint = f"--adapter DIR, of {stated.source}: SHA-256 {'; '.join(stated.sha256)}"
    if stated.source and adapter is None:
        raise InputError(f"it was made with the adapter {stated.source}", hint)
    if stated.sha256 and adapter is not None and open_adapter(adapter).digests != stated.sha256:
        raise IntegrityError(f"--adapter {adapter}: not the adapter that it was made with", hint)
