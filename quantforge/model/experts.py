"""The experts of one block: their weights come and go one expert at a time, and what each reads is observed.

A layer may have hundreds of experts; all of them in float32 would be the largest thing of a run. So a block passes its
rows in three steps. It runs as far as the experts, whose input is kept with its routing (`RoutedTokens`); the experts
are filled from the checkpoint one after the other, each runs its own tokens, and adds what it returns to the outputs;
then the block runs once more, with these outputs in the place of the experts. transformers' own code computes an
expert: the module is given the weights of one, and tokens that are all sent to it. What the matrices read is seen by
`StackInputs`, so that no family needs code here. The module is called in one of two forms
(`quantforge.model.expert_calls`); a call of another kind is refused.

The Hessian of an expert is the mean over its tokens, each weighted by the square of its router weight, because that is
what an error of the expert's output is multiplied with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantforge.architectures import LayerKind, Place
from quantforge.errors import InputError, RefusedError
from quantforge.model.accumulator import Accumulator
from quantforge.model.expert_calls import (
    RoutedCall,
    arguments_of_one,
    bound,
    routed_call,
    takes_spread,
)
from quantforge.model.hidden_states import TokenStates
from quantforge.model.skeleton import as_refusals
from quantforge.model.statistics import EXPERT_TOKENS
from quantforge.model.weight_loading import parameter
from quantforge.numerics.function_mode import Function, FunctionMode
from quantforge.numerics.products import cutting
from quantforge.numerics.threads import one_thread, side_by_side
from quantforge.numerics.values import finite

TOKENS = 256  # that one thread runs at a time
# Such runs that pass together, whatever the number of threads: sums are made in their order.
TOGETHER = EXPERT_TOKENS // TOKENS
Load = Callable[[int, Mapping[str, Place]], dict[str, Tensor]]
# Takes the first calibration row, hidden states [tokens, width] and weights of the router [tokens, k].
Outputs = Callable[[int, Tensor, Tensor], Tensor]


class ExpertPass(NamedTuple):
    """Outputs ``[tokens, hidden]`` of an expert, and inputs ``[tokens, in_features]`` of its stacks, by name."""

    outputs: Tensor
    inputs: Mapping[str, Tensor]


class Experts:
    """The experts of one block.

    Attributes:
        path: name of the module of the experts, relative to the block; ``name`` the canonical one.
        numbers: of the experts.
        stacks: the parameters that hold matrices, by their names relative to the block, in computing order.
        tokens: that were collected, None before.
    """

    def __init__(
        self, name: str, block: nn.Module, kind: LayerKind, load: Load, *, bfloat16: bool = False
    ) -> None:
        """Prepare; nothing is read.

        Args:
            name: canonical name of the block.
            block: its module; the experts in it hold no weights.
            kind: what the block consists of.
            load: reads the parameters of one expert, ``[1, ...]`` each, by their names relative to the block, given its
                number and the places of its linears.
            bfloat16: matrix products take their operands in that type.
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
        self._load, self._bfloat16 = load, bfloat16
        self._held: dict[int, dict[str, Tensor]] = {}
        self._row = threading.local()
        self.tokens: RoutedTokens | None = None

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

    def release(self, number: int) -> None:
        """Free the weights of an expert; they are read again when needed."""
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

    def at(self, row: int) -> None:
        """Note which calibration row this thread runs from now on."""
        self._row.first = row

    @contextmanager
    def collecting(self, tokens: RoutedTokens) -> Iterator[None]:
        """Collect the tokens that reach the experts while the block runs.

        What they return is not known yet, so that NaN stands for it.
        """
        self.forget_tokens()
        self.tokens = tokens

        def keep(*args: Any, **kwargs: Any) -> Tensor:
            call = self._call(args, kwargs)
            self._check(call.states, tokens)
            tokens.keep(self._row.first, call.states, call.index, call.weights)
            return call.returned(torch.full_like(call.states, torch.nan))

        with self._standing_in(keep):
            yield

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Replace the experts' outputs by NaN."""
        with self.computing(lambda _, states, __: torch.full_like(states, torch.nan)):
            yield

    @contextmanager
    def returning(self) -> Iterator[None]:
        """Replace the experts by their accumulated outputs while the block runs."""

        def outputs(row: int, states: Tensor, _: Tensor) -> Tensor:
            assert self.tokens is not None
            return self.tokens.outputs(row, len(states)).to(states)

        with self.computing(outputs):
            yield

    @contextmanager
    def computing(self, outputs: Outputs) -> Iterator[None]:
        """Replace the experts by a function while the block runs."""

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            call = self._call(args, kwargs)
            return call.returned(outputs(self._row.first, call.states, call.weights))

        with self._standing_in(forward):
            yield

    def close(self) -> None:
        """Release the tokens and all weights."""
        self._held.clear()
        self.forget_tokens()

    def forget_tokens(self) -> None:
        """Release the tokens."""
        if self.tokens is not None:
            self.tokens.close()
        self.tokens = None

    def run(
        self,
        number: int,
        tokens: Tensor,
        weights: Tensor | None,
        totals: Mapping[str, Accumulator],
        *,
        add: bool = False,
    ) -> float:
        """Run tokens through one expert.

        Args:
            number: of the expert.
            tokens: ascending numbers of tokens, see `RoutedTokens`.
            weights: ``[tokens]``, of the router; None counts all of them alike, and adds no outputs.
            totals: sums of what its stacks read, by parameter; they are added to.
            add: whether to add what it returns, times the weights, to the outputs.

        Returns:
            The sum over the tokens of the norm of what is added to the outputs; 0 where nothing is.

        Raises:
            InputError: what one of its matrices reads is not finite.
            RefusedError: a matrix is in none of the products that `StackInputs` watches, or the module does not run.
        """
        assert self.tokens is not None
        norms = 0.0
        if not len(tokens):
            return norms
        with one_thread(), self.filled(number):
            for start in range(0, len(tokens), TOKENS * TOGETHER):
                parts = torch.split(tokens[start : start + TOKENS * TOGETHER], TOKENS)
                passed = side_by_side(partial(self._pass, number), parts)
                mine = None
                if weights is not None:
                    mine = torch.split(weights[start : start + TOKENS * TOGETHER], TOKENS)
                jobs = []
                for parameter_name, total in totals.items():
                    seen = [one.inputs[parameter_name] for one in passed]
                    near = None if mine is None else [one.to(seen[0].device) for one in mine]
                    jobs += total.adding(seen, near)
                side_by_side(lambda job: job(), jobs)
                if add:
                    assert mine is not None
                    for part, one, weight in zip(parts, passed, mine, strict=True):
                        outputs = one.outputs.cpu() * weight[:, None]
                        norms += float(torch.linalg.vector_norm(outputs, dim=1).double().sum())
                        self.tokens.add(part, outputs)
        return norms

    def inputs(self, number: int, tokens: Tensor) -> Mapping[str, Tensor]:
        """Return what the stacks of an expert read of a few tokens, ``[tokens, in_features]``; errors as `run`."""
        with self.filled(number):
            return self._pass(number, tokens).inputs

    def sample(self, place: Place, rows: int) -> Tensor:
        """Return the input ``[tokens, in_features]`` of an expert's matrix for its first tokens.

        These are as many as ``rows`` calibration rows have; an expert without tokens takes those of all rows.
        """
        assert self.tokens is not None
        tokens, _ = self.tokens.of(place.expert)
        if not len(tokens):
            tokens = torch.arange(self.tokens.count)
        return self.inputs(place.expert, tokens[: self.tokens.in_rows(rows)])[place.stack.parameter]

    def run_all(self) -> list[float]:
        """Let every expert run its own tokens, and add up what they return.

        Returns, for each expert in order, the mean norm of what it adds for a token of its own; 0 without tokens.
        """
        assert self.tokens is not None
        self.tokens.begin_outputs()
        norms = []
        for number in self.numbers:
            held = number in self._held
            tokens, weights = self.tokens.of(number)
            norms.append(self.run(number, tokens, weights, {}, add=True) / max(len(tokens), 1))
            if not held:
                self.release(number)
        return norms

    def watched(self, number: int, states: Tensor) -> tuple[Tensor, StackInputs]:
        """Run hidden states ``[tokens, width]`` through an expert that is filled; errors as `run`.

        Returns its outputs ``[tokens, width]``, and the inputs and products of its stacks.
        """
        stacks = self._held[number]
        watcher = StackInputs(
            {
                place.stack.parameter: stacks[place.stack.parameter]
                for place in self._places[number].values()
            }
        )
        autocast = torch.autocast(states.device.type, torch.bfloat16, enabled=self._bfloat16)
        with autocast, watcher, as_refusals("an expert"):
            outputs: Tensor = self._module(*arguments_of_one(self._module, states))
        for place in self._places[number].values():
            name = place.stack.parameter
            if name not in watcher.found:
                raise RefusedError(
                    f"{self.name}: what {name} reads of expert {number} is not seen in the products that it computes",
                    "--method rtn --calibration none, or --ignore '*experts*'",
                    tensor=self.name,
                )
            if not finite(watcher.found[name]):
                raise InputError(
                    f"{self.name}.{number}: what {name} reads is not finite",
                    "the expert overflows on this text; `quantforge inspect` checks weights",
                    tensor=f"{self.name}.{number}",
                )
        return outputs, watcher

    @contextmanager
    def _standing_in(self, forward: Callable[..., Tensor]) -> Iterator[None]:
        self._module.forward = forward
        try:
            yield
        finally:
            del self._module.forward

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RoutedCall:
        """Return what reaches the experts in a call of their module.

        Raises:
            RefusedError: it is called otherwise.
        """
        call = routed_call(self._module, args, kwargs, len(self.numbers))
        if call is not None:
            return call
        found = bound(self._module, args, kwargs)
        shapes = [list(one.shape) if isinstance(one, Tensor) else one for one in found]
        expected = "hidden states, the experts of each token and their weights"
        if takes_spread(self._module):
            expected = f"tokens that are spread over {len(self.numbers)} experts, each sent to one of them,"
        raise RefusedError(
            f"{self.name}: called with {shapes}, where {expected} are expected; its experts cannot be calibrated",
            "--method rtn --calibration none",
            tensor=self.name,
        )

    def _check(self, states: Tensor, tokens: RoutedTokens) -> None:
        if not finite(states):
            row = tokens.row_of(tokens.in_rows(self._row.first))
            raise InputError(
                f"{self.name}: what reaches the experts is not finite in calibration row {row}",
                "the model overflows on this text, or a norm weight is damaged; `quantforge inspect` checks weights",
                tensor=self.name,
            )

    def _pass(self, number: int, tokens: Tensor) -> ExpertPass:
        assert self.tokens is not None
        states = self.tokens.states(tokens).to(self.device(number))
        with cutting():
            outputs, watcher = self.watched(number, states)
        return ExpertPass(outputs.float(), watcher.found)


