"""A toy block method: codes of `rtn`, and scales of groups that Adam fits to what the whole block returns.

Every scale is multiplied with ``exp(v)``, ``v`` from 0 on, by the mean square of the error over all rows. The best of
all steps is kept, so that the block is never worse than rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.model.block import BlockPart
from quantforge.model.block_samples import BlockSamples
from quantforge.model.statistics import Statistics
from quantforge.packers import packer_of
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import Rounded, rtn
from quantforge.recipe import Rounding
from quantforge.scheme import Scheme

STEPS, RATE = 12, 3e-3


def round_block(
    part: BlockPart,
    samples: BlockSamples,
    statistics: Mapping[str, Statistics],
    schemes: Mapping[str, Scheme],
    rounding: Rounding,
) -> dict[str, Rounded]:
    """Round a block, then learn its scales."""
    del statistics
    with torch.no_grad():
        weights = {name: part.weight(name) for name in schemes}
        plain = rtn.round_shared(weights, Statistics(), schemes, rounding)
    tensors = {name: rounded.tensor for name, rounded in plain.items()}
    started = {name: tensor.parameters["scales"] for name, tensor in tensors.items()}
    codes = {name: _unscaled(tensor) for name, tensor in tensors.items()}
    logs = {name: torch.zeros(scales.shape, requires_grad=True) for name, scales in started.items()}
    optimizer = torch.optim.Adam(logs.values(), lr=RATE)
    count = sum(batch.states.numel() for batch, _ in samples)
    best, kept = float("inf"), started
    first = 0.0
    for step in range(STEPS + 1):
        scales = {name: started[name].float() * log.exp() for name, log in logs.items()}
        rounded = {name: scale.to(started[name].dtype) for name, scale in scales.items()}
        optimizer.zero_grad()
        error = 0.0
        for batch, targets in samples:
            decoded = {
                # The value that is stored, with the gradient of the one that is not rounded to its type.
                name: _scaled(codes[name], scale + (rounded[name].float() - scale).detach())
                for name, scale in scales.items()
            }
            loss = (samples.run(batch, decoded) - targets).square().sum() / count
            error += float(loss.detach())
            loss.backward(retain_graph=True)
        first = first or error
        if error < best:
            best, kept = error, {name: scale.detach() for name, scale in rounded.items()}
        if step < STEPS:
            optimizer.step()
    figures = {"block_error": best, "block_error_rtn": first}
    return {
        name: Rounded(
            QuantizedTensor(tensor.codes, {**tensor.parameters, "scales": kept[name]}, tensor.scheme),
            figures={**plain[name].figures, **figures},
        )
        for name, tensor in tensors.items()
    }  # fmt: skip


def _unscaled(tensor: QuantizedTensor) -> Tensor:
    """Return the values of the codes at scale 1, ``[rows, groups, columns of a group]``."""
    ones = {**tensor.parameters, "scales": torch.ones_like(tensor.parameters["scales"])}
    values = packer_of(tensor.scheme).decode(tensor.codes, ones, tensor.scheme)
    return values.view(*ones["scales"].shape, -1)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    return (values * scales[..., None]).flatten(1)
