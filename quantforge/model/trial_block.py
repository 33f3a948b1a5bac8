"""A block of a skeleton with random weights in float64: it is run, watched, and run again with changed weights.

transformers' norms and softmax ask for float32; here they compute in float64 too, so that two ways to compute the same
agree to twelve digits and anything else does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

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
