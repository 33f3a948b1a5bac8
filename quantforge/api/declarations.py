"""Declarations of a model, derived from the code of transformers: to be read, compared and kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantforge.api.torch_defaults import torch_defaults
from quantforge.architectures import Architecture, LayerKind, SharedInput
from quantforge.architectures.dimensions import Dimensions
from quantforge.arguments import check_arguments
from quantforge.files.disk import check_new, save
from quantforge.files.hub import resolve
from quantforge.formats.configuration import json_bytes
from quantforge.formats.open_model import open_plain_source
from quantforge.planning.planner import match_by_derivation


@dataclass(frozen=True, slots=True)
class Declarations:
    """Declarations and sizes, as running one block of each kind has shown them."""

    architecture: Architecture
    dimensions: Dimensions

    def document(self) -> dict[str, Any]:
        """Return JSON data: an entry for each kind of layers, with its shared inputs.

        Rows of a fused linear are listed as first and one past the last, or all of them where they do not follow one
        another.
        """
        architecture, sizes, derived = self.architecture, self.dimensions, self.architecture.derived
        assert derived is not None
        return {
            "schema": "quantforge.declarations/1",
            "model_type": architecture.model_type,
            "source": derived.source,
            "blocks": architecture.blocks,
            "embedding": architecture.embedding,
            "head": architecture.head,
            "final_norm": architecture.final_norm,
            "sizes": {
                name: getattr(sizes, name) for name in ("hidden", "heads", "kv_heads", "head")
            },
            "layers": list(derived.kinds),
            "unobserved": list(derived.unobserved),
            "kinds": [_kind(architecture, sizes, kind) for kind in architecture.kinds],
        }


@check_arguments()
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
    model_layout = match_by_derivation(open_plain_source(resolve(str(model), offline)))
    assert model_layout.architecture is not None
    assert model_layout.dimensions is not None
    found = Declarations(model_layout.architecture, model_layout.dimensions)
    if place is not None:
        save(place, json_bytes(found.document()))
    return found


def _kind(architecture: Architecture, dimensions: Dimensions, kind: LayerKind) -> dict[str, Any]:
    return {
        "name": kind.name,
        "returns": kind.num_outputs,
        "parameters": {item.name: " x ".join(item.shape) for item in kind.parameters},
        "stacks": [
            {
                "parameter": stack.parameter,
                "linears": list(stack.linears),
                "transposed": stack.transposed,
                "interleaved": stack.interleaved,
                "spread": stack.spread,
            }
            for stack in kind.stacks
        ],
        "inputs": [_input(architecture, dimensions, shared) for shared in kind.inputs],
    }


def _input(
    architecture: Architecture, dimensions: Dimensions, shared: SharedInput
) -> dict[str, Any]:
    found: dict[str, Any] = {"linears": list(shared.linears), "within": shared.within}
    if shared.each:
        found["experts"] = shared.each
    scale_fold = shared.scale_fold
    if scale_fold is not None:
        found["absorber"] = {"kind": str(scale_fold.kind), "module": scale_fold.module}
        found["absorber"]["heads"] = shared.heads
        if scale_fold.rows:
            rows = architecture.rows(dimensions, scale_fold.module, scale_fold.rows)
            listed = [rows.start, rows.stop] if isinstance(rows, slice) else list(rows)
            found["absorber"]["rows"] = listed
    return found
