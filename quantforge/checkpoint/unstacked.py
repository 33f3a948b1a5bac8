"""Experts one by one: a checkpoint whose files hold all experts of a layer in one tensor, as if each had its own.

Every matrix of an expert is ``[out_features, in_features]`` under the name that the family declares for it, however the
stack turns and interleaves them. Of a stack, one expert is read at a time; the last ones are kept, because gate and up
are parts of one, and because a matrix may be read in strips.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from quantforge.architectures import LayerKind, Place, architecture_of, text_config
from quantforge.architectures.matched import Declared
from quantforge.architectures.towers import BLOCK
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.safetensors import TensorEntry
from quantforge.checkpoint.seal import Seal

if TYPE_CHECKING:
    import torch

KEPT = 2  # experts that are held


@dataclass(frozen=True, slots=True)
class Slice:
    """Matrix of an expert inside of a stack: the stored name of the stack, and the place in it."""

    stack: str
    place: Place


class _LastRead:
    """The experts that were read last; safe on several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()

    def read(self, inner: Checkpoint, stack: str, expert: int) -> torch.Tensor:
        """Return one expert of a stack, ``[1, ...]``."""
        with self._lock:
            key = (stack, expert)
            if key not in self._found:
                self._found[key] = inner.read_rows(stack, expert, expert + 1)
                while len(self._found) > KEPT:
                    self._found.popitem(last=False)
            return self._found[key]


@dataclass(frozen=True, slots=True)
class UnstackedCheckpoint(Checkpoint):
    """Checkpoint with a tensor for every matrix of an expert.

    Attributes:
        inner: what holds the stacks.
        slices: where these tensors lie, by name.
        last: the experts that were read last.
        derived: as `Checkpoint.declared`.
    """

    inner: Checkpoint
    slices: Mapping[str, Slice]
    last: _LastRead
    derived: Declared | None

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor, errors as `Checkpoint.read`."""
        found = self.slices.get(name)
        return self._matrix(found).contiguous() if found else self.inner.read(name)

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read rows of a tensor, errors as `Checkpoint.read_rows`."""
        found = self.slices.get(name)
        if found is None:
            return self.inner.read_rows(name, first, last)
        return self._matrix(found)[first:last].contiguous()

    @property
    def facts(self) -> Mapping[str, str]:
        """Return what there is to say of the source (as `Checkpoint`)."""
        return self.inner.facts

    @property
    def declared(self) -> Declared | None:
        """Return the derived declarations by which experts were told apart; None for those of the family."""
        return self.derived

    @property
    def opened(self) -> Checkpoint:
        """Return the checkpoint that was opened."""
        return self.inner.opened

    def sealed(self, seals: Mapping[Path, Seal]) -> Self:
        """Return the checkpoint with seals on its files (as `Checkpoint`)."""
        return replace(self, inner=self.inner.sealed(seals), last=_LastRead())

    def _matrix(self, found: Slice) -> torch.Tensor:
        place = found.place
        rows = self.last.read(self.inner, found.stack, place.expert)
        return place.stack.matrix(rows, place.position, 0)


def unstacked(checkpoint: Checkpoint, derived: Declared | None = None) -> Checkpoint:
    """Return a view of a checkpoint with experts one by one; itself where its files hold no stacks of them.

    Args:
        checkpoint: the model.
        derived: declarations of this very model, in the place of those of its family.

    Raises:
        InputError: its configuration states sizes that are not valid.
    """
    entries, slices = dict(checkpoint.entries), {}
    places = list(_derived(derived) if derived else _declared(checkpoint))
    last = {stack: place.expert for stack, _, place in places}
    for stack_name, name, place in places:
        stack = checkpoint.entries.get(stack_name)
        if stack is None or not _fits(stack, place, last[stack_name] + 1):
            continue  # what is wrong with it is said where tensors are matched
        entries.pop(stack.name, None)
        entries[name] = _entry(name, stack, place)
        slices[name] = Slice(stack.name, place)
    if not slices:
        return checkpoint
    common = {item.name: getattr(checkpoint, item.name) for item in fields(Checkpoint)}
    common["entries"] = dict(sorted(entries.items()))
    if derived is not None:
        single = {name: canonical for _, name, _, canonical in _single(derived)}
        derived = derived._replace(names={**derived.names, **single})
    return UnstackedCheckpoint(
        **common, inner=checkpoint, slices=slices, last=_LastRead(), derived=derived
    )


def _declared(checkpoint: Checkpoint) -> Iterator[tuple[str, str, Place]]:
    """Yield the stored name of every stack that a family may have, and of a matrix in it the name and the place."""
    config = text_config(checkpoint.config)
    architecture = architecture_of(checkpoint.config)
    if architecture is None or not architecture.stacks_experts:
        return
    dimensions = architecture.dimensions(config)
    for index, kind in enumerate(architecture.layers(config, dimensions)):
        stacks, names = kind.stored_stacks, _names(kind)
        for linear, place in kind.places().items():
            for prefix, canonical in architecture.prefixes:
                block = f"{architecture.blocks}.{index}."
                if place.stack.parameter not in stacks or not block.startswith(canonical):
                    continue
                block = prefix + block.removeprefix(canonical)
                yield block + stacks[place.stack.parameter], block + names[linear], place


def _derived(found: Declared) -> Iterator[tuple[str, str, Place]]:
    for stack, name, place, _ in _single(found):
        yield stack, name, place


def _single(found: Declared) -> Iterator[tuple[str, str, Place, str]]:
    """Yield the same for derived declarations, with the canonical name of the matrix."""
    stored = {canonical: name for name, canonical in found.names.items()}
    architecture = found.architecture
    assert architecture.derived is not None
    for index, kind in enumerate(architecture.layers({}, architecture.derived.dimensions)):
        block = f"{architecture.blocks}.{index}."
        for linear, place in kind.places().items():
            stack = stored.get(block + place.stack.parameter)
            if stack is None or (beside := BLOCK.match(stack)) is None:
                continue
            turned = place.stack.transposed is not (stack in found.turned)
            own = replace(place, stack=replace(place.stack, transposed=turned))
            name = f"{linear}.weight"
            yield stack, f"{beside[1]}.{beside[2]}.{name}", own, block + name


def _names(kind: LayerKind) -> dict[str, str]:
    """Return the names of weights in files by their linear, both relative to the block."""
    weights = (item for item in kind.parameters if item.name.endswith(".weight"))
    return {item.name.removesuffix(".weight"): item.stored or item.name for item in weights}


def _fits(stack: TensorEntry, place: Place, experts: int) -> bool:
    """Return whether a stack holds so many experts, and of each as many rows of every linear."""
    if len(stack.shape) != 3 or stack.shape[0] != experts:
        return False
    return stack.shape[2 if place.stack.transposed else 1] % len(place.stack.linears) == 0


def _entry(name: str, stack: TensorEntry, place: Place) -> TensorEntry:
    rows, columns = stack.shape[:0:-1] if place.stack.transposed else stack.shape[1:]
    shape = (rows // len(place.stack.linears), columns)
    count = (stack.end - stack.start) // stack.shape[0] // len(place.stack.linears)
    return replace(stack, name=name, shape=shape, end=stack.start + count)
