"""Linear layers that read the same activation, multiplied as one: q, k, v; gate, up.

One call instead of three, and a matrix tall enough to occupy a GPU where k and v alone are not.
The rows are laid one after the other once, at load, and the parts then are views of the whole: no
byte is held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantforge.runtime.linear import PackedLinear
from quantforge_kernels import reference
from quantforge_kernels.layers import add_bias, linear

SHARED = frozenset({"table"})  # of a codebook: one for all rows


class Joined:
    """Some linear layers as one.

    Args:
        parts: see `joinable`.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        biases = [part.bias for part in parts]
        self._bias = None
        if biases[0] is not None:
            self._bias = torch.cat([bias for bias in biases if isinstance(bias, Tensor)])
        packed = [part for part in parts if isinstance(part, PackedLinear)]
        if packed:
            self._sizes = [part.problem.out_features for part in packed]
            self._problem = replace(packed[0].problem, out_features=sum(self._sizes))
            self._kernel = packed[0].chosen
            self._packed = {name: _together(packed, name) for name in packed[0].packed}
        else:
            self._sizes = [len(_weight(part)) for part in parts]
            self._weight: Tensor | None = torch.cat([_weight(part) for part in parts])
            for part, rows in zip(parts, torch.split(self._weight, self._sizes), strict=True):
                part.weight = nn.Parameter(rows, requires_grad=False)
            return
        self._weight = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Multiply ``x`` ``[rows, in]``; return ``[rows, out]`` of each part."""
        if self._weight is not None:
            y = linear(x, self._weight, self._bias)
        else:
            y = self._kernel.matmul(x, self._packed, self._problem)
            y = y if self._bias is None else add_bias(y, self._bias)
        parts: tuple[Tensor, ...] = torch.split(y, self._sizes, dim=-1)
        return parts


def joinable(parts: Sequence[nn.Module]) -> bool:
    """Return whether the layers can be one: dense ones, or packed ones in one layout of rows."""
    if len({getattr(part, "bias", None) is None for part in parts}) > 1:
        return False
    if all(isinstance(part, nn.Linear) for part in parts):
        return True
    packed = [part for part in parts if isinstance(part, PackedLinear)]
    if len(packed) < len(parts):
        return False
    problems = {replace(part.problem, out_features=0) for part in packed}
    names = {tuple(part.packed) for part in packed}
    chosen = packed[0].chosen
    by_rows = chosen is reference.KERNEL or chosen.restore is not None
    apart = max(chosen.rows_apart, packed[0].problem.tile_rows)
    whole = all(part.problem.out_features % apart == 0 for part in packed)
    plain = all(part.takes_plain_input for part in packed)
    return len(problems) == len(names) == 1 and by_rows and whole and plain


def _together(parts: Sequence[PackedLinear], name: str) -> Tensor:
    """Join the packed weights of all parts to one tensor; the parts become views of it."""
    given = [part.packed[name] for part in parts]
    if name in SHARED:
        return given[0]
    whole = torch.cat(given)
    sizes = [len(value) for value in given]
    for part, rows in zip(parts, torch.split(whole, sizes), strict=True):
        part.register_buffer(name, rows)
    return whole


def _weight(part: nn.Module) -> Tensor:
    weight = part.weight
    assert isinstance(weight, Tensor)
    return weight
