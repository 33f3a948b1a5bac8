"""A view of a checkpoint in which stacked experts are separate tensors.

Some checkpoints store all experts of a layer in one tensor. In the view every matrix of an expert is
``[out_features, in_features]`` under the name that the family declares for it, even if the stack transposes and
interleaves them. One expert of a stack is read at a time; the last ones are cached, because gate and up are parts of
one, and because a matrix may be read in strips.
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
from quantforge.files.computed_tensors import ComputeRows, with_computed_tensors
from quantforge.files.reader import Checkpoint
from quantforge.files.safetensors import TensorEntry

if TYPE_CHECKING:
    import torch

MAX_CACHED_EXPERTS = 2  # experts that are held


class _ExpertCache:
    """Thread-safe cache of the experts of one checkpoint that were read last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checkpoint: Checkpoint | None = None
        self._experts: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()

    def read_rows(
        self, stack: str, stack_slice: StackSlice, inner: Checkpoint, first: int, last: int
    ) -> torch.Tensor:
        """Return rows of one expert's matrix, at ``stack_slice`` of the ``stack`` in ``inner``."""
        expert = self._read(inner, stack, stack_slice.expert)
        return stack_slice.stack.matrix(expert, stack_slice.linear_index, 0)[
            first:last
        ].contiguous()

    def _read(self, inner: Checkpoint, stack: str, expert: int) -> torch.Tensor:
        """Return one expert of a stack, ``[1, ...]``."""
        with self._lock:
            if (
                inner is not self._checkpoint
            ):  # what was read without checksums is not used with them
                self._checkpoint = inner
                self._experts.clear()
            key = (stack, expert)
            if key not in self._experts:
                self._experts[key] = inner.read_rows(stack, expert, expert + 1)
                while len(self._experts) > MAX_CACHED_EXPERTS:
                    self._experts.popitem(last=False)
            return self._experts[key]


class _ExpertMatrix(NamedTuple):
    """The matrix of one expert in a stack.

    Attributes:
        stack: stored name of the stack.
        name: stored name of the separate matrix.
        place: its position in the stack.
        canonical_name: its name in the running model; "" if the family's declarations map ``name`` to it.
    """

    stack: str
    name: str
    place: StackSlice
    canonical_name: str = ""


def unstack_experts(
    checkpoint: Checkpoint, derived: DerivedDeclarations | None = None
) -> Checkpoint:
    """Return a view of a checkpoint with separate experts; the checkpoint itself if it has no stacks.

    Args:
        checkpoint: the model.
        derived: declarations derived for this model, instead of those of its family.

    Raises:
        InputError: its configuration has invalid sizes.
    """
    new_entries: dict[str, TensorEntry] = {}
    computed_tensors: dict[str, ComputeRows] = {}
    stacks: set[str] = set()
    matrices = list(_derived_matrices(derived) if derived else _declared_matrices(checkpoint))
    num_experts = {matrix.stack: matrix.place.expert + 1 for matrix in matrices}
    cache = _ExpertCache()
    for matrix in matrices:
        stack = checkpoint.entries.get(matrix.stack)
        if stack is None or not _is_expected_stack(stack, matrix.place, num_experts[matrix.stack]):
            continue  # what is wrong with it is said where tensors are matched
        stacks.add(matrix.stack)
        new_entries[matrix.name] = _matrix_entry(matrix.name, stack, matrix.place)
        computed_tensors[matrix.name] = partial(cache.read_rows, matrix.stack, matrix.place)
    if not stacks:
        return checkpoint
    if derived is not None:
        canonical_names = {matrix.name: matrix.canonical_name for matrix in matrices}
        derived = derived._replace(names={**derived.names, **canonical_names})
    return with_computed_tensors(
        checkpoint, computed_tensors, new_entries=new_entries, removed=stacks, declared=derived
    )


def _declared_matrices(checkpoint: Checkpoint) -> Iterator[_ExpertMatrix]:
    """Yield every matrix of the stacks that the files of a declared family may have."""
    config = text_config(checkpoint.config)
    architecture = architecture_of(checkpoint.config)
    if architecture is None or not architecture.publishes_stacked_experts:
        return
    dimensions = architecture.dimensions(config)
    for index, kind in enumerate(architecture.layer_kinds(config, dimensions)):
        stacks, names = kind.stored_stacks, _stored_weight_names(kind)
        for linear, stack_slice in kind.expert_slices().items():
            for prefix, canonical in architecture.prefixes:
                block = f"{architecture.blocks}.{index}."
                if stack_slice.stack.parameter not in stacks or not block.startswith(canonical):
                    continue
                block = prefix + block.removeprefix(canonical)
                yield _ExpertMatrix(
                    block + stacks[stack_slice.stack.parameter], block + names[linear], stack_slice
                )


def _derived_matrices(declarations: DerivedDeclarations) -> Iterator[_ExpertMatrix]:
    """Yield every matrix of the stacks of a model with derived declarations."""
    stored = {canonical: name for name, canonical in declarations.names.items()}
    architecture = declarations.architecture
    assert architecture.derivation is not None
    for index, kind in enumerate(architecture.layer_kinds({}, architecture.derivation.dimensions)):
        block = f"{architecture.blocks}.{index}."
        for linear, stack_slice in kind.expert_slices().items():
            stack = stored.get(block + stack_slice.stack.parameter)
            if stack is None or (block_match := NUMBERED_NAME.match(stack)) is None:
                continue
            transposed = stack_slice.stack.transposed is not (
                stack in declarations.transposed_stacks
            )
            stored_slice = replace(
                stack_slice, stack=replace(stack_slice.stack, transposed=transposed)
            )
            name = f"{linear}.weight"
            yield _ExpertMatrix(
                stack, f"{block_match[1]}.{block_match[2]}.{name}", stored_slice, block + name
            )


def _stored_weight_names(kind: LayerKind) -> dict[str, str]:
    """Return the stored names of weights by their linear, both relative to the block."""
    weights = (item for item in kind.parameters if item.name.endswith(".weight"))
    return {item.name.removesuffix(".weight"): item.stored or item.name for item in weights}


def _is_expected_stack(stack: TensorEntry, stack_slice: StackSlice, num_experts: int) -> bool:
    """Return whether a stack has that many experts, and equally many rows for each linear of an expert."""
    if len(stack.shape) != 3 or stack.shape[0] != num_experts:
        return False
    return (
        stack.shape[2 if stack_slice.stack.transposed else 1] % len(stack_slice.stack.linears) == 0
    )


def _matrix_entry(name: str, stack: TensorEntry, stack_slice: StackSlice) -> TensorEntry:
    rows, columns = stack.shape[:0:-1] if stack_slice.stack.transposed else stack.shape[1:]
    shape = (rows // len(stack_slice.stack.linears), columns)
    num_bytes = (stack.end - stack.start) // stack.shape[0] // len(stack_slice.stack.linears)
    return replace(stack, name=name, shape=shape, end=stack.start + num_bytes)
