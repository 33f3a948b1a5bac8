"""The experts of one block: load them one at a time, run their tokens and record what each matrix reads.

A layer may have hundreds of experts, and all of them in float32 would be the largest allocation of a run. A block
therefore passes its rows in three steps. It runs up to the experts, whose input is stored together with its routing
(`RoutedTokens`). The experts are loaded from the checkpoint one after another; each runs its own tokens and adds its
outputs to the sums. Then the block runs once more, with these sums in place of the experts. transformers' own code
computes an expert: the module holds the weights of one expert and gets tokens that are all routed to it.
`StackInputRecorder` records what the matrices read, so that no family needs code here. The module is called in one of
two forms (`quantforge.model.expert_calls`); any other call is refused.

The Hessian of an expert is the mean over its tokens, each weighted by the square of its router weight, because an error
of the expert's output is multiplied by that weight.
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

from quantforge.architectures import LayerKind, StackSlice
from quantforge.errors import InputError, RefusedError
from quantforge.model.accumulator import Accumulator
from quantforge.model.expert_calls import (
    RoutedCall,
    bound_arguments,
    parse_expert_call,
    single_expert_arguments,
    takes_repeated_tokens,
)
from quantforge.model.hidden_states import TokenStates
from quantforge.model.skeleton import errors_as_refusals
from quantforge.model.statistics import EXPERT_BATCH_TOKENS
from quantforge.model.weight_loading import parameter
from quantforge.numerics.function_mode import Function, FunctionMode
from quantforge.numerics.products import tiled_products
from quantforge.numerics.threads import one_thread, run_parallel
from quantforge.numerics.values import all_finite

TOKENS_PER_RUN = 256  # tokens that one thread runs at a time
# Runs that pass together, independent of the number of threads: sums are made in this order.
RUNS_TOGETHER = EXPERT_BATCH_TOKENS // TOKENS_PER_RUN
LoadExpert = Callable[[int, Mapping[str, StackSlice]], dict[str, Tensor]]
# Takes the first calibration row, hidden states [tokens, width] and weights of the router [tokens, k].
ComputeOutputs = Callable[[int, Tensor, Tensor], Tensor]


class ExpertOutputs(NamedTuple):
    """Outputs ``[tokens, hidden]`` of an expert, and the inputs ``[tokens, in_features]`` of its stacks by name."""

    outputs: Tensor
    inputs: Mapping[str, Tensor]


class Experts:
    """The experts of one block.

    Attributes:
        path: name of the module of experts, relative to the block.
        name: its canonical name.
        numbers: indices of the experts.
        stacks: stacked parameters that hold matrices, by name relative to the block, in computing order.
        tokens: the tokens collected for the experts; None before they are collected.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        kind: LayerKind,
        load: LoadExpert,
        *,
        bfloat16: bool = False,
    ) -> None:
        """Prepare the experts of a block without reading any weights.

        Args:
            name: canonical name of the block.
            block: its module, in which the experts hold no weights.
            kind: the declaration of this kind of layer.
            load: reads the parameters of one expert (``[1, ...]`` each, by name relative to the block), given its index
                and the positions of its linears in the stacks.
            bfloat16: compute matrix products in bfloat16.
        """
        self.stacks = tuple(stack.parameter for stack in kind.stacks)
        self.path = self.stacks[0].rpartition(".")[0]
        self.name = f"{name}.{self.path}"
        self._module = block.get_submodule(self.path)
        self._empty = dict(self._module.named_parameters(recurse=False))
        self._linears: dict[int, dict[str, StackSlice]] = {}
        for linear, stack_slice in kind.expert_slices().items():
            self._linears.setdefault(stack_slice.expert, {})[linear] = stack_slice
        self.numbers = tuple(self._linears)
        self._load, self._bfloat16 = load, bfloat16
        self._loaded: dict[int, dict[str, Tensor]] = {}
        self._thread_row = threading.local()
        self.tokens: RoutedTokens | None = None

    def weight(self, stack_slice: StackSlice) -> Tensor:
        """Return an expert matrix ``[out_features, in_features]`` as a view.

        The expert stays loaded until `release`.
        """
        return stack_slice.stack.matrix(
            self.load_expert(stack_slice.expert)[stack_slice.stack.parameter],
            stack_slice.linear_index,
            0,
        )

    def linears_of(self, number: int) -> Mapping[str, StackSlice]:
        """Return the linears of an expert by name relative to the block, in computing order, with their positions."""
        return self._linears[number]

    def in_features(self, number: int, stack: str) -> int:
        """Return the number of input features of the matrices in a stack."""
        linears_of = self._linears[number].values()
        return self.weight(
            next(result for result in linears_of if result.stack.parameter == stack)
        ).shape[1]

    def load_expert(self, number: int) -> dict[str, Tensor]:
        """Return the parameters of an expert, ``[1, ...]`` each, loading them if necessary."""
        if number not in self._loaded:
            self._loaded[number] = self._load(number, self._linears[number])
        return self._loaded[number]

    def device(self, number: int) -> torch.device:
        """Return the device of an expert's weights; the expert stays loaded until `release`."""
        return next(iter(self.load_expert(number).values())).device

    def release(self, number: int) -> None:
        """Free the weights of an expert; they are read again when needed."""
        self._loaded.pop(number, None)

    def replace_loader(self, load: LoadExpert) -> LoadExpert:
        """Read experts with ``load`` from now on and drop all loaded experts; return the previous loader."""
        self._loaded.clear()
        previous, self._load = self._load, load
        return previous

    @contextmanager
    def filled(self, number: int) -> Iterator[None]:
        """Let the module hold one expert, as its expert 0, while the context is active."""
        values = self.load_expert(number)
        for name in self._empty:
            setattr(self._module, name, parameter(values[f"{self.path}.{name}"]))
        try:
            yield
        finally:
            for name, value in self._empty.items():
                setattr(self._module, name, value)

    def set_row(self, row: int) -> None:
        """Set the calibration row that this thread runs from now on."""
        self._thread_row.first = row

    @contextmanager
    def collecting_tokens(self, tokens: RoutedTokens) -> Iterator[None]:
        """Collect the tokens that reach the experts while the block runs.

        Their outputs are not known yet, so the module returns NaN in their place.
        """
        self.release_tokens()
        self.tokens = tokens

        def collect(*args: Any, **kwargs: Any) -> Tensor:
            call = self._parse_call(args, kwargs)
            self._check_finite(call.states, tokens)
            tokens.record(self._thread_row.first, call.states, call.experts, call.weights)
            return call.module_output(torch.full_like(call.states, torch.nan))

        with self._forward_replaced(collect):
            yield

    @contextmanager
    def returning_nan(self) -> Iterator[None]:
        """Replace the outputs of the experts by NaN while the block runs."""
        with self.outputs_replaced(lambda _, states, __: torch.full_like(states, torch.nan)):
            yield

    @contextmanager
    def returning_sums(self) -> Iterator[None]:
        """Replace the outputs of the experts by their accumulated sums while the block runs."""

        def outputs(row: int, states: Tensor, _: Tensor) -> Tensor:
            assert self.tokens is not None
            return self.tokens.outputs(row, len(states)).to(states)

        with self.outputs_replaced(outputs):
            yield

    @contextmanager
    def outputs_replaced(self, outputs: ComputeOutputs) -> Iterator[None]:
        """Compute the outputs of the experts with a function while the block runs."""

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            call = self._parse_call(args, kwargs)
            return call.module_output(outputs(self._thread_row.first, call.states, call.weights))

        with self._forward_replaced(forward):
            yield

    def close(self) -> None:
        """Release the collected tokens and all weights."""
        self._loaded.clear()
        self.release_tokens()

    def release_tokens(self) -> None:
        """Release the collected tokens."""
        if self.tokens is not None:
            self.tokens.close()
        self.tokens = None

    def run(
        self,
        number: int,
        tokens: Tensor,
        weights: Tensor | None,
        accumulators: Mapping[str, Accumulator],
        *,
        add: bool = False,
    ) -> float:
        """Run tokens through one expert.

        Args:
            number: index of the expert.
            tokens: ascending token numbers, see `RoutedTokens`.
            weights: ``[tokens]``, router weights; None weighs all tokens equally and adds no outputs.
            accumulators: statistics of the inputs of its matrices, by stacked parameter; they are updated.
            add: add the outputs, multiplied by the weights, to the sums of the mixture.

        Returns:
            The sum over the tokens of the norm of what is added to the outputs; 0 if nothing is added.

        Raises:
            InputError: the input of one of its matrices is not finite.
            RefusedError: a matrix is in none of the products that `StackInputRecorder` observes, or the module does not
                run.
        """
        assert self.tokens is not None
        norm_sum = 0.0
        if not len(tokens):
            return norm_sum
        with one_thread(), self.filled(number):
            for start in range(0, len(tokens), TOKENS_PER_RUN * RUNS_TOGETHER):
                token_runs = torch.split(
                    tokens[start : start + TOKENS_PER_RUN * RUNS_TOGETHER], TOKENS_PER_RUN
                )
                results = run_parallel(partial(self._run_tokens, number), token_runs)
                weight_runs = None
                if weights is not None:
                    weight_runs = torch.split(
                        weights[start : start + TOKENS_PER_RUN * RUNS_TOGETHER], TOKENS_PER_RUN
                    )
                jobs = []
                for parameter_name, accumulator in accumulators.items():
                    inputs = [result.inputs[parameter_name] for result in results]
                    device_weights = (
                        None
                        if weight_runs is None
                        else [result.to(inputs[0].device) for result in weight_runs]
                    )
                    jobs += accumulator.addition_jobs(inputs, device_weights)
                run_parallel(lambda job: job(), jobs)
                if add:
                    assert weight_runs is not None
                    for run_tokens, result, weight in zip(
                        token_runs, results, weight_runs, strict=True
                    ):
                        outputs = result.outputs.cpu() * weight[:, None]
                        norm_sum += float(torch.linalg.vector_norm(outputs, dim=1).double().sum())
                        self.tokens.add_outputs(run_tokens, outputs)
        return norm_sum

    def inputs(self, number: int, tokens: Tensor) -> Mapping[str, Tensor]:
        """Return the inputs of an expert's stacks, ``[tokens, in_features]``, for a few tokens; errors as `run`."""
        with self.filled(number):
            return self._run_tokens(number, tokens).inputs

    def sample(self, stack_slice: StackSlice, rows: int) -> Tensor:
        """Return the input ``[tokens, in_features]`` of an expert matrix for the first tokens routed to it.

        The number of tokens is that of ``rows`` calibration rows; for an expert without tokens, those of all rows are
        used.
        """
        assert self.tokens is not None
        tokens, _ = self.tokens.routed_to(stack_slice.expert)
        if not len(tokens):
            tokens = torch.arange(self.tokens.count)
        return self.inputs(stack_slice.expert, tokens[: self.tokens.tokens_in_rows(rows)])[
            stack_slice.stack.parameter
        ]

    def run_all(self) -> list[float]:
        """Run every expert on its own tokens and sum the outputs.

        Returns:
            For each expert in order, the mean norm of what it adds for one of its tokens; 0 without tokens.
        """
        assert self.tokens is not None
        self.tokens.begin_outputs()
        mean_norms = []
        for number in self.numbers:
            was_loaded = number in self._loaded
            tokens, weights = self.tokens.routed_to(number)
            mean_norms.append(self.run(number, tokens, weights, {}, add=True) / max(len(tokens), 1))
            if not was_loaded:
                self.release(number)
        return mean_norms

    def run_recorded(self, number: int, states: Tensor) -> tuple[Tensor, StackInputRecorder]:
        """Run hidden states ``[tokens, width]`` through a loaded expert; errors as `run`.

        Returns:
            The outputs ``[tokens, width]``, and the recorder with inputs and products of its stacks.
        """
        stacks = self._loaded[number]
        recorder = StackInputRecorder(
            {
                stack_slice.stack.parameter: stacks[stack_slice.stack.parameter]
                for stack_slice in self._linears[number].values()
            }
        )
        autocast = torch.autocast(states.device.type, torch.bfloat16, enabled=self._bfloat16)
        with autocast, recorder, errors_as_refusals("an expert"):
            outputs: Tensor = self._module(*single_expert_arguments(self._module, states))
        for stack_slice in self._linears[number].values():
            name = stack_slice.stack.parameter
            if name not in recorder.inputs:
                raise RefusedError(
                    f"{self.name}: what {name} reads of expert {number} is not seen in the products that it computes",
                    "--method rtn --calibration none, or --ignore '*experts*'",
                    tensor=self.name,
                )
            if not all_finite(recorder.inputs[name]):
                raise InputError(
                    f"{self.name}.{number}: what {name} reads is not finite",
                    "the expert overflows on this text; `quantforge inspect` checks weights",
                    tensor=f"{self.name}.{number}",
                )
        return outputs, recorder

    @contextmanager
    def _forward_replaced(self, forward: Callable[..., Tensor]) -> Iterator[None]:
        self._module.forward = forward
        try:
            yield
        finally:
            del self._module.forward

    def _parse_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RoutedCall:
        """Return the tokens and their routing in a call of the module of experts.

        Raises:
            RefusedError: the call has an unknown form.
        """
        call = parse_expert_call(self._module, args, kwargs, len(self.numbers))
        if call is not None:
            return call
        inputs = bound_arguments(self._module, args, kwargs)
        shapes = [list(result.shape) if isinstance(result, Tensor) else result for result in inputs]
        expected = "hidden states, the experts of each token and their weights"
        if takes_repeated_tokens(self._module):
            expected = f"tokens that are spread over {len(self.numbers)} experts, each sent to one of them,"
        raise RefusedError(
            f"{self.name}: called with {shapes}, where {expected} are expected; its experts cannot be calibrated",
            "--method rtn --calibration none",
            tensor=self.name,
        )

    def _check_finite(self, states: Tensor, tokens: RoutedTokens) -> None:
        if not all_finite(states):
            row = tokens.row_of(tokens.tokens_in_rows(self._thread_row.first))
            raise InputError(
                f"{self.name}: what reaches the experts is not finite in calibration row {row}",
                "the model overflows on this text, or a norm weight is damaged; `quantforge inspect` checks weights",
                tensor=self.name,
            )

    def _run_tokens(self, number: int, tokens: Tensor) -> ExpertOutputs:
        assert self.tokens is not None
        states = self.tokens.states(tokens).to(self.device(number))
        with tiled_products():
            outputs, recorder = self.run_recorded(number, states)
        return ExpertOutputs(outputs.float(), recorder.inputs)


