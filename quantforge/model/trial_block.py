"""Run a block of a skeleton with random weights in float64, observe its linears, and run it with changed weights.

transformers' norms and softmax ask for float32. Here they compute in float64 too, so that equivalent computations agree
to twelve digits and others do not. Linears with equal inputs read the same activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.pytorch_utils import Conv1D

from quantforge.model.loading import empty, parameter
from quantforge.model.skeleton import as_refusals
from quantforge.model.standins import Call
from quantforge.numerics.function_mode import Function, FunctionMode

LARGE = 1 << 26  # parameters of a block that is held in float32
GAIN = (0.5, 1.5)  # of vectors: norms, decays, biases


class _Wide(FunctionMode):
    """Mode in which what asks for a narrower type computes in float64, or in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    _LESS = frozenset({torch.float32, torch.bfloat16, torch.float16})

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function in {Tensor.float, Tensor.half, Tensor.bfloat16}:
            return args[0].to(self._dtype)
        if function in {torch.tensor, torch.full} and isinstance(args[-1], float):
            kwargs = {"dtype": self._dtype, **kwargs}  # the least of float64 is no float32
        args = [self._wide(value) for value in args]
        return function(*args, **{key: self._wide(value) for key, value in kwargs.items()})

    def _wide(self, value: Any) -> Any:
        is_less = isinstance(value, torch.dtype) and value in self._LESS
        return self._dtype if is_less else value


class TrialBlock:
    """A block with random weights, and what reaches it.

    Attributes:
        states: ``[rows, length, hidden]`` that reach it.
        dtype: that it computes in: float32 where the block is large.

    Args:
        module: of a skeleton.
        states: ``[rows, length, hidden]`` that reach it.
        call: what it gets beside them.
        seed: of the weights.
    """

    def __init__(self, module: nn.Module, states: Tensor, call: Call, seed: int = 0) -> None:
        self.module = module
        size = sum(value.numel() for value in module.parameters())
        self.dtype = torch.float64 if size <= LARGE else torch.float32
        self.states = states.to(self.dtype)
        self._call = Call(*tree_map(self._wide, tuple(call)))
        self._generator = torch.Generator().manual_seed(seed)

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Hold random weights."""
        for child in self.module.modules():
            for name, value in child.named_parameters(recurse=False):
                setattr(child, name, parameter(self._random(value)))
            for name, buffer in child.named_buffers(recurse=False):
                real = torch.zeros(buffer.shape) if buffer.is_meta else buffer
                setattr(child, name, self._wide(real))
        try:
            yield
        finally:
            empty(self.module)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter by its name relative to the block."""
        return self.module.get_parameter(name)

    def run(self, changed: Mapping[str, Tensor] | None = None) -> Any:
        """Return what the block returns, with some parameters changed."""
        with torch.no_grad(), _Wide(self.dtype), as_refusals("a block alone"):
            return torch.func.functional_call(
                self.module, dict(changed or {}), (self.states, *self._call.args), self._call.kwargs
            )

    @contextmanager
    def louder(self, factor: float) -> Iterator[None]:
        """Hold matrices that are ``factor`` times as large: what is clamped is clamped then."""
        matrices = [value for value in self.module.parameters() if value.dim() > 1]
        for value in matrices:
            value.data.mul_(factor)
        try:
            yield
        finally:
            for value in matrices:
                value.data.div_(factor)

    def _random(self, value: Tensor) -> Tensor:
        shape = value.shape
        if len(shape) < 2:
            low, high = GAIN
            found = torch.rand(shape, generator=self._generator, dtype=self.dtype)
            return found * (high - low) + low
        found = torch.randn(shape, generator=self._generator, dtype=self.dtype)
        return found.div_(max(shape[-1], 1) ** 0.5)

    def _wide(self, value: Any) -> Any:
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_number else value


@dataclass
class ReadActivation:
    """An activation that linears read: ``[tokens, in_features]``.

    With the linears in computing order, and the modules that return it.
    """

    value: Tensor
    linears: list[str]
    makers: tuple[str, ...]


class Watched(FunctionMode):
    """What is observed while a block runs.

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
    """Run a block and return what was observed."""
    found = Watched()
    with ExitStack() as stack:
        found.listen(block.module, stack)
        stack.enter_context(found)
        found.returned = block.run()
    return found


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).clone()
