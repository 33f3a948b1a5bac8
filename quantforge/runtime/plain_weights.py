"""Linears that need their weight as it is: those that a kernel cannot stand in for.

A packed linear multiplies as `torch.nn.Linear` does. Where a family's class multiplies in a way of its own, or where a
block reads the weight of a linear itself, past the module (as state-space mixers do), the weight has to be there. What
a block reads is seen in the source of its class.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

from quantforge.architectures import Architecture

_READ = re.compile(r"\.(\w+)\.weight\b(?!\.(?:dtype|device|shape))")
OWN_PRODUCT = "their class multiplies in its own way"
READ = "their block reads the weight itself"
CONVERTED = "the running model holds them in another form"


def reason(model: nn.Module, name: str, architecture: Architecture | None) -> str:
    """Return why a module cannot be replaced by a packed linear, "" where it can.

    Args:
        model: the running model.
        name: of the module in it.
        architecture: declarations, which say whether linears are stored transposed.
    """
    module = model.get_submodule(name)
    turned = type(module).__name__ == "Conv1D" and architecture is not None
    if not turned and getattr(type(module), "forward", None) is not nn.Linear.forward:
        return OWN_PRODUCT
    leaf = name.rpartition(".")[2]
    kinds: list[Any] = [type(owner) for owner in _owners(model, name)]
    return READ if any(leaf in _weights_read(kind) for kind in kinds) else ""


def _owners(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the modules around a module, up to the one that holds the list of blocks that it is in."""
    listed = False
    while "." in name and not listed:
        name = name.rpartition(".")[0]
        owner = model.get_submodule(name)
        if isinstance(owner, nn.ModuleList):
            owner = model.get_submodule(name.rpartition(".")[0])
            listed = True
        yield owner


@cache
def _weights_read(kind: Any) -> frozenset[str]:
    """Return the names of the modules whose weight the code of a class of modules reads."""
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):  # no source is installed
        return frozenset()
    return frozenset(_READ.findall(text))
