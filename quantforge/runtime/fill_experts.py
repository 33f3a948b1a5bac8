"""Experts of a skeleton, filled one mixture at a time: packed where any of them is quantized, stacked where none is.

Where the module of a mixture is not understood (`packed_experts`), its experts are decoded into the parameters that
transformers computes with: right, as large as the source, and an event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantforge.errors import RefusedError
from quantforge.events import Event
from quantforge.model.names import Names
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.packed_experts import PackedExperts, packed_experts
from quantforge.runtime.spread_experts import SpreadExperts, gated_spread


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Matrices of experts as a checkpoint holds them, ``[out, in]``.

    Attributes:
        read: returns one by its stored name, quantized or not.
        quantized: whether it is.
        packed: experts stay packed where they can.
        dtype: of activations.
        device: where the weights are kept.
    """

    read: Callable[[str], QuantizedTensor | Tensor]
    quantized: Callable[[str], bool]
    packed: bool
    dtype: torch.dtype
    device: torch.device


def fill_experts(model: nn.Module, names: Names, weights: ExpertWeights) -> list[Event]:
    """Fill the experts of a skeleton whose plain tensors are filled; return events of those that are not as meant.

    Raises:
        RefusedError: inputs of experts are rounded, in a module that is not understood.
    """
    events, decoded = [], []
    for name, stored in _mixtures(names).items():
        quantized = [item for item in stored if weights.quantized(item)]
        made = None
        if quantized and weights.packed:
            made = _packed(model.get_submodule(name), names, stored, weights)
        if made is None:
            _decode(model, names, stored, weights)
            decoded += quantized if weights.packed else []
        else:
            model.set_submodule(name, made)
            events += [Event("kernel-fallback", name, why) for why in made.failures]
    if decoded:
        whole = sum(names.weights(item) for source in names.distinct() for item in source.stored)
        share = sum(map(names.weights, decoded)) / whole
        what = f"{share:.0%} of all weights are experts that are decoded: their module is not understood"
        events.append(Event("kernel-fallback", decoded[0], what))
    return events


def plainly(value: QuantizedTensor | Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Return a weight decoded; raise RefusedError where its inputs are rounded, which a plain weight does not do."""
    if isinstance(value, Tensor):
        return value
    if value.input is not None:
        raise RefusedError(
            f"{name}: its inputs are rounded, which is not computed in the module that holds it here",
            "measure it in an engine that loads it (see `quantforge plan`)",
        )
    return value.decode(dtype)


def _mixtures(names: Names) -> dict[str, list[str]]:
    """Return the stored matrices of experts by the name of the module that holds them when it runs."""
    found: dict[str, list[str]] = defaultdict(list)
    for source in names.distinct():
        if source.stored[0] in names.places:
            found[next(iter(source.parameters)).rpartition(".")[0]] += source.stored
    return found


def _packed(
    module: nn.Module, names: Names, stored: list[str], weights: ExpertWeights
) -> PackedExperts | None:
    places = {item: names.places[item] for item in stored}
    stacks = list(dict.fromkeys(place.stack for place in places.values()))
    by_place = {
        (place.stack.linears[place.position], place.expert): item for item, place in places.items()
    }

    def weight(linear: str, expert: int) -> QuantizedTensor | Tensor:
        return weights.read(by_place[linear, expert])

    spread = gated_spread(module, {stack.parameter.rpartition(".")[2]: stack for stack in stacks})
    kind = PackedExperts if spread is None else SpreadExperts
    return packed_experts(spread or module, stacks, weight, weights.dtype, weights.device, kind)


def _decode(model: nn.Module, names: Names, stored: list[str], weights: ExpertWeights) -> None:
    """Write the matrices of experts into the stacks that transformers computes with, made where they are empty."""
    for item in stored:
        module_name, _, leaf = names.runtime(item).rpartition(".")
        module = model.get_submodule(module_name)
        stack: Tensor = getattr(module, leaf)
        if stack.is_meta:
            stack = torch.empty(stack.shape, dtype=weights.dtype, device=weights.device)
            setattr(module, leaf, nn.Parameter(stack, requires_grad=False))
        value = plainly(weights.read(item), item, weights.dtype)
        names.places[item].view(stack).copy_(value)
