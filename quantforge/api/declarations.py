"""Derive the architecture declarations of a model by running the code of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantforge.api.torch_defaults import torch_defaults
from quantforge.architectures import Architecture, LayerKind, SharedInput
from quantforge.architectures.dimensions import Dimensions
from quantforge.arguments import check_arguments
from quantforge.files.disk import check_new_file, save_file
from quantforge.files.hub import resolve_model
from quantforge.formats.configuration import json_bytes
from quantforge.formats.open_model import open_plain_source
from quantforge.planning.planner import match_by_derivation


@dataclass(frozen=True, slots=True)
class Declarations:
    """Architecture declarations and dimensions, observed by running one block of each kind."""

    architecture: Architecture
    dimensions: Dimensions

    def document(self) -> dict[str, Any]:
        """Return the declarations as JSON data, with an entry for each kind of layer and its shared inputs.

        Rows of a fused linear are given as ``[start, stop]`` if they are contiguous, else as a list of all indices.
        """
        architecture, sizes, derivation = (
            self.architecture,
            self.dimensions,
            self.architecture.derivation,
        )
        assert derivation is not None
        return {
            "schema": "quantforge.declarations/1",
            "model_type": architecture.model_type,
            "source": derivation.source,
            "blocks": architecture.blocks,
            "embedding": architecture.embedding,
            "head": architecture.head,
            "final_norm": architecture.final_norm,
            "sizes": {
                name: getattr(sizes, name) for name in ("hidden", "heads", "kv_heads", "head")
            },
            "layers": list(derivation.kinds),
            "unobserved": list(derivation.unobserved),
            "kinds": [_layer_kind_json(architecture, sizes, kind) for kind in architecture.kinds],
        }


@check_arguments()
@torch_defaults()
def derive_declarations(
    model: str | Path, out: str | Path | None = None, *, offline: bool = False
) -> Declarations:
    """Derive the declarations of a model and, if ``out`` is given, write them to that file.

    Args:
        model: a directory, or ``org/name[@revision]``; only the headers of its weights are read.
        out: JSON file to write; it must not exist.
        offline: never access the hub.

    Raises:
        InputError: transformers cannot build or run the model, or its tensors do not fit into it.
        RefusedError: the model cannot be run block by block, or ``out`` exists.
    """
    path = None if out is None else Path(out)
    if path is not None:
        check_new_file(path)
    model_layout = match_by_derivation(open_plain_source(resolve_model(str(model), offline)))
    assert model_layout.architecture is not None
    assert model_layout.dimensions is not None
    declarations = Declarations(model_layout.architecture, model_layout.dimensions)
    if path is not None:
        save_file(path, json_bytes(declarations.document()))
    return declarations


def _layer_kind_json(
    architecture: Architecture, dimensions: Dimensions, kind: LayerKind
) -> dict[str, Any]:
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
                "spread": stack.takes_weighted_tokens,
            }
            for stack in kind.stacks
        ],
        "inputs": [_shared_input_json(architecture, dimensions, shared) for shared in kind.inputs],
    }


def _shared_input_json(
    architecture: Architecture, dimensions: Dimensions, shared: SharedInput
) -> dict[str, Any]:
    entry: dict[str, Any] = {"linears": list(shared.linears), "within": shared.compared_module}
    if shared.repeated_over:
        entry["experts"] = shared.repeated_over
    scale_fold = shared.scale_fold
    if scale_fold is not None:
        entry["absorber"] = {"kind": str(scale_fold.kind), "module": scale_fold.module}
        entry["absorber"]["heads"] = shared.heads
        if scale_fold.rows:
            rows = architecture.slice_rows(dimensions, scale_fold.module, scale_fold.rows)
            row_list = [rows.start, rows.stop] if isinstance(rows, slice) else list(rows)
            entry["absorber"]["rows"] = row_list
    return entry