class RoutedTokens:
    """The input of a mixture of experts for all calibration rows, with its routing and the sums of the outputs.

    Tokens are numbered over all rows: ``row * length + position``. Outputs are summed here expert by expert, so that
        only
    one expert has to be in memory at a time; the sum of each token is made in the order of the experts, as in
    transformers.

    Args:
        shape: number of calibration rows, and tokens per row.
        store: allocates a store for states ``[rows, length, width]`` of a given width.
        row_numbers: numbers of the rows in the whole calibration text; the default is 0, 1, ...
    """

    def __init__(
        self,
        shape: tuple[int, int],
        store: Callable[[int], TokenStates],
        row_numbers: Sequence[int] = (),
    ) -> None:
        (self._rows, self._length), self._make_store = shape, store
        self._row_numbers = row_numbers or range(self._rows)
        self._lock = threading.Lock()
        self._stores: list[TokenStates] = []
        self._width = 0
        self._experts = torch.empty(0, dtype=torch.int32)
        self._weights = torch.empty(0)
        self._outputs: TokenStates | None = None

    @property
    def count(self) -> int:
        """Return the number of tokens in all rows."""
        return self._rows * self._length

    @property
    def experts_per_token(self) -> int:
        """Return the number of experts that a token is routed to."""
        return self._experts.shape[1]

    def row_of(self, token: int) -> int:
        """Return the calibration row of a token."""
        return self._row_numbers[token // self._length]

    def tokens_in_rows(self, rows: int) -> int:
        """Return the number of tokens in this many rows."""
        return rows * self._length

    def record(self, row: int, states: Tensor, experts: Tensor, weights: Tensor) -> None:
        """Store the input of the experts for the rows starting at ``row``; thread-safe.

        Args:
            row: index of the first row.
            states: ``[tokens, width]``.
            experts: ``[tokens, k]``, the expert indices of each token.
            weights: ``[tokens, k]``, the factors of the experts' outputs.
        """
        with self._lock:
            if not self._stores:
                self._width = states.shape[-1]
                self._stores.append(self._make_store(self._width))
                self._experts = torch.empty(self.count, experts.shape[-1], dtype=torch.int32)
                self._weights = torch.empty(self.count, experts.shape[-1])
        self.write_tokens(self._stores[0], row, states)
        read_tokens = slice(row * self._length, row * self._length + len(states))
        self._experts[read_tokens], self._weights[read_tokens] = experts.int(), weights.float()

    def routed_to(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the ascending numbers of the tokens routed to an expert, and their weights ``[tokens]``."""
        is_routed = self._experts == expert
        tokens = is_routed.any(1).nonzero().flatten()
        return tokens, (self._weights * is_routed)[tokens].sum(1)

    def counts_by_expert(self, experts: int) -> list[int]:
        """Return the number of tokens of each expert."""
        valid = self._experts[self._experts < experts]
        counts_by_expert: list[int] = valid.long().bincount(minlength=experts).tolist()
        return counts_by_expert

    def states(self, tokens: Tensor) -> Tensor:
        """Return the input ``[tokens, width]`` of tokens, given their ascending numbers."""
        return self._stores[0].gather(tokens)

    def places(self, expert: int, tokens: Tensor) -> Tensor:
        """Return where the weights of tokens ``[tokens, k]`` are those of an expert, as ones and zeros."""
        return (self._experts[tokens] == expert).float()

    def begin_outputs(self) -> None:
        """Make room for outputs, which are zeros."""
        if self._outputs is None:
            self._outputs = self.make_zeros()
        else:
            self._clear(self._outputs)

    def make_zeros(self) -> TokenStates:
        """Return a new store of zeros for ``[tokens, width]`` of all tokens, as wide as the input.

        Closed by `close`.
        """
        store = self._make_store(self._width)
        self._stores.append(store)
        self._clear(store)
        return store

    def _clear(self, store: TokenStates) -> None:
        for row in range(self._rows):
            store.write(row, torch.zeros(1, self._length, self._width))

    def add_outputs(self, tokens: Tensor, values: Tensor) -> None:
        """Add ``[tokens, width]`` to the outputs of some tokens, given their ascending numbers."""
        assert self._outputs is not None
        self._outputs.scatter(tokens, self._outputs.gather(tokens) + values.cpu())

    def outputs(self, row: int, tokens: int) -> Tensor:
        """Return the summed outputs of ``tokens`` tokens, starting at a row, as ``[tokens, width]``."""
        assert self._outputs is not None
        return self.read_tokens(self._outputs, row, tokens)

    def read_tokens(self, store: TokenStates, row: int, tokens: int) -> Tensor:
        """Read ``[tokens, width]`` from a store, starting at the first token of a row."""
        return store.read(row, row + tokens // self._length).flatten(0, 1)

    def write_tokens(self, store: TokenStates, row: int, values: Tensor) -> None:
        """Write ``[tokens, width]`` to a store, starting at the first token of a row."""
        store.write(row, values.view(-1, self._length, values.shape[-1]))

    def close(self) -> None:
        """Release all stores."""
        for store in self._stores:
            store.close()


# Matrix products, each with the argument positions of the input and of the matrix.
_MATRIX_PRODUCTS: Mapping[Callable[..., Any], tuple[int, int]] = {
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


class StackInputRecorder(FunctionMode):
    """Records the inputs of products with stacked parameters, on the thread that enters it.

    transformers computes the experts of a layer as products with views of stacked parameters. No linear module reads
    anything, so that hooks see nothing, and the operations between the products differ from family to family (gates,
    alternating rows, clamps, biases, norms). But a view shares the memory of its parameter: in any product with a view
    of a known parameter, the other operand is what that matrix reads.

    Args:
        stacks: the stacked parameters, by name.

    Attributes:
        inputs: the other operand of each product, ``[tokens, in_features]`` in float32, by parameter name.
        products: the results, by parameter name, for gradients.
    """

    def __init__(self, stacks: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {stack.untyped_storage().data_ptr(): name for name, stack in stacks.items()}
        self.inputs: dict[str, Tensor] = {}
        self.products: dict[str, Tensor] = {}

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute a function; if it is a product with a known stack, record its input and result."""
        positions = _MATRIX_PRODUCTS.get(function)
        if positions is not None and len(args) > positions[1]:
            name = self._names.get(args[positions[1]].untyped_storage().data_ptr())
            if name is not None:
                self.inputs[name] = args[positions[0]].detach().flatten(0, -2).float()
                self.products[name] = function(*args, **kwargs)
                return self.products[name]
        return function(*args, **kwargs)
