"""Declarations as a document, to be read by people and kept beside a model."""

from __future__ import annotations

from typing import Any

from quantforge.architectures import Architecture, LayerKind, SharedInput
from quantforge.architectures.dimensions import Dimensions


def document(architecture: Architecture, dimensions: Dimensions) -> dict[str, Any]:
    """Return declarations as plain data: one entry for each kind of layers, with its shared inputs.

    Rows of a fused linear are listed as first and one past the last, or all of them where they do not follow one
    another.
    """
    derived = architecture.derived
    return {
        "model_type": architecture.model_type,
        "source": derived.source if derived else "declared",
        "blocks": architecture.blocks,
        "embedding": architecture.embedding,
        "head": architecture.head,
        "final_norm": architecture.final_norm,
        "sizes": {
            name: getattr(dimensions, name) for name in ("hidden", "heads", "kv_heads", "head")
        },
        "layers": list(derived.kinds) if derived else [],
        "unobserved": list(derived.unobserved) if derived else [],
        "kinds": [_kind(architecture, dimensions, kind) for kind in architecture.kinds],
    }


def _kind(architecture: Architecture, dimensions: Dimensions, kind: LayerKind) -> dict[str, Any]:
    return {
        "name": kind.name,
        "returns": kind.returned,
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
    absorber = shared.absorber
    if absorber is not None:
        found["absorber"] = {"kind": str(absorber.kind), "module": absorber.module}
        found["absorber"]["heads"] = shared.heads
        if absorber.rows:
            rows = architecture.rows(dimensions, absorber.module, absorber.rows)
            listed = [rows.start, rows.stop] if isinstance(rows, slice) else list(rows)
            found["absorber"]["rows"] = listed
    return found
