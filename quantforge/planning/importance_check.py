"""Importance from a file, compared with a plan by names and widths alone: a file of another model is found before work.

Of the matrices inside of the blocks all should be there: embeddings and heads, of which llama-imatrix writes none, are
left out of the count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path

from quantforge.architectures.match import ModelLayout
from quantforge.errors import InputError, RefusedError
from quantforge.events import Event
from quantforge.formats.gguf.families import GgufName, family_of, gguf_names
from quantforge.formats.gguf.importance_file import check_structure
from quantforge.packers.lattices import NEED_IMPORTANCE
from quantforge.plans import Action, TensorPlan

_LAYER = re.compile(r"blk\.(\d+)\.")
_OUTER = frozenset({"token_embd.weight", "output.weight"})
_OTHER = "it belongs to another model"


def compare_importance(
    path: Path, tensors: Sequence[TensorPlan], model_layout: ModelLayout, model: str
) -> tuple[tuple[Event, ...], tuple[str, ...]]:
    """Return what the importance in a file lacks, as an event, and what it has too much, as a note.

    Args:
        path: of the file.
        tensors: of the plan.
        model_layout: the model.
        model: its place.

    Raises:
        InputError: the file is of another model: by layers that this one has not, by widths, or by all of its names.
        RefusedError: the type of a tensor needs an importance, and the file has none.
    """
    named = places(tensors, model_layout)
    rounded = {
        tensor.name: tensor
        for tensor in tensors
        if tensor.action is Action.QUANTIZE and tensor.name in named
    }
    known = check_structure(path, values_of(rounded.values(), named))
    _refuse_another(path, known, model_layout, {named[name].name for name in rounded})
    lacking = [
        tensor
        for name, tensor in rounded.items()
        if tensor.block >= 0 and named[name].name not in known
    ]
    blocks = sum(tensor.block >= 0 for tensor in rounded.values())
    _refuse_needy(path, lacking, blocks, named)
    events, notes = [], []
    if lacking:
        said = f"--imatrix {path.name}: no importance for {len(lacking)} of {blocks} matrices: "
        events.append(Event("importance-missing", model, said + _listed(lacking, named)))
    places_of_all = {name for one in named.values() for name in (one.name, *one.others)}
    strange = sorted({*known} - places_of_all - _OUTER)
    if strange:
        said = f"--imatrix {path.name}: {len(strange)} of its matrices are of no tensor of this model: "
        notes.append(said + _first(strange))
    return tuple(events), tuple(notes)


def places(tensors: Iterable[TensorPlan], model_layout: ModelLayout) -> dict[str, GgufName]:
    """Return the places of matrices in a GGUF file by the names of the source.

    Raises:
        RefusedError: GGUF has no names for the family.
    """
    linears = {tensor.name for tensor in tensors if len(tensor.shape) == 2}
    held = [tensor for tensor in model_layout.tensors if tensor.header.name in linears]
    found = gguf_names(
        family_of(model_layout.config), model_layout.blocks, [tensor.name for tensor in held]
    )
    return {tensor.header.name: found[tensor.name] for tensor in held}


def values_of(tensors: Collection[TensorPlan], named: Mapping[str, GgufName]) -> dict[str, int]:
    """Return how many values the importance of tensors has, by their names in a GGUF file; experts are stacked."""
    matrices = Counter(place.name for place in named.values())
    return {named[one.name].name: matrices[named[one.name].name] * one.matrix[1] for one in tensors}


def _refuse_another(
    path: Path, known: Set[str], model_layout: ModelLayout, wanted: Set[str]
) -> None:
    numbers = [int(found[1]) + 1 for name in known if (found := _LAYER.match(name))]
    layers = max(numbers, default=0)
    if layers > model_layout.blocks and not model_layout.draft_heads:
        raise InputError(
            f"--imatrix {path}: it has the importance of {layers} layers, the model has {model_layout.blocks}",
            _OTHER,
            file=str(path),
        )
    if not wanted & known:
        raise InputError(
            f"--imatrix {path}: nothing of it concerns this model", _OTHER, file=str(path)
        )


def _refuse_needy(
    path: Path, lacking: Sequence[TensorPlan], blocks: int, named: Mapping[str, GgufName]
) -> None:
    """Refuse types that llama-quantize does not make without an importance, where the file lacks it."""
    needy = [one for one in lacking if _type(one).lower() in NEED_IMPORTANCE]
    if needy:
        raise RefusedError(
            f"--imatrix {path}: no importance for {len(needy)} of {blocks} matrices whose types need it"
            f" ({', '.join(sorted({_type(one) for one in needy}))}): {_listed(needy, named)}",
            "an importance of this very model: without --imatrix the calibration text gives one",
            tensor=needy[0].name,
            file=str(path),
        )


def _type(tensor: TensorPlan) -> str:
    return tensor.scheme.weight.grid.upper() if tensor.scheme else ""


def _listed(tensors: Sequence[TensorPlan], named: Mapping[str, GgufName]) -> str:
    return _first(list(dict.fromkeys(named[one.name].name for one in tensors)))


def _first(found: Sequence[str]) -> str:
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more
