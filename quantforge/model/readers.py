"""Linears of a block by the activation that they read: those whose inputs hold the same numbers read the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quantforge.model.trial_block import TrialBlock
from quantforge.numerics.function_mode import Function, FunctionMode


@dataclass
class ReadActivation:
    """An activation that linears read: ``[tokens, in_features]``.

    With the linears in computing order, and the modules that return it.
    """

    value: Tensor
    linears: list[str]
    makers: tuple[str, ...]


class Watched(FunctionMode):
    """Everything seen while a block runs.

    Attributes:
        activations: in computing order.
        linears: in computing order.
        irregular: linears that were called more than once, or with something else than one tensor.
        chosen_among: the widths of what ``topk`` chose from: numbers of experts.
        fused: whether scores were computed by the fused kernel.
        returned: what the block returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.activations: list[ReadActivation] = []
        self.linears: list[str] = []
        self.irregular: set[str] = set()
        self.chosen_among: set[int] = set()
        self.fused = False
        self.returned: Any = None
        self._made: list[tuple[str, Tensor]] = []

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Note which functions are called."""
        if function in {torch.topk, Tensor.topk}:
            self.chosen_among.add(args[0].shape[-1])
        self.fused |= function is nn.functional.scaled_dot_product_attention
        return function(*args, **kwargs)

    def listen(self, module: nn.Module, stack: ExitStack) -> None:
        """Listen to the linears of a module, and to the modules that multiply channels by a vector."""
        for name, child in module.named_modules():
            if is_linear(child):
                hook = partial(self._reads, name)
                stack.callback(child.register_forward_pre_hook(hook, with_kwargs=True).remove)
            elif isinstance(getattr(child, "weight", None), Tensor) and child.weight.dim() == 1:
                stack.callback(child.register_forward_hook(partial(self._makes, name)).remove)

    def _reads(
        self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if name in self.linears or len(args) != 1 or kwargs:
            self.irregular.add(name)
            return
        x = _flat(args[0])
        self.linears.append(name)
        for known in self.activations:
            if known.value.shape == x.shape and torch.equal(known.value, x):
                known.linears.append(name)
                return
        makers = [key for key, y in self._made if y.shape == x.shape and torch.equal(y, x)]
        self.activations.append(ReadActivation(x, [name], tuple(makers)))

    def _makes(self, name: str, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() > 1:
            self._made.append((name, _flat(output)))


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies by a matrix that can be quantized."""
    return isinstance(module, (nn.Linear, Conv1D))


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear holds ``[in_features, out_features]``."""
    return isinstance(module, Conv1D)


def watched(block: TrialBlock) -> Watched:
    """Run a block and say what its linears read."""
    found = Watched()
    with ExitStack() as stack:
        found.listen(block.module, stack)
        stack.enter_context(found)
        found.returned = block.run()
    return found


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).clone()
