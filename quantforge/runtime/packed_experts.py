"""Experts of a mixture whose weights stay packed, in the place of transformers' module of stacked parameters.

transformers' experts modules say of themselves what they compute: whether there is a gate, whether there are biases, a
norm after each expert; how gate and up become one (`_apply_gate`, with the clamps of some families). Their forward
takes hidden states ``[tokens, hidden]``, and for every token the numbers and the weights of its experts.
`PackedExperts` computes the same from packed stacks and asks the module it replaces for everything that is not a
product, so that no family is named here. Of an expert without tokens no byte is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.architectures import Stack
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.packed_stacks import PackedStack, SeparateStack, stack_of
from quantforge_kernels.grouped import Owners
from quantforge_kernels.layers import silu_gate

Weight = Callable[[str, int], QuantizedTensor | Tensor]
_SAID = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm")
_DOWN = "down_proj"
_NORM = "post_expert_norm"
# Where the gate of modules that have none of their own is defined.
_PLAIN_GATES = frozenset({"transformers.integrations.moe", "quantforge.runtime.spread_experts"})
_SILU = frozenset({"SiLU", "SiLUActivation", "silu"})


class PackedExperts(nn.Module):
    """Experts with packed weights; its forward is that of the module it replaces.

    Args:
        module: of transformers, for which `understood` holds; biases are filled.
        opening: the products of hidden states: gate and up, or up alone.
        down: the products of what lies between.
        interleaved: so many linears of ``opening`` alternate row by row in the module; 1: they follow one another.

    Attributes:
        num_experts: how many there are.
    """

    def __init__(
        self,
        module: Any,
        opening: PackedStack | SeparateStack,
        down: PackedStack | SeparateStack,
        interleaved: int = 1,
    ) -> None:
        super().__init__()
        self.num_experts: int = module.num_experts
        for name in _stacked(module):
            delattr(module, name)
        self.module = module
        self.opening = opening
        self.down = down
        self._interleaved = interleaved
        self._open = opening_name(module)
        self._silu = _is_silu(module)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return ``[tokens, hidden]``: of every token the sum of its experts' results by their weights."""
        owners = Owners(top_k_index, self.num_experts)
        inner = self.opening(hidden_states, owners)
        if self._interleaved > 1:
            inner = inner.unflatten(1, (self._interleaved, -1)).transpose(1, 2).flatten(1)
        inner = self._with_bias(inner, self._open, owners)
        if self._silu:
            inner = silu_gate(*inner.chunk(2, dim=-1))
        elif self.module.has_gate:
            inner = self.module._apply_gate(inner)
        else:
            inner = self.module.act_fn(inner)
        out = self._with_bias(self.down(inner, owners), _DOWN, owners)
        if self.module.has_post_expert_norm:
            out = self.module.post_expert_norm(out)
        out = out * top_k_weights.reshape(-1, 1)
        return out.view(len(hidden_states), -1, out.shape[1]).sum(1).to(hidden_states.dtype)

    @property
    def failures(self) -> list[str]:
        """Return why products are not those of the kernel meant for them; empty where all are."""
        found = (self.opening.failure, self.down.failure)
        return [why for why in found if why is not None]

    def _with_bias(self, y: Tensor, name: str, owners: Owners) -> Tensor:
        if not self.module.has_bias:
            return y
        bias: Tensor = getattr(self.module, f"{name}_bias")
        return y + bias[owners.pairs]


def packed_experts(
    module: nn.Module,
    stacks: Sequence[Stack],
    weight: Weight,
    dtype: torch.dtype,
    device: torch.device,
    kind: type[PackedExperts] = PackedExperts,
) -> PackedExperts | None:
    """Return packed experts to replace a module of transformers; None where the module is not understood.

    Args:
        module: its biases and norms are filled, its stacks are not.
        stacks: which linears each of its parameters of three dimensions consists of; of the names the last part counts.
        weight: returns the matrix ``[out, in]`` of a linear (as the stack names it) of an expert.
        dtype: of activations.
        device: where the weights are kept.
        kind: how they are called.
    """
    by_leaf = {stack.parameter.rpartition(".")[2]: stack for stack in stacks}
    if not understood(module) or _stacked(module) != by_leaf.keys():
        return None
    experts: Any = module
    made = {}
    for leaf, stack in by_leaf.items():

        def parts(
            expert: int, linears: Sequence[str] = stack.linears
        ) -> list[QuantizedTensor | Tensor]:
            return [weight(linear, expert) for linear in linears]

        made[leaf] = stack_of(parts, experts.num_experts, dtype, device)
    opening = by_leaf[opening_name(experts)]
    turns = len(opening.linears) if opening.interleaved else 1
    return kind(experts, made[opening_name(experts)], made[_DOWN], turns)


def understood(module: Any) -> bool:
    """Return whether a module says what it computes, in the terms of transformers' experts, and holds nothing else."""
    if not all(hasattr(module, name) for name in _SAID):
        return False
    if not hasattr(module, "_apply_gate" if module.has_gate else "act_fn"):
        return False
    stacked = {opening_name(module), _DOWN}
    biases = {f"{name}_bias" for name in stacked} if module.has_bias else set()
    mine = {name for name, _ in module.named_parameters() if not name.startswith(f"{_NORM}.")}
    return mine == stacked | biases and bool(module.has_post_expert_norm) == hasattr(module, _NORM)


def opening_name(module: Any) -> str:
    """Return the name of the parameter that hidden states are multiplied by."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def _stacked(module: Any) -> set[str]:
    """Return the names of the parameters of three dimensions."""
    return {name for name, value in module.named_parameters(recurse=False) if value.dim() == 3}


def _is_silu(module: Any) -> bool:
    """Return whether what lies between the products is ``silu(gate) * up``, gate first: there is one program for it."""
    plain = module.has_gate and type(module)._apply_gate.__module__ in _PLAIN_GATES
    if not plain:
        return False
    return getattr(module.act_fn, "__name__", type(module.act_fn).__name__) in _SILU
