"""Declarations of a model, derived from the code of transformers: to be read, compared and kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantforge.architectures import Architecture
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.saved import document
from quantforge.checkpoint.disk import check_new, save
from quantforge.checkpoint.hub import resolve
from quantforge.formats.configuration import json_bytes
from quantforge.formats.opening import open_plain_source
from quantforge.planning.undeclared import derived_match
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.given_options import checks_options


@dataclass(frozen=True, slots=True)
class Declarations:
    """Declarations and sizes, as running one block of each kind has shown them."""

    architecture: Architecture
    dimensions: Dimensions

    def document(self) -> dict[str, Any]:
        """Return it as JSON data."""
        found = document(self.architecture, self.dimensions)
        return {"schema": "quantforge.declarations/1", **found}


@checks_options()
@torch_defaults()
def derive_declarations(
    model: str | Path, out: str | Path | None = None, *, offline: bool = False
) -> Declarations:
    """Derive the declarations of a model, declared or not, and write them to a file where one is given.

    Args:
        model: a directory, or ``org/name[@revision]``; of its weights only the headers are read.
        out: the file, which must not be there.
        offline: never ask the hub.

    Raises:
        InputError: transformers does not build or run it, or its tensors have no place in it.
        RefusedError: it is built in a way that a stream of blocks does not follow; or ``out`` is there.
    """
    place = None if out is None else Path(out)
    if place is not None:
        check_new(place)
    matched = derived_match(open_plain_source(resolve(str(model), offline)))
    assert matched.architecture is not None
    assert matched.dimensions is not None
    found = Declarations(matched.architecture, matched.dimensions)
    if place is not None:
        save(place, json_bytes(found.document()))
    return found
