"""Passage of rows into a block: what reaches it, given the hidden states that the block before it returned.

Of most models everything beside the hidden states (masks, rotary embeddings) depends on the shape of the rows alone;
it is recorded once. Of others it depends on the tokens, or on what earlier blocks returned: embeddings of each layer,
keys and values of an earlier layer, chosen tokens, a history of states. There the model's own code around the blocks
is run anew for rows whenever they pass a block, with stand-ins that return what the earlier blocks have returned.
Nothing has to be known of what the code does. A
block may return its hidden states alone or first in a tuple; a stand-in returns what its block would.

Of earlier blocks this takes, for each row: the hidden states after the last one; what it returned beside them; what
blocks put into mappings that they were given; and the states after those blocks whose output is read again later,
which are found by changing the outputs one at a time. The states are stored as ever, the rest lies where they do, in
memory or on disk (`LeafStore`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from quantforge.model.hidden_states import HiddenStates, LeafStore, StateLayout

if TYPE_CHECKING:
    from quantforge.model.decoder_calls import DecoderCalls

STATES = "hidden_states"
PROBED = 32  # tokens of the row that shows what is read again
Run = Callable[[Tensor], Any]  # the model on token ids [rows, length]


class Call(NamedTuple):
    """The arguments of one forward of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StandIn(nn.Module):
    """Stand-in for a block: records its arguments and passes the hidden states on, or calls ``answer`` instead.

    Attributes:
        states, call: of the last forward that was noted: the hidden states, and what came beside them.
        answer: returns what the stand-in is to return instead; None where it notes.
        returned: as that of `LayerKind`.
    """

    def __init__(self, block: nn.Module, returned: int = 0) -> None:
        super().__init__()
        self.states = torch.empty(0)
        self.call = Call((), {})
        self.answer: Callable[[Tensor, Call], Any] | None = None
        self.returned = returned
        self._block = (block,)  # in a tuple, so that it is no part of the model

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the block: models read, for instance, the type of its attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._block[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return values of the form that the block returns, without computing it."""
        states, call = parted(args, kwargs)
        if self.answer is not None:
            return self.answer(states, call)
        self.states, self.call = states, call
        return self.wrapped(states)

    def wrapped(self, states: Tensor, beside: tuple[Any, ...] = ()) -> Any:
        """Return hidden states in the form in which the block returns them: alone, or first in a tuple."""
        if not self.returned:
            return states
        return (states, *(beside or (None,) * (self.returned - 1)))

    def forget(self) -> None:
        """Drop the recorded arguments."""
        self.states, self.call = torch.empty(0), Call((), {})


def parted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """Split a call into the hidden states (first argument, or by keyword) and its other arguments."""
    if args:
        return args[0], Call(args[1:], kwargs)
    rest = dict(kwargs)
    return rest.pop(STATES), Call((), rest)


def states_of(returned: Any) -> Tensor:
    """Return the hidden states that a block returned."""
    found: Tensor = returned[0] if isinstance(returned, tuple | list) else returned
    return found


def beside_of(returned: Any) -> tuple[Any, ...]:
    """Return what a block returned beside its hidden states."""
    return tuple(returned[1:]) if isinstance(returned, tuple | list) else ()


def mappings(call: Call) -> dict[str, MutableMapping[Any, Any]]:
    """Return the mutable mappings among the arguments of a call, by name: a block can write to them."""
    return {key: value for key, value in call.kwargs.items() if isinstance(value, MutableMapping)}


class Reached(NamedTuple):
    """Arguments of a block for the rows from ``start`` on.

    ``before``: the content of mappings among them, by argument.
    """

    start: int
    rows: int
    states: Tensor
    call: Call
    before: Mapping[str, Mapping[Any, Any]] = {}  # of a named tuple, and never written to


class Passage(Protocol):
    """Interface of how rows reach a block."""

    @property
    def layout(self) -> StateLayout:
        """Return the layout of the hidden states."""

    @property
    def alone(self) -> bool:
        """Return whether rows must pass one at a time."""

    def reach(self, start: int, states: Tensor) -> Reached:
        """Return the arguments of the block, given packed states of the rows from ``start`` on; thread-safe."""

    def left(self, reached: Reached, returned: Any) -> None:
        """Record what the block returned; the last call counts."""


class ShapeCalls(NamedTuple):
    """Passage whose arguments depend only on the number of rows."""

    layout: StateLayout
    calls: Mapping[int, Call]
    alone: bool = False

    def reach(self, start: int, states: Tensor) -> Reached:
        """Return the states, and the arguments recorded for that number of rows."""
        rows = len(states)
        return Reached(start, rows, self.layout.unpacked(states), self.calls[rows])

    def left(self, reached: Reached, returned: Any) -> None:
        """Note nothing."""


class EarlierOutputs(NamedTuple):
    """What earlier blocks returned beside the states, and wrote to mappings (by argument), for one row."""

    beside: tuple[Any, ...] = ()
    put: Mapping[str, Mapping[Any, Any]] = {}  # of a named tuple, and never written to


class Replay:
    """Passage that runs the model's code around its blocks again for every micro-batch.

    Args:
        standins: of all blocks.
        run: runs the model, and returns the hidden states after its last norm.
        ids: token ids of all rows.
        layout: of the hidden states.
        leaves: keeps what blocks return beside them.
        given: arguments of the text tower, by row, instead of what it would get of the ids alone.

    Attributes:
        alone: as of `Passage`.
        again: stores of the states that are read again, by the block after which they are; None until there are any.
    """

    def __init__(
        self,
        standins: Sequence[StandIn],
        run: Run,
        ids: Tensor,
        layout: StateLayout,
        leaves: LeafStore,
        given: DecoderCalls | None = None,
    ) -> None:
        self._standins, self._run, self._ids, self.layout = standins, run, ids, layout
        self._leaves, self._given, self.alone = leaves, given, given is not None
        self._of_thread = threading.local()
        self._index = 0
        self._kept: dict[int, EarlierOutputs] = {}
        self._next: dict[int, EarlierOutputs] = {}
        self.again: dict[int, HiddenStates | None] = {}
        for index, standin in enumerate(standins):
            standin.answer = partial(self._answer, index)
        self._probe()

    @property
    def remembers(self) -> bool:
        """Return whether a block reads more of earlier ones than the states after the last."""
        return bool(self.again) or any(tree_leaves(tuple(kept)) for kept in self._kept.values())

    def at(self, index: int) -> Replay:
        """Move to a block; what the previous block returned becomes its input."""
        if index != self._index:
            self._kept, self._next, self._index = {**self._kept, **self._next}, {}, index
        return self

    def reach(self, start: int, states: Tensor) -> Reached:
        """Run the model up to the present block."""
        reached: list[Reached] = []
        kept = self._of_rows(start, len(states), states.device)

        def answer(index: int, at: Tensor, call: Call) -> Any:
            if index == self._index:
                # The model embeds anew, and gradients are asked for those states that were given.
                if index == 0 and states.requires_grad:
                    at = self.layout.unpacked(states)
                given = mappings(call)
                for name, content in kept.put.items():
                    given[name].update(content)
                before = {name: dict(value) for name, value in given.items()}
                reached.append(Reached(start, len(states), at, call, before))
            return self._returned(index, at, start, states, kept)

        self._answered(answer, self._run, start, len(states))
        return reached[0]

    def left(self, reached: Reached, returned: Any) -> None:
        """Record what was returned beside the states, and what was written to mappings."""
        count = reached.rows
        put = {
            name: {k: v for k, v in value.items() if reached.before[name].get(k) is not v}
            for name, value in mappings(reached.call).items()
        }
        for row in range(count):
            of_row = partial(_row, row, count)
            earlier = self._kept.get(reached.start + row, EarlierOutputs()).put
            mine = {
                name: {**earlier.get(name, {}), **self._leaves.put(tree_map(of_row, content))}
                for name, content in put.items()
                if content or name in earlier
            }
            kept = EarlierOutputs(self._leaves.put(tree_map(of_row, beside_of(returned))), mine)
            self._next[reached.start + row] = kept

    def ended(self, start: int, states: Tensor, run: Run) -> Any:
        """Run the end of the model (or what ``run`` runs) on the states after the last block."""
        self.at(len(self._standins))
        kept = self._of_rows(start, len(states), states.device)

        def answer(index: int, at: Tensor, _: Call) -> Any:
            return self._returned(index, at, start, states, kept)

        return self._answered(answer, run, start, len(states))

    def _returned(
        self, index: int, at: Tensor, start: int, states: Tensor, kept: EarlierOutputs
    ) -> Any:
        """Return the output of a stand-in; a block that is still to come returns its input."""
        if index < self._index:
            store = self.again.get(index)
            found = store.read(start, start + len(states)).to(states) if store else states
            at = self.layout.unpacked(found)
        return self._standins[index].wrapped(at, kept.beside)

    def _answer(self, index: int, states: Tensor, call: Call) -> Any:
        return self._of_thread.answer(index, states, call)

    def _answered(self, answer: Callable[..., Any], run: Run, start: int, count: int) -> Any:
        ids = self._ids[start : start + count]
        with (
            self._answering(answer),
            self._at(start),
            torch.autocast(ids.device.type, enabled=False),
        ):
            return run(ids)

    def _at(self, row: int) -> AbstractContextManager[None]:
        return nullcontext() if self._given is None else self._given.at(row)

    @contextmanager
    def _answering(self, answer: Callable[..., Any]) -> Iterator[None]:
        self._of_thread.answer = answer
        try:
            yield
        finally:
            del self._of_thread.answer

    def _of_rows(self, start: int, count: int, device: torch.device) -> EarlierOutputs:
        """Return the recorded values of several rows, joined."""
        found = [self._kept.get(row, EarlierOutputs()) for row in range(start, start + count)]
        return EarlierOutputs(*tree_map(partial(self._leaves.joined, device), *map(tuple, found)))

    def _probe(self) -> None:
        """Find the blocks whose states are read again after the next block."""
        ids = self._ids[:1] if self.alone else self._ids[:1, :PROBED]
        generator = torch.Generator(ids.device).manual_seed(0)
        shape = (len(self._standins), 1, ids.shape[1], self.layout.width)
        outputs = torch.randn(shape, generator=generator, device=ids.device)
        plain = self._probed(outputs, ids)
        for index in range(len(self._standins) - 1):
            changed = outputs.clone()
            changed[index] = -outputs[index]
            later = zip(plain[index + 2 :], self._probed(changed, ids)[index + 2 :], strict=True)
            if not all(same(one, other) for one, other in later):
                self.again[index] = None

    def _probed(self, outputs: Tensor, ids: Tensor) -> list[Any]:
        """Return the arguments of every block and the model's output, given the packed states that blocks return."""
        reached: list[Any] = []

        def answer(index: int, at: Tensor, call: Call) -> Any:
            reached.append((at, tuple(call)))
            return self._standins[index].wrapped(self.layout.unpacked(outputs[index]).to(at))

        with self._answering(answer), self._at(0):
            final = self._run(ids)
        return [*reached, final]


def same(first: Any, second: Any) -> bool:
    """Return whether two structures have as many leaves, and equal tensors, leaf by leaf."""
    leaves, others = tree_leaves(first), tree_leaves(second)
    return len(leaves) == len(others) and all(
        isinstance(a, Tensor) is isinstance(b, Tensor)
        and (not isinstance(a, Tensor) or torch.equal(a, b))
        for a, b in zip(leaves, others, strict=True)
    )


def _row(row: int, count: int, value: Any) -> Any:
    """Return one row of a value that has ``count`` rows."""
    return value[row : row + 1] if isinstance(value, Tensor) and count > 1 else value
