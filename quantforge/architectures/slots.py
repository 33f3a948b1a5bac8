"""Slots: every tensor that a family declares for one model, by its name in files, and what it has to be there."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.architectures import Architecture, LayerKind, Parameter
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.matched import FLOATS, MatchedTensor, Role
from quantforge.plans import StoredTensor


@dataclass(frozen=True, slots=True)
class Slot:
    """One declared tensor: what a stored one of this name has to be.

    Attributes:
        name: canonical name, that of the running model.
        shape, role, block, expert: as those of `MatchedTensor` and its stored tensor.
        linear: canonical name of the first linear of the shared input.
        transposed: a linear weight stored ``[in_features, out_features]``.
        stack: of an expert's matrix, the canonical name of the tensor that may hold those of all experts instead.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    block: int = -1
    linear: str = ""
    transposed: bool = False
    expert: int = -1
    stack: str = ""

    def filled(self, stored: StoredTensor) -> MatchedTensor:
        """Return the tensor that fills it."""
        return MatchedTensor(
            self.name, stored, self.role, self.block, self.linear, self.transposed, self.expert
        )

    def misfits(self, stored: StoredTensor) -> list[str]:
        """Return what is wrong with the shape or type of a tensor of its name."""
        if stored.shape != self.shape:
            return [
                f"{stored.name}: shape {list(stored.shape)}, the config asks for {list(self.shape)}"
            ]
        of_module = self.name.rpartition(".")[2] in {"weight", "bias"}
        beside = self.role is Role.OTHER and (self.block < 0 or not of_module)  # counters, tables
        if stored.dtype not in FLOATS and not beside:
            return [f"{stored.name}: type {stored.dtype}, not one of {', '.join(sorted(FLOATS))}"]
        return []


class Slots:
    """The slots of one model.

    Attributes:
        layers: the kind of every layer.
        by_name: slots by the name in files, without a prefix.
    """

    def __init__(
        self,
        architecture: Architecture,
        dimensions: Dimensions,
        config: Mapping[str, Any],
        names: Mapping[str, str],
    ) -> None:
        self._names = names
        self._architecture = architecture
        self._dimensions = dimensions
        self.layers = architecture.layers(config, dimensions)
        self.by_name = dict(self._outer())
        for index, kind in enumerate(self.layers):
            self.by_name.update(self._block(index, kind))

    def of(self, stored_name: str) -> Slot | None:
        """Return the slot of a stored tensor, under any prefix of the family; None where it is not declared."""
        stored_name = self._names.get(stored_name, stored_name)
        for prefix, canonical in self._architecture.prefixes:
            if stored_name.startswith(prefix):
                slot = self.by_name.get(canonical + stored_name.removeprefix(prefix))
                if slot is not None:
                    return slot
        return None

    def missing(self, found: Container[str]) -> list[str]:
        """Return the names in files of the slots whose canonical name is not ``found``.

        Experts that files may hold in one tensor are missed as that tensor, unless some of them are there.
        """
        parts = {slot.stack for slot in self.by_name.values() if slot.stack and slot.name in found}
        known = {slot.stack for slot in self.by_name.values()}
        return [
            name
            for name, slot in self.by_name.items()
            if slot.name not in found
            and not (slot.stack and slot.stack not in parts)
            and not (slot.name in known and slot.name in parts)
        ]

    def twice(self, found: Container[str]) -> list[str]:
        """Return what is wrong with stacks of experts whose parts are there too."""
        parts = {slot.stack for slot in self.by_name.values() if slot.stack and slot.name in found}
        return [
            f"{name}: some of its experts are stored one by one too"
            for name, slot in self.by_name.items()
            if slot.name in parts and slot.name in found
        ]

    def _outer(self) -> Iterator[tuple[str, Slot]]:
        architecture = self._architecture
        special = {
            f"{architecture.embedding}.weight": Role.EMBEDDING,
            f"{architecture.head}.weight": Role.HEAD,
        }
        for item in architecture.outer:
            role = special.get(item.name) or _role(item, {}, frozenset())
            yield item.name, Slot(item.name, self._dimensions.shape(item.shape), role)

    def _block(self, index: int, kind: LayerKind) -> Iterator[tuple[str, Slot]]:
        block = f"{self._architecture.blocks}.{index}"
        inputs = {name: shared for shared in kind.inputs for name in shared.linears}
        weights = (item for item in kind.parameters if item.name.endswith(".weight"))
        matrices = frozenset(_module(item) for item in weights if len(item.shape) > 1)
        held = kind.stored_stacks
        stacks = {
            name: f"{block}.{place.stack.parameter}"
            for name, place in (kind.places() if held else {}).items()
            if place.stack.parameter in held
        }
        for item in kind.parameters:
            role = _role(item, inputs, matrices)
            shared = inputs[item.name.removesuffix(".weight")] if role is Role.LINEAR else None
            yield (
                f"{block}.{item.stored or item.name}",
                Slot(
                    f"{block}.{item.name}",
                    self._dimensions.shape(item.shape),
                    role,
                    index,
                    f"{block}.{shared.key}" if shared else "",
                    self._architecture.transposed and shared is not None,
                    shared.expert if shared else -1,
                    stacks.get(item.name.removesuffix(".weight"), ""),
                ),
            )


def _module(item: Parameter) -> str:
    return item.name.rpartition(".")[0]


def _role(item: Parameter, linears: Mapping[str, object], matrices: frozenset[str]) -> Role:
    """Return the role of a tensor; ``matrices``: modules whose weight is no vector, as that of a norm is."""
    module, kind = _module(item), item.name.rpartition(".")[2]
    if module in linears and kind == "weight":
        return Role.LINEAR
    if module in matrices and kind == "bias":
        return Role.BIAS
    named = kind in {"weight", "bias"} and "embed" not in item.name and not module.endswith("wpe")
    return Role.NORM if named and len(item.shape) == 1 else Role.OTHER
