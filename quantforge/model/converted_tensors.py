"""Declare tensors as files hold them, where the running model holds them in another form and nothing changes them.

Some checkpoints have several tensors for one parameter of the model (the convolutions of queries, keys and values), or
one tensor for several parameters (projections of a tower). Where none of these parameters is rounded or absorbs a
factor, the stored tensors are declared under their own names; whoever runs a block makes the parameters from them by
transformers' own rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quantforge.architectures import Architecture, LayerKind, Parameter
from quantforge.architectures.towers import BLOCK
from quantforge.errors import RefusedError
from quantforge.model.names import Names, Source


def declared_as_stored(
    names: Names, found: Architecture, sources: Sequence[Source]
) -> tuple[Architecture, dict[str, str]]:
    """Return the declarations with the stored tensors of some sources in the place of their parameters.

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
        _refuse(source, touched, found)
        block = BLOCK.match(next(iter(source.parameters)))
        for stored in source.stored:
            beside, shape = BLOCK.match(stored), tuple(map(str, names.shape(stored)))
            if block is None or block[1] != found.blocks:
                outer[stored], canonical[stored] = Parameter(stored, shape), stored
                continue
            if beside is None:
                raise _refusal(source)
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


def _refuse(source: Source, touched: set[str], found: Architecture) -> None:
    own = {name for name in source.parameters if name.startswith(f"{found.blocks}.")}
    inside = {match[3].rpartition(".")[0] for name in own if (match := BLOCK.match(name))}
    changed = {name for kind in found.kinds for name in kind.linears}
    changed |= {
        shared.absorber.module for kind in found.kinds for shared in kind.inputs if shared.absorber
    }
    changed |= {stack.parameter.rpartition(".")[0] for kind in found.kinds for stack in kind.stacks}
    if touched & source.parameters.keys() or inside & changed:
        raise _refusal(source)


def _refusal(source: Source) -> RefusedError:
    parameter = next(iter(source.parameters))
    return RefusedError(
        f"its files hold {parameter} in another form ({', '.join(source.operations)})",
        "--method rtn",
    )
