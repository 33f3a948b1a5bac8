"""A toy transform of the whole source: every norm hands its gain to the linears that read it.

``W (g * x) = (W diag(g)) x``, and of a norm with a bias ``g * x + b = g * (x + b / g)``. The gain of the last norm goes
into the head; a head that was the embedding becomes one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from quantforge.architectures import FoldKind
from quantforge.architectures.configuration import untie_config
from quantforge.architectures.match import ModelLayout, match_tensors, needs_architecture
from quantforge.errors import InputError
from quantforge.files.computed_tensors import ComputeRows, with_computed_tensors
from quantforge.files.reader import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor


class Norm(NamedTuple):
    """One norm with the weights of its readers, all by canonical name."""

    name: str
    readers: tuple[str, ...]


def prepare(source: Checkpoint) -> Checkpoint:
    """Return a source whose norms have gain 1."""
    model_layout = match_tensors(
        source.config, [entry.to_stored_tensor() for entry in source.entries.values()]
    )
    if model_layout.architecture is None:
        raise needs_architecture(model_layout, "unit-norms")
    head, embedding = (
        f"{name}.weight"
        for name in (model_layout.architecture.head, model_layout.architecture.embedding)
    )
    plus_one = any(
        shared.scale_fold is not None and shared.scale_fold.kind is FoldKind.NORM_PLUS_ONE
        for kind in model_layout.layers
        for shared in kind.inputs
    )
    stored = {name: tensor.header.name for name, tensor in model_layout.by_name.items()}
    computed: dict[str, ComputeRows] = {}
    for norm in norms(model_layout):
        gain = stored[f"{norm.name}.weight"]
        computed[gain] = partial(_constant, gain, 0.0 if plus_one else 1.0)
        if f"{norm.name}.bias" in stored:
            bias = stored[f"{norm.name}.bias"]
            computed[bias] = partial(_divided, bias, gain)
        for name in norm.readers:
            turned = name != head and model_layout.by_name[name].transposed
            read = stored[embedding if name == head and model_layout.tied else name]
            computed[stored.get(name, head)] = partial(
                _scaled, read, gain, plus_one=plus_one, turned=turned
            )
    if not model_layout.tied:
        return with_computed_tensors(source, computed)
    added = {head: replace(source.entries[stored[embedding]], name=head)}
    return with_computed_tensors(
        source, computed, config=untie_config(source.config), new_entries=added
    )


def norms(model_layout: ModelLayout) -> Iterator[Norm]:
    """Yield the norms that linears read alone."""
    assert model_layout.architecture is not None
    for index, kind in enumerate(model_layout.layers):
        block = model_layout.block_name(index)
        for shared in kind.inputs:
            if shared.scale_fold is not None and shared.scale_fold.kind is not FoldKind.ROWS:
                readers = tuple(f"{block}.{linear}.weight" for linear in shared.linears)
                yield Norm(f"{block}.{shared.scale_fold.module}", readers)
    yield Norm(model_layout.architecture.final_norm, (f"{model_layout.architecture.head}.weight",))


def _constant(gain: str, value: float, source: Checkpoint, first: int, last: int) -> Tensor:
    import torch

    del source, gain
    return torch.full((last - first,), value)


def _divided(bias: str, gain: str, source: Checkpoint, first: int, last: int) -> Tensor:
    import torch

    values = source.read_rows(bias, first, last).float()
    gains = source.read_rows(gain, first, last).float()
    if bool(((gains == 0) & (values != 0)).any()):
        raise InputError(f"{gain}: a gain is zero where {bias} is not", "unit-norms cannot fold it")
    return torch.where(values == 0, values, values / gains)


def _scaled(
    weight: str, gain: str, source: Checkpoint, first: int, last: int, *, plus_one: bool, turned: bool
) -> Tensor:  # fmt: skip
    gains = source.read(gain).float() + float(plus_one)
    rows = source.read_rows(weight, first, last).float()
    return rows * (gains[first:last, None] if turned else gains)
