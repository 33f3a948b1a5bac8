"""A draft made of the model itself: its linears in fewer bits, everything else shared.

Reading fewer bits is what makes it faster, and being the same model is what makes it agree. It needs no second
checkpoint and no tokenizer, and takes the memory of its codes alone: embeddings, head, norms and experts are the
model's own. The weights are rounded to nearest as they are in memory; a quantized artifact of the same model, made
with data, agrees more often and can be given as any other draft.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantforge.errors import InputError, UsageError
from quantforge.notation import parse
from quantforge.quantizers.rtn import quantized
from quantforge.runtime.computed import computed
from quantforge.runtime.linear import PackedLinear
from quantforge.runtime.plain_weights import reason
from quantforge.runtime.speculation.draft_options import FEWER_BITS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge.scheme import Scheme

FORMS = ("g32:asym", "g64:asym", "g64:sym")  # of the groups
SCHEMES = {f"int{bits}": f"int{bits}:{form}" for bits, form in zip(FEWER_BITS, FORMS, strict=True)}
STRIP = 512  # columns of a weight that are recovered at a time


def lower_bits(model: PreTrainedModel, bits: str) -> PreTrainedModel:
    """Return the model with the linears of its blocks rounded to fewer bits; it shares everything else.

    Args:
        model: stays as it is.
        bits: one of `SCHEMES`.

    Raises:
        UsageError: no such draft.
        InputError: nothing can be rounded.
    """
    if bits not in SCHEMES:
        raise UsageError(f"no draft {bits!r}", f"one of {', '.join(SCHEMES)}, ngram, or a model")
    family = computed(model)
    assert family is not None  # see `Decoder`
    scheme = parse(SCHEMES[bits])
    shared = {id(value): value for value in (*model.parameters(), *model.buffers())}
    draft: PreTrainedModel = deepcopy(model, shared)
    blocks = draft.get_submodule(family.blocks)
    rounded = 0
    for name, module in list(blocks.named_modules()):
        whole = f"{family.blocks}.{name}"
        if not isinstance(module, nn.Linear | PackedLinear):
            continue
        if isinstance(module, nn.Linear) and reason(draft, whole, family):
            continue  # a packed one took the place of such a linear already
        found = _fewer(module, scheme, model.dtype)
        if found is not None:
            blocks.set_submodule(name, found)
            rounded += 1
    if not rounded:
        raise InputError(
            f"no linear of this model can be a draft in {scheme}",
            "its matrices have fewer bits already, or rows that no group divides: take --draft ngram",
        )
    return draft


def _fewer(
    module: nn.Linear | PackedLinear, scheme: Scheme, dtype: torch.dtype
) -> nn.Module | None:
    """Return a linear in fewer bits; None where it has as few, or its rows are no whole groups."""
    if isinstance(module, PackedLinear):
        columns, held = module.problem.in_features, module.problem.bits
    else:
        columns, held = module.in_features, 16
    if held <= scheme.bits or columns % scheme.group_size(columns):
        return None
    bias, weight = module.bias, weight_of(module)
    tensor = quantized({"draft": weight}, None, {"draft": scheme}, "search")["draft"]
    return PackedLinear(tensor, bias, dtype, weight.device)


def weight_of(module: nn.Linear | PackedLinear) -> Tensor:
    """Return the weight ``[out, in]`` in float32 with which a linear multiplies, recovered by multiplying."""
    if isinstance(module, nn.Linear):
        return module.weight.detach().float()
    columns = module.problem.in_features
    strips = []
    for first in range(0, columns, STRIP):
        width = min(STRIP, columns - first)
        unit = torch.zeros(width, columns, dtype=module.problem.dtype, device=module.weight.device)
        unit[torch.arange(width), torch.arange(first, first + width)] = 1
        y = module(unit)
        strips.append((y if module.bias is None else y - module.bias).float().T)
    return torch.cat(strips, 1)
