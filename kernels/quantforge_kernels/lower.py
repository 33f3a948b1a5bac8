"""The lower of two levels of parameters, which kernels hold no wider than files do; `Problem.lower` says how."""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge_kernels.problem import Parameters, Problem

LOWER_LEVEL = frozenset({"scales", "mins"})


def narrowed(parameters: Parameters, problem: Problem) -> dict[str, Tensor]:
    """Return the parameters as kernels hold them, the lower level as `Problem.lower` says."""
    return {
        name: _narrow(value, problem.lower) if name in LOWER_LEVEL else value
        for name, value in parameters.items()
    }


def widened(parameters: Parameters, problem: Problem) -> dict[str, Tensor]:
    """Undo `narrowed`."""
    return {
        name: wide(value, problem.lower) if name in LOWER_LEVEL else value
        for name, value in parameters.items()
    }


def _narrow(values: Tensor, kind: str) -> Tensor:
    if kind == "pairs":  # the first of two groups in the low bits
        return values[:, ::2] | (values[:, 1::2] << 4)
    return values.view(torch.uint8) if kind == "e4m3" else values


def wide(values: Tensor, kind: str) -> Tensor:
    """Return a lower level ``[rows, groups]`` as it was given."""
    if kind == "pairs":
        return torch.stack((values & 15, values >> 4), 2).flatten(1, 2)
    return values.view(torch.float8_e4m3fn) if kind == "e4m3" else values
