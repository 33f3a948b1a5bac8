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
from quantforge.errors import IntegrityError, UsageError
from quantforge.formats.sources.adapter import open_adapter
from quantforge.planning.cited_files import adapter_hint, check_adapter_given
from quantforge.quantizers import METHODS, MethodKind, source_transforms
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


def folds_factors(document: Mapping[str, Any] | None) -> bool:
    """Return whether a manifest says that factors were folded, now or into what it was made of."""
    methods = (item.get("method") for item in chain(document))
    words = [word for method in methods if isinstance(method, str) for word in method.split("+")]
    return any(word in METHODS and METHODS[word].kind is MethodKind.TRANSFORM for word in words)


def stated_adapter(document: Mapping[str, Any] | None) -> AdapterOptions | None:
    """Return the adapter that a result has had, by the recipes of its manifest and of those that it passes on.

    Returns:
        the last one; options that name none where the recipes have none, None where there is no recipe.
    """
    recipes = [item.get("recipe") for item in chain(document)]
    found = [
        from_toml(recipe, "the recipe of its manifest").adapter
        for recipe in recipes if isinstance(recipe, str) and recipe
    ]  # fmt: skip
    return next((one for one in found if one.source), found[0] if found else None)


def check_adapter(
    document: Mapping[str, Any] | None, source: Path | None, adapter: Path | None
) -> None:
    """Refuse a comparison without the adapter that the recipe of a result states, with another, or with one too many.

    Without a recipe nothing is known of adapters, and any may be given.

    Raises:
        UsageError: no source is named, which it could be merged into.
        InputError: none is given.
        IntegrityError: it is another, or the recipe states none.
    """
    if source is None:
        if adapter is not None:
            text = f"--adapter {adapter}: merged into a source, and none is named"
            raise UsageError(text, "name the source too: --source MODEL")
        return
    stated = stated_adapter(document)
    if stated is None:
        return
    check_adapter_given(stated, adapter)
    if adapter is not None and not stated.source:
        text = f"--adapter {adapter}: by its manifest it was made without an adapter"
        raise IntegrityError(text, "leave --adapter out")
    if stated.sha256 and adapter is not None and open_adapter(adapter).digests != stated.sha256:
        text = f"--adapter {adapter}: not the adapter that it was made with"
        raise IntegrityError(text, adapter_hint(stated))
