"""Packed experts whose module takes tokens that are spread over all of them (`quantforge.model.expert_calls`).

Such a module does not say what it computes. It is tried instead: with a few random numbers in the place of its weights
it has to return what ``down(act(gate) * up)`` of the same numbers is. Only rows that are not 0 are computed, since
without biases the others stay 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.architectures import Stack
from quantforge.model.expert_calls import takes_spread
from quantforge.model.loading import parameter
from quantforge.runtime.packed_experts import PackedExperts

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_UNITS, _TOKENS, _CLOSE = 2, 3, 1e-4


class SpreadExperts(PackedExperts):
    """Packed experts that take and return ``[experts * tokens, hidden]``."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Return what each expert makes of the rows that are its own."""
        rows = hidden_states.reshape(self.num_experts, -1, hidden_states.shape[1])
        experts, tokens = (rows != 0).any(-1).nonzero(as_tuple=True)
        out = torch.zeros_like(rows)
        if len(experts):
            ones = rows.new_ones(len(experts), 1)
            out[experts, tokens] = super().forward(rows[experts, tokens], experts[:, None], ones)
        return out.flatten(0, 1)


class GatedExperts(nn.Module):
    """Experts in the words of those modules of transformers that say what they compute; it holds their parameters."""

    has_gate, has_bias, has_post_expert_norm = True, False, False

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.num_experts: int = module.num_experts
        self.act_fn: nn.Module = module.act_fn
        for name, value in module.named_parameters(recurse=False):
            self.register_parameter(name, value)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        product: Tensor = self.act_fn(gate) * up
        return product


def gated_spread(module: Any, stacks: Mapping[str, Stack]) -> GatedExperts | None:
    """Return experts that take spread tokens in other words; None where a module is no such, or computes otherwise.

    Args:
        module: of transformers.
        stacks: by the names of its parameters, of which it has no others.
    """
    if not takes_spread(module) or stacks.keys() != {_GATE_UP, _DOWN}:
        return None
    if {name for name, _ in module.named_parameters()} != stacks.keys():
        return None
    if not hasattr(module, "act_fn") or type(getattr(module, "num_experts", None)) is not int:
        return None
    return GatedExperts(module) if _is_gated(module, stacks) else None


def _is_gated(module: Any, stacks: Mapping[str, Stack]) -> bool:
    kept = dict(module.named_parameters(recurse=False))
    width = kept[_DOWN].shape[2 if stacks[_DOWN].transposed else 1]
    random = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> Tensor:
        drawn: Tensor = torch.randn(shape, generator=random)
        return drawn / math.sqrt(shape[-1])

    tried = {_GATE_UP: numbers(2 * _UNITS, width), _DOWN: numbers(width, _UNITS)}
    states = numbers(_TOKENS, width) * math.sqrt(width)
    gate, up = (states @ stacks[_GATE_UP].share(tried[_GATE_UP], position).T for position in (0, 1))
    for name, matrix in tried.items():
        turned = matrix.T if stacks[name].transposed else matrix
        setattr(module, name, parameter(turned.contiguous()[None]))
    try:
        with torch.no_grad():
            found, expected = module(states), (module.act_fn(gate) * up) @ tried[_DOWN].T
    except RuntimeError:
        return False
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
    return found.shape == expected.shape and torch.allclose(found, expected, _CLOSE, _CLOSE)