class RoutedTokens:
    """The input of a mixture of experts, kept once for all calibration rows with its routing, and room for the output.

    Tokens are numbered over all rows: ``row * length + position``. Outputs are added up here as well, expert by expert,
    so that no more than one expert has to be in memory at a time; a token's own sum is made in the order of the
    experts, as transformers does.

    Args:
        shape: how many calibration rows there are, and how long they are.
        store: makes room for states ``[rows, length, width]``.
        numbers: of the rows in the calibration text, where they are others than these.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        store: Callable[[int], TokenStates],
        numbers: Sequence[int] = (),
    ) -> None:
        (self._rows, self._length), self._make = shape, store
        self._numbers = numbers or range(self._rows)
        self._lock = threading.Lock()
        self._stores: list[TokenStates] = []
        self._width = 0
        self._index = torch.empty(0, dtype=torch.int32)
        self._weights = torch.empty(0)
        self._outputs: TokenStates | None = None

    @property
    def count(self) -> int:
        """Return the number of all tokens."""
        return self._rows * self._length

    @property
    def chosen(self) -> int:
        """Return how many experts a token is sent to."""
        return self._index.shape[1]

    def row_of(self, token: int) -> int:
        """Return the calibration row of a token."""
        return self._numbers[token // self._length]

    def in_rows(self, rows: int) -> int:
        """Return how many tokens so many rows have."""
        return rows * self._length

    def keep(self, row: int, states: Tensor, index: Tensor, weights: Tensor) -> None:
        """Keep what reaches the experts of the rows from ``row`` on; safe on several threads.

        Args:
            row: the first.
            states: ``[tokens, width]``.
            index: ``[tokens, k]``, the experts of each token.
            weights: ``[tokens, k]``, what the output of each is multiplied with.
        """
        with self._lock:
            if not self._stores:
                self._width = states.shape[-1]
                self._stores.append(self._make(self._width))
                self._index = torch.empty(self.count, index.shape[-1], dtype=torch.int32)
                self._weights = torch.empty(self.count, index.shape[-1])
        self.put(self._stores[0], row, states)
        run = slice(row * self._length, row * self._length + len(states))
        self._index[run], self._weights[run] = index.int(), weights.float()

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the ascending numbers of the tokens that are sent to an expert, and their weights ``[tokens]``."""
        sent = self._index == expert
        tokens = sent.any(1).nonzero().flatten()
        return tokens, (self._weights * sent)[tokens].sum(1)

    def counts(self, experts: int) -> list[int]:
        """Return how many tokens each expert has."""
        known = self._index[self._index < experts]
        counts: list[int] = known.long().bincount(minlength=experts).tolist()
        return counts

    def states(self, tokens: Tensor) -> Tensor:
        """Return the input ``[tokens, width]`` of some tokens, given their ascending numbers."""
        return self._stores[0].gather(tokens)

    def places(self, expert: int, tokens: Tensor) -> Tensor:
        """Return where the weights of tokens ``[tokens, k]`` are those of an expert, as ones and zeros."""
        return (self._index[tokens] == expert).float()

    def begin_outputs(self) -> None:
        """Make room for outputs, which are zeros."""
        if self._outputs is None:
            self._outputs = self.zeros()
        else:
            self._clear(self._outputs)

    def zeros(self) -> TokenStates:
        """Return room for ``[tokens, width]`` of all tokens, as wide as the input, filled with zeros; until `close`."""
        store = self._make(self._width)
        self._stores.append(store)
        self._clear(store)
        return store

    def _clear(self, store: TokenStates) -> None:
        for row in range(self._rows):
            store.write(row, torch.zeros(1, self._length, self._width))

    def add(self, tokens: Tensor, values: Tensor) -> None:
        """Add ``[tokens, width]`` to the outputs of some tokens, given their ascending numbers."""
        assert self._outputs is not None
        self._outputs.scatter(tokens, self._outputs.gather(tokens) + values.cpu())

    def outputs(self, row: int, tokens: int) -> Tensor:
        """Return the outputs ``[tokens, width]`` from the first token of a row on."""
        assert self._outputs is not None
        return self.run(self._outputs, row, tokens)

    def run(self, store: TokenStates, row: int, tokens: int) -> Tensor:
        """Return ``[tokens, width]`` of a store from the first token of a row on."""
        return store.read(row, row + tokens // self._length).flatten(0, 1)

    def put(self, store: TokenStates, row: int, values: Tensor) -> None:
        """Write ``[tokens, width]`` to a store from the first token of a row on."""
        store.write(row, values.view(-1, self._length, values.shape[-1]))

    def close(self) -> None:
        """Release memory or disk."""
        for store in self._stores:
            store.close()


# Products, each with the places of what is read and of the matrix among its arguments.
_PRODUCTS: Mapping[Callable[..., Any], tuple[int, int]] = {
    functional.linear: (0, 1),
    torch.matmul: (0, 1),
    Tensor.matmul: (0, 1),
    Tensor.__matmul__: (0, 1),
    torch.mm: (0, 1),
    Tensor.mm: (0, 1),
    torch.bmm: (0, 1),
    Tensor.bmm: (0, 1),
    torch.addmm: (1, 2),
    Tensor.addmm: (1, 2),
}


class StackInputs(FunctionMode):
    """Watcher of the products with some parameters, on the thread that enters it.

    transformers computes the experts of a layer as products with views of stacked parameters; no linear of their own
    reads anything, so that hooks see nothing, and what lies between the products differs from family to family: a gate
    or none, rows that alternate, clamps, biases, a norm. But a view shares the memory of its parameter. So the products
    themselves are watched: each that has a view of a known parameter as its matrix has, on the other side, what that
    matrix reads.

    Args:
        stacks: the parameters, by name.

    Attributes:
        found: what was multiplied with each of them, ``[tokens, in_features]`` in float32, by name.
        products: what came of it, by name, for gradients.
    """

    def __init__(self, stacks: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {stack.untyped_storage().data_ptr(): name for name, stack in stacks.items()}
        self.found: dict[str, Tensor] = {}
        self.products: dict[str, Tensor] = {}

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record a product with a watched matrix, and compute it."""
        where = _PRODUCTS.get(function)
        if where is not None and len(args) > where[1]:
            name = self._names.get(args[where[1]].untyped_storage().data_ptr())
            if name is not None:
                self.found[name] = args[where[0]].detach().flatten(0, -2).float()
                self.products[name] = function(*args, **kwargs)
                return self.products[name]
        return function(*args, **kwargs)
