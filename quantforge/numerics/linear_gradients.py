"""Linears that gradients pass, with products shared out to threads: see `quantforge.numerics.products`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantforge.numerics.function_mode import Function, FunctionMode
from quantforge.numerics.products import on_threads
from quantforge.numerics.team import TEAMS


def cutting_linears(threads: int) -> AbstractContextManager[object]:
    """Compute what linears with frozen weights return, and later the gradients of what they read, on several threads.

    All else stays on this one. Weights must not change before gradients were taken.
    """
    return _Linears(threads) if TEAMS else nullcontext()


class _Linears(FunctionMode):
    def __init__(self, threads: int) -> None:
        super().__init__()
        self._threads = threads

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function is functional.linear and len(args) > 1 and args[0].requires_grad:
            x, weight, bias = (*args, *kwargs.values(), None)[:3]
            plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() > 1
            if plain and not any(one is not None and one.requires_grad for one in (weight, bias)):
                return _Linear.apply(x, weight, bias, self._threads)  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)


class _Linear(torch.autograd.Function):
    """A linear without gradients of its weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, threads: int) -> Tensor:
        ctx.weight, ctx.threads = weight, threads
        return on_threads(threads, functional.linear, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return on_threads(ctx.threads, torch.matmul, *gradients, ctx.weight), None, None, None
