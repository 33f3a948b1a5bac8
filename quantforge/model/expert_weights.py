"""The weights of the experts of one block, read from the checkpoint one expert at a time, and let go again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quantforge.architectures import LayerKind, Place
from quantforge.model.loading import parameter

Load = Callable[[int, Mapping[str, Place]], dict[str, Tensor]]


class ExpertWeights:
    """Weights of experts that come and go.

    Attributes:
        path: name of the module of the experts, relative to the block; ``name`` the canonical one.
        numbers: of the experts.
        stacks: the parameters that hold matrices, by their names relative to the block, in computing order.
    """

    def __init__(self, name: str, block: nn.Module, kind: LayerKind, load: Load) -> None:
        """Prepare; nothing is read.

        Args:
            name: canonical name of the block.
            block: its module; the experts in it hold no weights.
            kind: what the block consists of.
            load: reads the parameters of one expert, ``[1, ...]`` each, by their names relative to the block, given its
                number and the places of its linears.
        """
        self.stacks = tuple(stack.parameter for stack in kind.stacks)
        self.path = self.stacks[0].rpartition(".")[0]
        self.name = f"{name}.{self.path}"
        self._module = block.get_submodule(self.path)
        self._empty = dict(self._module.named_parameters(recurse=False))
        self._places: dict[int, dict[str, Place]] = {}
        for linear, place in kind.places().items():
            self._places.setdefault(place.expert, {})[linear] = place
        self.numbers = tuple(self._places)
        self._load = load
        self._held: dict[int, dict[str, Tensor]] = {}

    def weight(self, place: Place) -> Tensor:
        """Return the matrix ``[out_features, in_features]`` of an expert as a view; it is held until `release`."""
        return place.stack.matrix(self.held(place.expert)[place.stack.parameter], place.position, 0)

    def places(self, number: int) -> Mapping[str, Place]:
        """Return the linears of an expert, by their names relative to the block, in computing order."""
        return self._places[number]

    def columns(self, number: int, stack: str) -> int:
        """Return how many input features the matrices of a stack have."""
        places = self._places[number].values()
        return self.weight(next(one for one in places if one.stack.parameter == stack)).shape[1]

    def held(self, number: int) -> dict[str, Tensor]:
        """Return the parameters of an expert, ``[1, ...]`` each, read where they are not held yet."""
        if number not in self._held:
            self._held[number] = self._load(number, self._places[number])
        return self._held[number]

    def device(self, number: int) -> torch.device:
        """Return where the weights of an expert are; it is held until `release`."""
        return next(iter(self.held(number).values())).device

    def holds(self, number: int) -> bool:
        """Return whether the weights of an expert are held."""
        return number in self._held

    def release(self, number: int) -> None:
        """Let go of an expert; it is read anew when it is needed again."""
        self._held.pop(number, None)

    def read_with(self, load: Load) -> Load:
        """Let ``load`` read experts from now on; return what did. Experts that are held are let go."""
        self._held.clear()
        before, self._load = self._load, load
        return before

    @contextmanager
    def filled(self, number: int) -> Iterator[None]:
        """Let the module hold one expert, as its number 0."""
        values = self.held(number)
        for name in self._empty:
            setattr(self._module, name, parameter(values[f"{self.path}.{name}"]))
        try:
            yield
        finally:
            for name, value in self._empty.items():
                setattr(self._module, name, value)
