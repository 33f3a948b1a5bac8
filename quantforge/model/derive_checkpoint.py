"""Derive the declarations of one checkpoint: from its configuration, with the names of tensors in its files.

Mixtures of experts are derived with a few experts, since all experts have the same structure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantforge.architectures import Architecture, LayerKind, Parameter
from quantforge.architectures.matched import Declared
from quantforge.architectures.routers import experts_of
from quantforge.architectures.towers import BLOCK
from quantforge.errors import InputError, RefusedError
from quantforge.model.derive import derive
from quantforge.model.names import Names, Source
from quantforge.model.skeleton import build
from quantforge.plans import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of the last model only: a run asks for them more than once, and large blocks are slow to run.
_KNOWN: dict[str, Architecture] = {}
EXPERTS = 8  # enough to see how a mixture computes
TAKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "moe_top_k",
)
_NUMBER = re.compile(r"\.\d+\.")
GROUPS = ("n_group", "topk_group", "num_expert_group")


def derive_for(
    config: Mapping[str, Any], stored: Iterable[StoredTensor], *, whole: bool = False
) -> Declared:
    """Derive the declarations of a checkpoint from its configuration and the names of its tensors.

    For a multimodal family that is declared, only the decoder is derived, unless ``whole``.

    Raises:
        InputError: transformers cannot build or run it, or a stored tensor does not belong to it.
        RefusedError: its blocks cannot be run one after another, or its files store weights in a form that is not read
            block by block; the message says which.
    """
    model = build(config, whole=whole)
    names = Names(model, stored)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    apart = {place.stack.parameter for place in names.places.values()}
    # The structure of a model follows from its configuration; `build` drops what describes stored weights.
    key = json.dumps([model.config.to_dict(), sorted(apart), whole], sort_keys=True, default=str)
    if key not in _KNOWN:
        made = derive(with_few_experts(config, model, whole=whole), shapes, apart)
        _KNOWN.clear()
        _KNOWN[key] = made
    found = _KNOWN[key]
    ignored = tuple(map(re.escape, names.ignored))
    assert found.derived is not None
    found = replace(
        found,
        droppable=(*found.droppable, *ignored),
        derived=replace(found.derived, tied=_tied(names, found)),
    )
    canonical, turned = _canonical(names, found)
    other = [source for source in names.distinct() if source.stored[0] not in canonical]
    found, kept = _as_stored(names, found, other)
    return Declared(found, {**canonical, **kept, **_one_by_one(names, found)}, turned)


def _tied(names: Names, found: Architecture) -> bool:
    """Return whether the head is tied to the embedding; raise RefusedError if any other tensors are tied."""
    ends = {f"{found.head}.weight", f"{found.embedding}.weight"}  # either may be the one in files
    others = [name for name, source in names.tied.items() if {name, source} != ends]
    if others:
        raise RefusedError(f"{others[0]} is {names.tied[others[0]]}, too", "--method rtn")
    return bool(names.tied)


def with_few_experts(
    config: Mapping[str, Any], model: PreTrainedModel, *, whole: bool = False
) -> PreTrainedModel:
    """Return a skeleton of the same model with `EXPERTS` experts; the model itself if it has no more, or cannot."""
    few = _fewer(config)
    if few == config:
        return model
    try:
        small = build(few, whole=whole)
    except InputError:
        return model
    same = small.state_dict().keys() == model.state_dict().keys()
    return small if same else model


def _fewer(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with a few experts, of which each token takes two and no groups are formed."""
    counts = experts_of(config)
    if max(counts, default=0) <= EXPERTS:
        nested = config.get("text_config")
        return {**config, "text_config": _fewer(nested)} if isinstance(nested, Mapping) else config
    stated = {key: value for key, value in config.items() if type(value) is int and "expert" in key}
    changed = {key: EXPERTS for key, value in stated.items() if value in counts}
    taken = {key: 2 for key in TAKEN if type(config.get(key)) is int}
    groups = {key: 1 for key in GROUPS if type(config.get(key)) is int}
    return {**config, **changed, **taken, **groups}


def _canonical(names: Names, found: Architecture) -> tuple[dict[str, str], frozenset[str]]:
    """Return canonical names of stored tensors, and those stored stacks whose matrices are turned.

    Those of other conversions are left out.

    Raises:
        RefusedError: experts are not put into a stack matrix by matrix.
    """
    assert found.derived is not None
    kinds = {kind.name: kind for kind in found.kinds}
    result, turned = {}, set()
    for stored, place in names.places.items():
        if not place.stack.parameter.startswith(f"{found.blocks}."):  # experts of a tower
            continue
        block, _, parameter = place.stack.parameter.removeprefix(f"{found.blocks}.").partition(".")
        kind = kinds[found.derived.kinds[int(block)]]
        stack = next((item for item in kind.stacks if item.parameter == parameter), None)
        if stack is None or len(stack.linears) != len(place.stack.linears):
            raise RefusedError(
                f"experts in {place.stack.parameter} are not read one by one", "--method rtn"
            )
        linear = stack.linears[place.position].format(place.expert)
        result[stored] = f"{found.blocks}.{block}.{linear}.weight"
    for parameter, source in names.sources.items():
        if source.operations == ("Transpose",) and _is_stack(parameter, found):
            turned |= {source.stored[0]} if names.turns(source) else set()
            result[source.stored[0]] = parameter
        elif source.rule is None:
            result[source.stored[0]] = parameter
    return result, frozenset(turned)


