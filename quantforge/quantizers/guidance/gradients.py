"""Gradients at the outputs of linears, and of the experts of a block, one expert at a time.

The square of the gradient at an output row indicates how much an error there raises the loss, for this token. Rows with
the same weight per token share a Hessian, so consecutive rows are grouped in strips, over which the squares are
averaged.

Running all experts of a layer with gradients would need the most memory of a run. So the backward pass of such a block
has three steps. First the block runs with the stored outputs of its experts, and backward as far as these: that gives
the gradients of the mixture's output. Then each expert runs on its own tokens, forward and backward, from these
gradients times the router's weight of the token. The resulting gradients of the mixture's input are summed, and the
output of an expert times the gradient is the gradient of the router's weight. Finally the whole block runs forward and
backward, with a function with these known gradients in place of the experts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantforge.errors import InputError
from quantforge.model.experts import RUNS_TOGETHER, TOKENS_PER_RUN, Experts
from quantforge.numerics.threads import one_thread, run_parallel
from quantforge.numerics.values import all_finite


@dataclass(frozen=True, slots=True, eq=False)
class OutputGradients:
    """Inputs and output gradients of one linear in one micro-batch.

    Attributes:
        name: canonical name of the linear, e.g. ``model.layers.3.mlp.up_proj``, or that of the head.
        start: first calibration row of the micro-batch.
        inputs: float32 ``[rows, length, in_features]``.
        gradients: float32 ``[rows, length, out_features]``, of the loss summed over all positions, in nats.
        tokens: for a linear of an expert, the ascending numbers (``row * length + position``) of tokens routed to it;
            inputs and gradients are ``[tokens, ...]`` then.
    """

    name: str
    start: int
    inputs: Tensor
    gradients: Tensor
    tokens: Tensor | None = None


def strip_weights(gradients: Tensor, strips: int) -> Tensor:
    """Return the mean square over each strip of output rows: ``[..., out_features]`` to ``[..., strips]``."""
    if not 0 < strips <= gradients.shape[-1]:
        raise ValueError(f"{strips} strips of {gradients.shape[-1]} rows")
    gradient_strips = gradients.square().tensor_split(strips, -1)
    return torch.stack([gradient_strip.mean(-1) for gradient_strip in gradient_strips], -1)


class RowGradients(NamedTuple):
    """Gradients from a backward pass through a module.

    Attributes:
        gradients: gradients of the input of the module.
        linears: input and output gradients of each linear.
        others: gradients of the requested parameters.
    """

    gradients: Tensor
    linears: Mapping[str, tuple[Tensor, Tensor]]
    others: Sequence[Tensor] = ()


class OutputRecorder:
    """Hooks that record the inputs and outputs of linears, separately for each thread that runs the module.

    Linears whose output needs no gradient are omitted, such as one that only chooses experts.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], hooks: ExitStack) -> None:
        """Register hooks on sub-modules of a module until ``hooks`` is closed."""
        self._thread_local = threading.local()
        for name in names:
            handle = module.get_submodule(name).register_forward_hook(partial(self._see, name))
            hooks.callback(handle.remove)

    def _see(self, name: str, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:  # a linear that only chooses experts has none
            self._thread_local.found[name] = (args[0].detach(), output)

    def backward(
        self,
        run: Callable[[Tensor], Tensor],
        states: Tensor,
        gradients_of: Callable[[Tensor], Tensor],
        parameters: Sequence[Tensor] = (),
    ) -> RowGradients:
        """Run a module forward on ``states``, and backward from the output gradients that ``gradients_of`` returns.

        Gradients of ``parameters`` are returned too.
        """
        self._thread_local.found = {}
        with one_thread(), torch.enable_grad():
            states = states.detach().requires_grad_()
            outputs = run(states)
            recorded: dict[str, tuple[Tensor, Tensor]] = self._thread_local.found
            del self._thread_local.found
            differentiated = [states, *parameters, *(output for _, output in recorded.values())]
            first, *other_gradients = torch.autograd.grad(
                outputs, differentiated, gradients_of(outputs.detach())
            )
        num_parameters = len(parameters)
        rows = len(states)
        linears = {
            name: (_by_rows(x, rows), _by_rows(gradients, rows))
            for (name, (x, _)), gradients in zip(
                recorded.items(), other_gradients[num_parameters:], strict=True
            )
        }
        return RowGradients(first, linears, other_gradients[:num_parameters])


def _by_rows(values: Tensor, rows: int) -> Tensor:
    """Reshape values to ``[rows, length, features]``; some modules use ``[rows * length, features]``."""
    return values.reshape(rows, -1, values.shape[-1]) if len(values) % rows == 0 else values


class MixtureGradients:
    """Gradients of the experts of a block, given their stored outputs for each token."""

    def __init__(self, experts: Experts) -> None:
        """Allocate memory for gradients; raises as `ModelStream` if it is on disk."""
        assert experts.tokens is not None
        self._experts, self._tokens = experts, experts.tokens
        self._output_gradients, self._input_gradients = (
            self._tokens.make_zeros(),
            self._tokens.make_zeros(),
        )
        self._weights = torch.zeros(0)
        self._thread_local = threading.local()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Use the stored outputs of the experts inside this context; `record_gradients` collects their gradients."""

        def outputs(row: int, states: Tensor, weights: Tensor) -> Tensor:
            expert_outputs = (
                self._tokens.outputs(row, len(states)).to(states).detach().requires_grad_()
            )
            self._thread_local.outputs, self._thread_local.chosen = expert_outputs, weights.shape[1]
            return expert_outputs

        with self._experts.outputs_replaced(outputs):
            yield

    def record_gradients(self, row: int, run: Callable[[], Tensor], gradients: Tensor) -> None:
        """Run the block on the rows starting at ``row``, and store the gradients of the outputs of its experts."""
        with one_thread(), torch.enable_grad():
            self._experts.set_row(row)
            outputs = run()
            (gradient,) = torch.autograd.grad(outputs, [self._thread_local.outputs], gradients)
        self._tokens.write_tokens(self._output_gradients, row, gradient)

    def backward(self, prefix: str, visit: Callable[[OutputGradients], None]) -> None:
        """Run each expert forward and backward; call ``visit`` with the gradients of its linears.

        Args:
            prefix: prefix of the names of linears.
            visit: called for each linear of each expert, even without tokens.

        Raises:
            InputError: a gradient is not finite. Others as `Experts.run`.
        """
        self._weights = torch.zeros(self._tokens.count, self._tokens.experts_per_token)
        for number in self._experts.numbers:
            tokens, weights = self._tokens.routed_to(number)
            with one_thread(), self._experts.filled(number):
                for start in range(0, max(1, len(tokens)), TOKENS_PER_RUN * RUNS_TOGETHER):
                    run = slice(start, start + TOKENS_PER_RUN * RUNS_TOGETHER)
                    self._backward_expert(number, tokens[run], weights[run], prefix, visit)
            self._experts.release(number)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Use the stored outputs and gradients of the experts when the block runs inside this context."""

        def outputs(row: int, states: Tensor, weights: Tensor) -> Tensor:
            expert_outputs = self._tokens.outputs(row, len(states)).to(states)
            state_gradients = self._tokens.read_tokens(self._input_gradients, row, len(states)).to(
                states
            )
            first = self._tokens.tokens_in_rows(row)
            routed = self._weights[first : first + len(states)].to(weights)
            replayed: Tensor = _ReplayedExperts.apply(
                states, weights, expert_outputs, state_gradients, routed
            )  # type: ignore[no-untyped-call]
            return replayed

        with self._experts.outputs_replaced(outputs):
            yield

    def _backward_expert(
        self,
        number: int,
        tokens: Tensor,
        weights: Tensor,
        prefix: str,
        visit: Callable[[OutputGradients], None],
    ) -> None:
        """Run one expert forward and backward on some of its tokens."""
        stack_slices, parameters = (
            self._experts.linears_of(number),
            self._experts.load_expert(number),
        )
        token_batches = list(
            zip(
                torch.split(tokens, TOKENS_PER_RUN),
                torch.split(weights, TOKENS_PER_RUN),
                strict=True,
            )
        )
        batch_gradients = (
            run_parallel(partial(self._backward_tokens, number), token_batches)
            if len(tokens)
            else []
        )
        for (token_ids, _), expert_gradients in zip(token_batches, batch_gradients, strict=False):
            sums = self._input_gradients.gather(token_ids) + expert_gradients.states
            self._input_gradients.scatter(token_ids, sums)
            self._weights[token_ids] += expert_gradients.weights[:, None] * self._tokens.places(
                number, token_ids
            )
        for linear, stack_slice in stack_slices.items():
            name = stack_slice.stack.parameter
            rows, columns = stack_slice.stack.matrix(
                parameters[name], stack_slice.linear_index, 0
            ).shape
            inputs, products = torch.empty(0, columns), torch.empty(0, rows)
            if batch_gradients:
                inputs = torch.cat(
                    [expert_gradients.stacks[name][0] for expert_gradients in batch_gradients]
                )
                products = torch.cat(
                    [
                        stack_slice.stack.rows_of(
                            expert_gradients.stacks[name][1].T, stack_slice.linear_index
                        ).T
                        for expert_gradients in batch_gradients
                    ]
                )
                self._check(products, f"{prefix}{linear}", tokens)
            visit(OutputGradients(f"{prefix}{linear}", 0, inputs, products, tokens))

    def _backward_tokens(self, number: int, token_batch: tuple[Tensor, Tensor]) -> _ExpertGradients:
        tokens, weights = token_batch
        output_gradients = self._output_gradients.gather(tokens)
        with one_thread(), torch.enable_grad():
            device = self._experts.device(number)
            states = self._tokens.states(tokens).to(device).detach().requires_grad_()
            outputs, watcher = self._experts.run_recorded(number, states)
            differentiated = [states, *watcher.products.values()]
            expert_output_gradients = (output_gradients * weights[:, None]).to(outputs)
            first, *product_gradients = torch.autograd.grad(
                outputs, differentiated, expert_output_gradients
            )
        return _ExpertGradients(
            first.cpu(),
            (outputs.detach().cpu().float() * output_gradients).sum(1),
            {
                name: (watcher.inputs[name], gradients.flatten(0, -2).float())
                for name, gradients in zip(watcher.products, product_gradients, strict=True)
            },
        )

    def _check(self, gradients: Tensor, name: str, tokens: Tensor) -> None:
        if not all_finite(gradients):
            token = int(tokens[int((~gradients.isfinite()).any(1).nonzero()[0])])
            raise InputError(
                f"{name}: the gradients of its output are not finite in calibration row {self._tokens.row_of(token)}",
                "the model overflows on this text, or a weight is damaged; `quantforge inspect` checks weights",
            )


class _ExpertGradients(NamedTuple):
    """Gradients from a backward pass through an expert.

    Attributes:
        states: gradients of its input.
        weights: gradients of the router's weights.
        stacks: inputs and output gradients of matrix products, by stack.
    """

    states: Tensor
    weights: Tensor
    stacks: Mapping[str, tuple[Tensor, Tensor]]


class _ReplayedExperts(torch.autograd.Function):
    """Autograd function with stored outputs of experts and their known gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Tensor) -> Tensor:
        _, _, outputs, *ctx.known_gradients = arguments
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        state_gradients, routed = ctx.known_gradients
        return state_gradients, routed, None, None, None
