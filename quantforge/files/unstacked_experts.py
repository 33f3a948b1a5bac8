"""Experts one by one: a checkpoint whose files hold all experts of a layer in one tensor, as if each had its own.

Every matrix of an expert is ``[out_features, in_features]`` under the name that the family declares for it, however the
stack turns and interleaves them. Of a stack, one expert is read at a time; the last ones are kept, because gate and up
are parts of one, and because a matrix may be read in strips.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from quantforge.architectures import LayerKind, StackSlice, architecture_of, text_config
from quantforge.architectures.match import DerivedDeclarations
from quantforge.architectures.towers import NUMBERED_NAME
from quantforge.files.computed_tensors import Rows, prepared_checkpoint
from quantforge.files.reader import Checkpoint
from quantforge.files.safetensors import TensorEntry

if TYPE_CHECKING:
    import torch

KEPT = 2  # experts that are held


class _LastRead:
    """Cache of the experts of one checkpoint that were read last; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: Checkpoint | None = None
        self._found: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()

    def rows(
        self, stack: str, place: StackSlice, inner: Checkpoint, first: int, last: int
    ) -> torch.Tensor:
        """Return rows of a matrix of an expert: of a ``stack`` in ``inner``, the one at ``place``."""
        expert = self._read(inner, stack, place.expert)
        return place.stack.matrix(expert, place.linear_index, 0)[first:last].contiguous()

    def _read(self, inner: Checkpoint, stack: str, expert: int) -> torch.Tensor:
        """Return one expert of a stack, ``[1, ...]``."""
        with self._lock:
            if inner is not self._of:  # what was read without checksums is not used with them
                self._of = inner
                self._found.clear()
            key = (stack, expert)
            if key not in self._found:
                self._found[key] = inner.read_rows(stack, expert, expert + 1)
                while len(self._found) > KEPT:
                    self._found.popitem(last=False)
            return self._found[key]


class _Matrix(NamedTuple):
    """The matrix of one expert in a stack.

    Attributes:
        stack: stored name of the stack.
        name: stored name that the matrix has by itself.
        place: where it lies in the stack.
        canonical: its name in the running model, "" where ``name`` leads to it by the family's declarations.
    """

    stack: str
    name: str
    place: StackSlice
    canonical: str = ""


def unstacked(checkpoint: Checkpoint, derived: DerivedDeclarations | None = None) -> Checkpoint:
    """Return a view of a checkpoint with experts one by one; itself where its files hold no stacks of them.

    Args:
        checkpoint: the model.
        derived: declarations of this very model, in the place of those of its family.

    Raises:
        InputError: its configuration states sizes that are not valid.
    """
    added: dict[str, TensorEntry] = {}
    computed: dict[str, Rows] = {}
    stacks: set[str] = set()
    matrices = list(_derived(derived) if derived else _declared(checkpoint))
    experts = {one.stack: one.place.expert + 1 for one in matrices}
    read = _LastRead()
    for one in matrices:
        stack = checkpoint.entries.get(one.stack)
        if stack is None or not _fits(stack, one.place, experts[one.stack]):
            continue  # what is wrong with it is said where tensors are matched
        stacks.add(one.stack)
        added[one.name] = _entry(one.name, stack, one.place)
        computed[one.name] = partial(read.rows, one.stack, one.place)
    if not stacks:
        return checkpoint
    if derived is not None:
        single = {one.name: one.canonical for one in matrices}
        derived = derived._replace(names={**derived.names, **single})
    return prepared_checkpoint(checkpoint, computed, added=added, left_out=stacks, declared=derived)


def _declared(checkpoint: Checkpoint) -> Iterator[_Matrix]:
    """Yield every matrix of the stacks that files of a declared family may have."""
    config = text_config(checkpoint.config)
    architecture = architecture_of(checkpoint.config)
    if architecture is None or not architecture.publishes_stacked_experts:
        return
    dimensions = architecture.dimensions(config)
    for index, kind in enumerate(architecture.layer_kinds(config, dimensions)):
        stacks, names = kind.stored_stacks, _names(kind)
        for linear, place in kind.expert_slices().items():
            for prefix, canonical in architecture.prefixes:
                block = f"{architecture.blocks}.{index}."
                if place.stack.parameter not in stacks or not block.startswith(canonical):
                    continue
                block = prefix + block.removeprefix(canonical)
                yield _Matrix(block + stacks[place.stack.parameter], block + names[linear], place)


def _derived(found: DerivedDeclarations) -> Iterator[_Matrix]:
    """Yield every matrix of the stacks that a model with derived declarations has."""
    stored = {canonical: name for name, canonical in found.names.items()}
    architecture = found.architecture
    assert architecture.derivation is not None
    for index, kind in enumerate(architecture.layer_kinds({}, architecture.derivation.dimensions)):
        block = f"{architecture.blocks}.{index}."
        for linear, place in kind.expert_slices().items():
            stack = stored.get(block + place.stack.parameter)
            if stack is None or (beside := NUMBERED_NAME.match(stack)) is None:
                continue
            turned = place.stack.transposed is not (stack in found.transposed_stacks)
            own = replace(place, stack=replace(place.stack, transposed=turned))
            name = f"{linear}.weight"
            yield _Matrix(stack, f"{beside[1]}.{beside[2]}.{name}", own, block + name)


def _names(kind: LayerKind) -> dict[str, str]:
    """Return the names of weights in files by their linear, both relative to the block."""
    weights = (item for item in kind.parameters if item.name.endswith(".weight"))
    return {item.name.removesuffix(".weight"): item.stored or item.name for item in weights}


def _fits(stack: TensorEntry, place: StackSlice, experts: int) -> bool:
    """Return whether a stack holds so many experts, and of each as many rows of every linear."""
    if len(stack.shape) != 3 or stack.shape[0] != experts:
        return False
    return stack.shape[2 if place.stack.transposed else 1] % len(place.stack.linears) == 0


def _entry(name: str, stack: TensorEntry, place: StackSlice) -> TensorEntry:
    rows, columns = stack.shape[:0:-1] if place.stack.transposed else stack.shape[1:]
    shape = (rows // len(place.stack.linears), columns)
    count = (stack.end - stack.start) // stack.shape[0] // len(place.stack.linears)
    return replace(stack, name=name, shape=shape, end=stack.start + count)