def _is_stack(parameter: str, found: Architecture) -> bool:
    """Return whether a parameter stacks the matrices of experts."""
    return any(
        parameter.startswith(f"{found.blocks}.") and parameter.endswith(f".{stack.parameter}")
        for kind in found.kinds
        for stack in kind.stacks
    )


def _one_by_one(names: Names, found: Architecture) -> dict[str, str]:
    """Return canonical names of experts that are stored one by one where transformers knows them stacked alone."""
    blocks = {}
    for parameter, source in names.sources.items():
        inside, beside = BLOCK.match(parameter), BLOCK.match(source.stored[0])
        if inside and beside and inside[1] == found.blocks:
            blocks[beside[1], beside[2]] = f"{inside[1]}.{inside[2]}."
    linears = {name for kind in found.kinds for stack in kind.stacks for name in stack.linears}
    result = {}
    for name in names.left_over:
        beside = BLOCK.match(name)
        if beside and (beside[1], beside[2]) in blocks:
            template = _NUMBER.sub(".{}.", beside[3].removesuffix(".weight"), count=1)
            if template in linears:
                result[name] = blocks[beside[1], beside[2]] + beside[3]
    return result


def _as_stored(
    names: Names, found: Architecture, sources: Sequence[Source]
) -> tuple[Architecture, dict[str, str]]:
    """Return the declarations with the stored tensors of some sources in the place of their parameters.

    Some checkpoints have several tensors for one parameter of the model (the convolutions of queries, keys and values),
    or one tensor for several parameters (projections of a tower). Where none of these parameters is rounded or absorbs
    a factor, the stored tensors are declared under their own names; whoever runs a block makes the parameters from them
    by transformers' own rule.

    Args:
        names: the bridge of the model.
        found: its derived declarations, by the parameters of the running model.
        sources: conversions.

    Returns:
        The declarations, and the canonical names of these stored tensors.

    Raises:
        RefusedError: one of the parameters is a linear that is rounded, absorbs a factor, or embeds tokens.
    """
    assert found.derived is not None
    touched = {f"{found.embedding}.weight", f"{found.head}.weight"}
    outer = {item.name: item for item in found.outer}
    kinds = {kind.name: kind for kind in found.kinds}
    canonical = {}
    for source in sources:
        _refuse_changed(source, touched, found)
        block = BLOCK.match(next(iter(source.parameters)))
        for stored in source.stored:
            beside, shape = BLOCK.match(stored), tuple(map(str, names.shape(stored)))
            if block is None or block[1] != found.blocks:
                outer[stored], canonical[stored] = Parameter(stored, shape), stored
                continue
            if beside is None:
                raise _other_form(source)
            kind = kinds[found.derived.kinds[int(block[2])]]
            kinds[kind.name] = _with(kind, source, Parameter(beside[3], shape))
            canonical[stored] = f"{found.blocks}.{block[2]}.{beside[3]}"
        for parameter in source.parameters:
            outer.pop(parameter, None)
    kept = tuple(outer.values())
    return replace(found, outer=kept, kinds=tuple(kinds.values())), canonical


def _with(kind: LayerKind, source: Source, parameter: Parameter) -> LayerKind:
    """Return a kind with a stored tensor in the place of the parameters of its source."""
    made = {found[3] for name in source.parameters if (found := BLOCK.match(name))}
    items: Mapping[str, Parameter] = {
        item.name: item for item in kind.parameters if item.name not in made
    }
    return replace(kind, parameters=tuple({**items, parameter.name: parameter}.values()))


def _refuse_changed(source: Source, touched: set[str], found: Architecture) -> None:
    own = {name for name in source.parameters if name.startswith(f"{found.blocks}.")}
    inside = {match[3].rpartition(".")[0] for name in own if (match := BLOCK.match(name))}
    changed = {name for kind in found.kinds for name in kind.linears}
    changed |= {
        shared.absorber.module for kind in found.kinds for shared in kind.inputs if shared.absorber
    }
    changed |= {stack.parameter.rpartition(".")[0] for kind in found.kinds for stack in kind.stacks}
    if touched & source.parameters.keys() or inside & changed:
        raise _other_form(source)


def _other_form(source: Source) -> RefusedError:
    parameter = next(iter(source.parameters))
    return RefusedError(
        f"its files hold {parameter} in another form ({', '.join(source.operations)})",
        "--method rtn",
    )
