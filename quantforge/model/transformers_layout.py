"""A checkpoint in the form in which transformers runs it: what it joins or cuts on loading is joined or cut here.

transformers joins tensors while it loads (three convolutions become one) and cuts others (one matrix becomes q, k, v).
Beside packed weights it cannot: its converters of weights then look for packed ones. In files that hold such tensors as
the running model does, there is nothing left to convert. Experts that are stored one by one stay so, since these it
joins packed; so do tensors that only have another name in files.

It reads which modules are quantized after it has renamed everything, so that a list of exceptions in the names of files
misses what has another name when it runs: a router that is a linear, linears of a tower. `running_names` says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from quantforge.architectures import architecture_of
from quantforge.architectures.draft_heads import is_draft
from quantforge.errors import InputError, RefusedError
from quantforge.files.computed_tensors import RUNNING, Rows, prepared_checkpoint
from quantforge.files.reader import Checkpoint
from quantforge.files.safetensors import TensorEntry
from quantforge.model.skeleton import build
from quantforge.model.weight_mapping import WeightMapping, WeightSource
from quantforge.plans import Action, Plan, RunningNames, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

SAID = "as transformers runs it"


def running_form(checkpoint: Checkpoint) -> Checkpoint:
    """Return a view of a checkpoint in the form that transformers runs; itself if its files have that form.

    Raises:
        InputError: transformers does not build the model, or its tensors have no place in it.
        RefusedError: names of the running model mean something else in files.
    """
    model = build(checkpoint.config)
    names = WeightMapping(model, [entry.header() for entry in checkpoint.entries.values()])
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
    _check(WeightMapping(model, [entry.header() for entry in view.entries.values()]), added)
    return view


def _rows(
    names: WeightMapping,
    source: WeightSource,
    parameter: str,
    inner: Checkpoint,
    first: int,
    last: int,
) -> Tensor:
    return names.make(source, inner.read)[parameter][first:last].float().contiguous()


def _entry(
    first: TensorEntry, parameter: str, shape: tuple[int, ...], names: WeightMapping
) -> TensorEntry:
    size = math.prod(shape) * first.nbytes // names.weights(first.name)
    return TensorEntry(parameter, first.dtype, shape, first.file, first.start, first.start + size)


def _check(names: WeightMapping, added: Mapping[str, TensorEntry]) -> None:
    lost = [name for name in added if name not in names.sources or names.runtime(name) != name]
    if lost:
        raise RefusedError(
            f"{lost[0]} of the running model means something else in its files",
            "drop --for transformers",
        )


def running_names(plan: Plan, config: Mapping[str, Any]) -> RunningNames | None:
    """Return the names of a result's modules in the running model; None if they equal those in its files.

    That is so for a declared family that declares no other names in files, and has no other tower. It is also None
    where transformers does not build the model, or where its rules do not fit the files: then it does not load the
    result in any case, as it loads no draft heads.
    """
    if is_draft(config):
        return None
    architecture = architecture_of(config)
    if architecture is not None:
        renamed = any(item.stored for kind in architecture.kinds for item in kind.parameters)
        if not renamed and not architecture.text_config:
            return None
    kept = [tensor for tensor in plan.tensors if tensor.action is not Action.DROP]
    try:
        model = build(config, whole=True)
        names = WeightMapping(
            model, [StoredTensor(item.name, item.dtype, item.shape) for item in kept]
        )
    except (InputError, RefusedError):
        return None
    quantized = {tensor.name for tensor in plan.quantized()}
    modules, taken = {}, set()
    for source in names.distinct():
        for stored in quantized.intersection(source.stored):
            taken |= {name.removesuffix(".weight") for name in source.parameters}
            if source.rule is None:
                modules[stored.removesuffix(".weight")] = names.runtime(stored).removesuffix(
                    ".weight"
                )
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return RunningNames(modules, tuple(sorted(linears - taken)))
