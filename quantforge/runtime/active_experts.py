"""Experts that a token is sent to: how many of them, hence which share of a mixture's weights it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from quantforge.runtime.packed_experts import PackedExperts
from quantforge.runtime.packed_stacks import PackedStack, SeparateStack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COUNTS = ("top_k", "num_experts_per_tok", "num_experts_per_token")


def active_shares(model: PreTrainedModel) -> dict[str, float]:
    """Return by the name of every experts module the share of its experts that one token is sent to.

    The number is what the mixture, its router or the configuration calls ``top_k`` or ``num_experts_per_tok``; 1.0
    where none says it.
    """
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, PackedExperts) and not is_mixture(module):
            continue
        experts: Any = module
        mixture = model.get_submodule(name.rpartition(".")[0])
        if isinstance(mixture, PackedExperts):  # the module that it replaced holds biases at most
            continue
        places = [mixture, *mixture.children(), model.config.get_text_config()]
        said = (getattr(place, key, None) for place in places for key in _COUNTS)
        count = next((value for value in said if type(value) is int and value > 0), None)
        total = experts.num_experts
        found[name] = 1.0 if count is None else min(1.0, count / total)
    return found


def waits(model: nn.Module) -> bool:
    """Return whether the host has to know which experts a token is sent to, so that no CUDA graph holds a step."""
    return any(
        isinstance(module, SeparateStack)
        or (isinstance(module, PackedStack) and module.chosen.waits)
        or is_mixture(module)
        for module in model.modules()
    )


def is_mixture(module: nn.Module) -> bool:
    """Return whether a module of transformers holds the weights of experts, in parameters of three dimensions."""
    stacked = any(value.dim() == 3 for value in module.parameters(recurse=False))
    return stacked and type(getattr(module, "num_experts", None)) is int
