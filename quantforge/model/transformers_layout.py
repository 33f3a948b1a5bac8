"""Present a checkpoint in the tensor layout in which transformers runs it, joining and splitting tensors.

transformers joins tensors while it loads (three convolutions become one) and splits others (one matrix becomes q, k,
v). It cannot do so beside packed weights, because its converters then look for packed tensors. Files that already hold
these tensors in the running layout need no conversion. Experts stored one by one stay so, since transformers can join
packed
ones; so do tensors that only have another name in files.

transformers decides which modules are quantized after it has renamed everything, so a list of exceptions with the names
in files misses modules whose running name differs: a router that is a linear, linears of a tower. `running_names`
returns these names.
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
from quantforge.files.computed_tensors import LAYOUT, ComputeRows, with_computed_tensors
from quantforge.files.reader import Checkpoint
from quantforge.files.safetensors import TensorEntry
from quantforge.model.skeleton import build_skeleton
from quantforge.model.weight_mapping import WeightMapping, WeightSource
from quantforge.plans import Action, Plan, RunningNames, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

RUNNING_LAYOUT = "as transformers runs it"


def running_layout(checkpoint: Checkpoint) -> Checkpoint:
    """Return a view of a checkpoint in the tensor layout that transformers runs; itself if nothing differs.

    Raises:
        InputError: transformers does not build the model, or some tensors do not belong to it.
        RefusedError: names of the running model mean something else in files.
    """
    model = build_skeleton(checkpoint.config)
    names = WeightMapping(
        model, [entry.to_stored_tensor() for entry in checkpoint.entries.values()]
    )
    changed = [
        source for source in names.distinct_sources() if source.rule and not source.expert_places()
    ]
    if not changed:
        return checkpoint
    computed_tensors: dict[str, ComputeRows] = {}
    new_entries: dict[str, TensorEntry] = {}
    for source in changed:
        for parameter, shape in source.parameters.items():
            first = checkpoint.entries[source.stored[0]]
            computed_tensors[parameter] = partial(_converted_rows, names, source, parameter)
            new_entries[parameter] = _entry(first, parameter, shape, names)
    view = with_computed_tensors(
        checkpoint,
        computed_tensors,
        new_entries=new_entries,
        removed={name for source in changed for name in source.stored},
        source_notes={LAYOUT: RUNNING_LAYOUT},
    )
    _check_names(
        WeightMapping(model, [entry.to_stored_tensor() for entry in view.entries.values()]),
        new_entries,
    )
    return view


def _converted_rows(
    names: WeightMapping,
    source: WeightSource,
    parameter: str,
    inner: Checkpoint,
    first: int,
    last: int,
) -> Tensor:
    return names.compute(source, inner.read)[parameter][first:last].float().contiguous()


def _entry(
    first: TensorEntry, parameter: str, shape: tuple[int, ...], names: WeightMapping
) -> TensorEntry:
    size = math.prod(shape) * first.nbytes // names.numel(first.name)
    return TensorEntry(parameter, first.dtype, shape, first.file, first.start, first.start + size)


def _check_names(names: WeightMapping, new_entries: Mapping[str, TensorEntry]) -> None:
    misplaced = [
        name
        for name in new_entries
        if name not in names.sources or names.parameter_name(name) != name
    ]
    if misplaced:
        raise RefusedError(
            f"{misplaced[0]} of the running model means something else in its files",
            "drop --for transformers",
        )


def running_names(plan: Plan, config: Mapping[str, Any]) -> RunningNames | None:
    """Return the names of a result's modules in the running model; None if they equal those in its files.

    They are equal for a declared family that declares no other stored names and has no other tower. None is also
    returned if
    transformers does not build the model or its rules do not fit the files: then it cannot load the result anyway, and
    neither can it load draft heads.
    """
    if is_draft(config):
        return None
    architecture = architecture_of(config)
    if architecture is not None:
        renamed = any(item.stored for kind in architecture.kinds for item in kind.parameters)
        if not renamed and not architecture.text_config:
            return None
    stored = [tensor for tensor in plan.tensors if tensor.action is not Action.DROP]
    try:
        model = build_skeleton(config, whole=True)
        names = WeightMapping(
            model, [StoredTensor(item.name, item.dtype, item.shape) for item in stored]
        )
    except (InputError, RefusedError):
        return None
    quantized = {tensor.name for tensor in plan.quantized()}
    modules, quantized_modules = {}, set()
    for source in names.distinct_sources():
        for tensor_name in quantized.intersection(source.stored):
            quantized_modules |= {name.removesuffix(".weight") for name in source.parameters}
            if source.rule is None:
                parameter = names.parameter_name(tensor_name)
                modules[tensor_name.removesuffix(".weight")] = parameter.removesuffix(".weight")
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return RunningNames(modules, tuple(sorted(linears - quantized_modules)))
