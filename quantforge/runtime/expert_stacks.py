"""Experts of a running model: their matrices written into the stacks that transformers computes with.

No kernel multiplies packed stacks, so that experts are held decoded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantforge.architectures.match import Matched, MatchedTensor


def set_expert(
    model: nn.Module, matched: Matched, tensor: MatchedTensor, value: Tensor, dtype: torch.dtype
) -> None:
    """Write the matrix ``[out_features, in_features]`` of one expert into its stack, made where it is still empty."""
    place = matched.place(tensor)
    block = matched.block_name(tensor.block)
    module_name, _, leaf = f"{block}.{place.stack.parameter}".rpartition(".")
    module = model.get_submodule(module_name)
    stack: Tensor = getattr(module, leaf)
    if stack.is_meta:
        stack = torch.empty(stack.shape, dtype=dtype, device=value.device)
        setattr(module, leaf, nn.Parameter(stack, requires_grad=False))
    place.view(getattr(module, leaf)).copy_(value)
