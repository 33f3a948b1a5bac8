"""Gradients at the output of linears, and their squares by token and strip of rows.

The square of the gradient at an output row says how much the loss minds an error there, at this token. Rows that share
a weight per token share a Hessian, so that consecutive rows are joined in strips, over which the squares are averaged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantforge.numerics.threads import one_thread


@dataclass(frozen=True, slots=True, eq=False)
class OutputGradients:
    """Inputs and output gradients of one linear in one micro-batch.

    Attributes:
        name: canonical name of the linear, e.g. ``model.layers.3.mlp.up_proj``, or that of the head.
        start: first calibration row of the micro-batch.
        inputs: float32 ``[rows, length, in_features]``.
        gradients: float32 ``[rows, length, out_features]``, of the loss summed over all positions, in nats.
        tokens: of a linear of an expert, the ascending numbers (``row * length + position``) of some tokens that are
            sent to it; inputs and gradients are ``[tokens, ...]`` then.
    """

    name: str
    start: int
    inputs: Tensor
    gradients: Tensor
    tokens: Tensor | None = None


def strip_weights(gradients: Tensor, strips: int) -> Tensor:
    """Return the mean of the squares over each strip of output rows: ``[..., out_features]`` to ``[..., strips]``.

    Strips are runs of consecutive rows whose lengths differ by one at most.

    Raises:
        ValueError: more strips than rows.
    """
    if not 0 < strips <= gradients.shape[-1]:
        raise ValueError(f"{strips} strips of {gradients.shape[-1]} rows")
    parts = gradients.square().tensor_split(strips, -1)
    return torch.stack([part.mean(-1) for part in parts], -1)


class Passed(NamedTuple):
    """Gradients of what a module has read in one pass, and of each linear its input and the gradients of its output.

    ``others``: gradients of more that was asked for.
    """

    gradients: Tensor
    linears: Mapping[str, tuple[Tensor, Tensor]]
    others: Sequence[Tensor] = ()


class OutputListener:
    """Listener to linears: their inputs and outputs by name, for each thread that runs the module.

    A linear whose output has no gradients is left out: one that chooses tokens, for instance.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], hooks: ExitStack) -> None:
        """Listen to sub-modules of a module until ``hooks`` is closed."""
        self._of_thread = threading.local()
        for name in names:
            handle = module.get_submodule(name).register_forward_hook(partial(self._see, name))
            hooks.callback(handle.remove)

    def _see(self, name: str, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:  # what only decides where to look has none
            self._of_thread.found[name] = (args[0].detach(), output)

    def back(
        self,
        run: Callable[[Tensor], Tensor],
        states: Tensor,
        gradients_of: Callable[[Tensor], Tensor],
        parameters: Sequence[Tensor] = (),
    ) -> Passed:
        """Run the module on states, and go back from the gradients that ``gradients_of`` returns for its outputs.

        Gradients of ``parameters`` are returned, too.
        """
        self._of_thread.found = {}
        with one_thread(), torch.enable_grad():
            states = states.detach().requires_grad_()
            outputs = run(states)
            found: dict[str, tuple[Tensor, Tensor]] = self._of_thread.found
            del self._of_thread.found
            wanted = [states, *parameters, *(output for _, output in found.values())]
            first, *others = torch.autograd.grad(outputs, wanted, gradients_of(outputs.detach()))
        more = len(parameters)
        rows = len(states)
        linears = {
            name: (_by_rows(x, rows), _by_rows(gradients, rows))
            for (name, (x, _)), gradients in zip(found.items(), others[more:], strict=True)
        }
        return Passed(first, linears, others[:more])


def _by_rows(values: Tensor, rows: int) -> Tensor:
    """Return ``[rows, length, features]`` of what some modules see as ``[rows * length, features]``."""
    return values.reshape(rows, -1, values.shape[-1]) if len(values) % rows == 0 else values
