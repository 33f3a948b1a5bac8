"""Names of a result's modules in the running model, for configurations that engines match against them.

transformers reads which modules are quantized after it has renamed everything, so that a list of exceptions in the
names of files misses what has another name when it runs: a router that is a linear, linears of a tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from quantforge.architectures import architecture_of
from quantforge.architectures.draft_kinds import is_draft
from quantforge.errors import InputError, RefusedError
from quantforge.model.names import Names
from quantforge.model.skeleton import build
from quantforge.plans import Action, Plan, RunningNames, StoredTensor


def running_names(plan: Plan, config: Mapping[str, Any]) -> RunningNames | None:
    """Return the names that modules have when transformers runs a result; None where they are those of its files.

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
        names = Names(model, [StoredTensor(item.name, item.dtype, item.shape) for item in kept])
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
