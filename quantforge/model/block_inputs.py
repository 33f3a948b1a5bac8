"""Compute the arguments of each decoder block, given the hidden states after the previous block.

In most models, everything besides the hidden states (masks, rotary embeddings) depends only on the shape of the rows,
so it is recorded once. In other models it depends on the tokens or on outputs of earlier blocks: per-layer embeddings,
keys and values of an earlier layer, selected tokens, a history of states. For these, the model's own code around the
blocks runs again whenever rows pass a block, with stand-ins that return what the earlier blocks returned. Nothing needs
to be known about that code. A block may return its hidden states alone or first in a tuple; its stand-in does the same.

For each row, this requires the hidden states after the previous block, its other outputs, what blocks wrote to mappings
among their arguments, and the hidden states of those blocks whose output is read again later (found by changing the
outputs one at a time). Hidden states are stored as usual; the rest is kept beside them, in memory or on disk
(`LeafStore`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from quantforge.model.block_calls import Call, StandIn, extra_outputs_of, mutable_mappings
from quantforge.model.hidden_states import HiddenStates, LeafStore, StateLayout

if TYPE_CHECKING:
    from quantforge.model.decoder_calls import DecoderCalls

PROBE_TOKENS = 32  # tokens of the row that shows what is read again
RunModel = Callable[[Tensor], Any]  # the model on token ids [rows, length]


class BlockCall(NamedTuple):
    """Arguments of a block for the rows starting at ``start``.

    ``mappings_before`` holds the content of mutable mappings among the arguments before the call.
    """

    start: int
    rows: int
    states: Tensor
    arguments: Call
    mappings_before: Mapping[str, Mapping[Any, Any]] = {}  # of a named tuple, and never written to


class BlockInputs(Protocol):
    """Interface that supplies the arguments of a block for calibration rows."""

    @property
    def layout(self) -> StateLayout:
        """Return the layout of the hidden states."""

    @property
    def one_row_at_a_time(self) -> bool:
        """Return whether rows have to pass one at a time."""

    def call_for(self, start: int, states: Tensor) -> BlockCall:
        """Return the arguments of the block, given packed states of rows starting at ``start``; thread-safe."""

    def record_output(self, call: BlockCall, returned: Any) -> None:
        """Record the outputs of the block for later blocks, replacing earlier records of these rows."""


class RecordedInputs(NamedTuple):
    """Block arguments that depend only on the number of rows, recorded once per number."""

    layout: StateLayout
    calls: Mapping[int, Call]
    one_row_at_a_time: bool = False

    def call_for(self, start: int, states: Tensor) -> BlockCall:
        """Return the hidden states with the arguments recorded for this number of rows."""
        rows = len(states)
        return BlockCall(start, rows, self.layout.unpack(states), self.calls[rows])

    def record_output(self, call: BlockCall, returned: Any) -> None:
        """Do nothing: no later block needs these outputs."""


class EarlierOutputs(NamedTuple):
    """Outputs of earlier blocks for one row, besides hidden states, and their writes to mappings (by argument)."""

    extra_outputs: tuple[Any, ...] = ()
    mapping_writes: Mapping[str, Mapping[Any, Any]] = {}  # of a named tuple, and never written to


class ReplayedInputs:
    """Block arguments computed by running the model's code around its blocks again for every micro-batch.

    Args:
        stand_ins: the stand-ins of all blocks.
        run: runs the model and returns the hidden states after its last norm.
        ids: token ids of all rows.
        layout: axes of the hidden states.
        leaves: stores the other outputs of blocks.
        decoder_calls: arguments of the text decoder by row, for rows with images; None computes them from the ids.

    Attributes:
        one_row_at_a_time: see `BlockInputs`.
        reread_states: stores of the hidden states that later blocks read again, by the index of the block that returned
            them; None until they are stored.
    """

    def __init__(
        self,
        stand_ins: Sequence[StandIn],
        run: RunModel,
        ids: Tensor,
        layout: StateLayout,
        leaves: LeafStore,
        decoder_calls: DecoderCalls | None = None,
    ) -> None:
        self._stand_ins, self._run, self._ids, self.layout = stand_ins, run, ids, layout
        self._leaves, self._decoder_calls, self.one_row_at_a_time = (
            leaves,
            decoder_calls,
            decoder_calls is not None,
        )
        self._thread_local = threading.local()
        self._index = 0
        self._outputs_by_row: dict[int, EarlierOutputs] = {}
        self._next_outputs: dict[int, EarlierOutputs] = {}
        self.reread_states: dict[int, HiddenStates | None] = {}
        for index, stand_in in enumerate(stand_ins):
            stand_in.override = partial(self._override, index)
        self._find_reread_states()

    @property
    def needs_earlier_outputs(self) -> bool:
        """Return whether a block depends on more than the hidden states after the previous block."""
        return bool(self.reread_states) or any(
            tree_leaves(tuple(earlier)) for earlier in self._outputs_by_row.values()
        )

    def at_block(self, index: int) -> ReplayedInputs:
        """Move to a block; the outputs recorded for the previous block become its inputs."""
        if index != self._index:
            self._outputs_by_row, self._next_outputs, self._index = (
                {**self._outputs_by_row, **self._next_outputs},
                {},
                index,
            )
        return self

    def call_for(self, start: int, states: Tensor) -> BlockCall:
        """Run the model up to the current block and return the arguments it receives."""
        reached_calls: list[BlockCall] = []
        earlier = self._earlier_outputs(start, len(states), states.device)

        def override(index: int, at_block: Tensor, call: Call) -> Any:
            if index == self._index:
                # The model embeds anew, and gradients are asked for those states that were given.
                if index == 0 and states.requires_grad:
                    at_block = self.layout.unpack(states)
                decoder_calls = mutable_mappings(call)
                for name, content in earlier.mapping_writes.items():
                    decoder_calls[name].update(content)
                mappings_before = {name: dict(value) for name, value in decoder_calls.items()}
                reached_calls.append(BlockCall(start, len(states), at_block, call, mappings_before))
            return self._stand_in_output(index, at_block, start, states, earlier)

        self._run_with(override, self._run, start, len(states))
        return reached_calls[0]

    def record_output(self, call: BlockCall, returned: Any) -> None:
        """Record outputs other than the hidden states, and what the block wrote to mappings."""
        rows = call.rows
        mapping_writes = {
            name: {k: v for k, v in value.items() if call.mappings_before[name].get(k) is not v}
            for name, value in mutable_mappings(call.arguments).items()
        }
        for row in range(rows):
            select_row = partial(_select_row, row, rows)
            earlier_writes = self._outputs_by_row.get(
                call.start + row, EarlierOutputs()
            ).mapping_writes
            own_writes = {
                name: {
                    **earlier_writes.get(name, {}),
                    **self._leaves.put(tree_map(select_row, content)),
                }
                for name, content in mapping_writes.items()
                if content or name in earlier_writes
            }
            extra_outputs = self._leaves.put(tree_map(select_row, extra_outputs_of(returned)))
            self._next_outputs[call.start + row] = EarlierOutputs(extra_outputs, own_writes)

    def run_end(self, start: int, states: Tensor, run: RunModel) -> Any:
        """Run the part of the model after its blocks (or ``run`` instead) on the hidden states of the last block."""
        self.at_block(len(self._stand_ins))
        earlier = self._earlier_outputs(start, len(states), states.device)

        def override(index: int, at_block: Tensor, _: Call) -> Any:
            return self._stand_in_output(index, at_block, start, states, earlier)

        return self._run_with(override, run, start, len(states))

    def _stand_in_output(
        self, index: int, at_block: Tensor, start: int, states: Tensor, earlier: EarlierOutputs
    ) -> Any:
        """Return the output of a stand-in: stored states for an earlier block, its input for a later one."""
        if index < self._index:
            store = self.reread_states.get(index)
            read_states = store.read(start, start + len(states)).to(states) if store else states
            at_block = self.layout.unpack(read_states)
        return self._stand_ins[index].wrap_output(at_block, earlier.extra_outputs)

    def _override(self, index: int, states: Tensor, call: Call) -> Any:
        return self._thread_local.override(index, states, call)

    def _run_with(self, override: Callable[..., Any], run: RunModel, start: int, count: int) -> Any:
        ids = self._ids[start : start + count]
        with (
            self._overriding(override),
            self._set_row(start),
            torch.autocast(ids.device.type, enabled=False),
        ):
            return run(ids)

    def _set_row(self, row: int) -> AbstractContextManager[None]:
        return nullcontext() if self._decoder_calls is None else self._decoder_calls.row_set(row)

    @contextmanager
    def _overriding(self, override: Callable[..., Any]) -> Iterator[None]:
        self._thread_local.override = override
        try:
            yield
        finally:
            del self._thread_local.override

    def _earlier_outputs(self, start: int, count: int, device: torch.device) -> EarlierOutputs:
        """Return the recorded outputs of several rows, concatenated."""
        stored_outputs = [
            self._outputs_by_row.get(row, EarlierOutputs()) for row in range(start, start + count)
        ]
        return EarlierOutputs(
            *tree_map(partial(self._leaves.load_joined, device), *map(tuple, stored_outputs))
        )

    def _find_reread_states(self) -> None:
        """Find the blocks whose hidden states are read again after the next block."""
        ids = self._ids[:1] if self.one_row_at_a_time else self._ids[:1, :PROBE_TOKENS]
        generator = torch.Generator(ids.device).manual_seed(0)
        shape = (len(self._stand_ins), 1, ids.shape[1], self.layout.values_per_token)
        outputs = torch.randn(shape, generator=generator, device=ids.device)
        plain_trace = self._trace_arguments(outputs, ids)
        for index in range(len(self._stand_ins) - 1):
            changed_outputs = outputs.clone()
            changed_outputs[index] = -outputs[index]
            later = zip(
                plain_trace[index + 2 :],
                self._trace_arguments(changed_outputs, ids)[index + 2 :],
                strict=True,
            )
            if not all(equal_trees(first, other) for first, other in later):
                self.reread_states[index] = None

    def _trace_arguments(self, outputs: Tensor, ids: Tensor) -> list[Any]:
        """Run the model with given packed block outputs; return the arguments of every block and the final output."""
        traced: list[Any] = []

        def override(index: int, at_block: Tensor, call: Call) -> Any:
            traced.append((at_block, tuple(call)))
            return self._stand_ins[index].wrap_output(
                self.layout.unpack(outputs[index]).to(at_block)
            )

        with self._overriding(override), self._set_row(0):
            final = self._run(ids)
        return [*traced, final]


def equal_trees(first: Any, second: Any) -> bool:
    """Return whether two nested structures have the same number of leaves, and equal tensors leaf by leaf."""
    leaves, second_leaves = tree_leaves(first), tree_leaves(second)
    return len(leaves) == len(second_leaves) and all(
        isinstance(a, Tensor) is isinstance(b, Tensor)
        and (not isinstance(a, Tensor) or torch.equal(a, b))
        for a, b in zip(leaves, second_leaves, strict=True)
    )


def _select_row(row: int, count: int, value: Any) -> Any:
    """Return one row of a tensor that has several rows; any other value is returned unchanged."""
    return value[row : row + 1] if isinstance(value, Tensor) and count > 1 else value
