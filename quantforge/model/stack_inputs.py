"""Inputs of the matrices of one expert, seen in the products themselves, whatever code computes them.

transformers computes the experts of a layer as products with views of stacked parameters; no linear of their own reads
anything, so that hooks see nothing, and what lies between the products differs from family to family: a gate or none,
rows that alternate, clamps, biases, a norm. But a view shares the memory of its parameter. So the products themselves
are watched: each that has a view of a known parameter as its matrix has, on the other side, what that matrix reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantforge.numerics.function_mode import Function, FunctionMode

# The places of what is read and of the matrix, among the arguments.
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
        """Look at a product; compute it as ever."""
        where = _PRODUCTS.get(function)
        if where is not None and len(args) > where[1]:
            name = self._names.get(args[where[1]].untyped_storage().data_ptr())
            if name is not None:
                self.found[name] = args[where[0]].detach().flatten(0, -2).float()
                self.products[name] = function(*args, **kwargs)
                return self.products[name]
        return function(*args, **kwargs)
