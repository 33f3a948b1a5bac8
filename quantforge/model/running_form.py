"""A checkpoint in the form in which transformers runs it: what it joins or cuts on loading is joined or cut here.

transformers joins tensors while it loads (three convolutions become one) and cuts others (one matrix becomes q, k, v).
Beside packed weights it cannot: its converters of weights then look for packed ones. In files that hold such tensors as
the running model does, there is nothing left to convert. Experts that are stored one by one stay so, since these it
joins packed; so do tensors that only have another name in files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from quantforge.checkpoint.prepared import RUNNING, Rows, prepared_checkpoint
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.safetensors import TensorEntry
from quantforge.errors import RefusedError
from quantforge.model.names import Names, Source
from quantforge.model.skeleton import build

if TYPE_CHECKING:
    from torch import Tensor

SAID = "as transformers runs it"


def running_form(checkpoint: Checkpoint) -> Checkpoint:
    """Return the view of a checkpoint in the form that runs; itself where its files have that form.

    Raises:
        InputError: transformers does not build the model, or its tensors have no place in it.
        RefusedError: names of the running model mean something else in files.
    """
    model = build(checkpoint.config)
    names = Names(model, [entry.stored() for entry in checkpoint.entries.values()])
    changed = [source for source in names.distinct() if source.rule and not source.places()]
    if not changed:
        return checkpoint
    computed: dict[str, Rows] = {}
    added: dict[str, TensorEntry] = {}
    for source in changed:
        for parameter, shape in source.parameters.items():
            first = checkpoint.entries[source.stored[0]]
            computed[parameter] = partial(_rows, names, source, parameter)
            added[parameter] = _entry(first, parameter, shape, names)
    view = prepared_checkpoint(
        checkpoint,
        computed,
        added=added,
        left_out={name for source in changed for name in source.stored},
        facts={RUNNING: SAID},
    )
    _check(Names(model, [entry.stored() for entry in view.entries.values()]), added)
    return view


def _rows(
    names: Names, source: Source, parameter: str, inner: Checkpoint, first: int, last: int
) -> Tensor:
    return names.make(source, inner.read)[parameter][first:last].float().contiguous()


def _entry(first: TensorEntry, parameter: str, shape: tuple[int, ...], names: Names) -> TensorEntry:
    size = math.prod(shape) * first.nbytes // names.weights(first.name)
    return TensorEntry(parameter, first.dtype, shape, first.file, first.start, first.start + size)


def _check(names: Names, added: Mapping[str, TensorEntry]) -> None:
    lost = [name for name in added if name not in names.sources or names.runtime(name) != name]
    if lost:
        raise RefusedError(
            f"{lost[0]} of the running model means something else in its files",
            "drop --for transformers",
        )
