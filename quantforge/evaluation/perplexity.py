"""Perplexity from final hidden states: ``exp`` of the mean negative log-likelihood per token.

The model runs up to its final norm; its head is applied part by part (`head`), through the model's
own output layer, scaling and soft-capping. That this equals the model's own logits is checked on its
first tokens, so that a family whose head does something else is refused rather than mismeasured.

The standard error is taken over windows, whose tokens are not independent: ``sd / sqrt(windows)``
for the mean NLL, times the perplexity for the perplexity (the delta method). Two models that were
scored on the same windows are compared pair by pair: the differences have a standard error ten
times smaller than either perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.model.inner import inner
from quantforge.runtime.decoder import decoder_family
from quantforge.runtime.linear import decoded_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORWARD_TOKENS = {"cpu": 512, "cuda": 4096}  # enough to keep the arithmetic busy


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over windows with its standard error (NaN for a single window)."""

    mean: float
    error: float

    @classmethod
    def of(cls, windows: Tensor) -> Estimate:
        """Estimate from one float64 value per window, ``[windows]``."""
        count = len(windows)
        error = windows.std().item() / math.sqrt(count) if count > 1 else math.nan
        return cls(windows.mean().item(), error)

    def exp(self) -> Estimate:
        """Return ``exp`` of the estimate, by the delta method."""
        value = math.exp(self.mean)
        return Estimate(value, value * self.error)


def final_hidden(model: PreTrainedModel, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(first window, hidden states [windows, length - 1, hidden])`` per micro-batch.

    The last token of a window predicts nothing that is scored, and is left out.
    """
    most = forward_tokens(model.device)
    step = max(1, most // ids.shape[1])
    with decoded_once(model):
        for first in range(0, len(ids), step):
            batch = ids[first : first + step].to(model.device)
            with _inner_by_tokens(model, most):
                output = inner(model)(batch, use_cache=False)
            yield first, output.last_hidden_state[:, :-1]


@contextmanager
def _inner_by_tokens(model: PreTrainedModel, most: int) -> Iterator[None]:
    """Run the MLPs, the widest part of a block, over at most so many tokens of a long window at a time."""
    family = decoder_family(model)
    blocks: Any = model.get_submodule(family.blocks) if family is not None else ()

    def cut(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.cat([forward(part) for part in torch.split(x, most, dim=1)], dim=1)

    for block in blocks:
        block.mlp.forward = partial(cut, block.mlp.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.mlp.forward


def forward_tokens(device: torch.device) -> int:
    """Return how many tokens are computed at a time, which bounds the memory of activations."""
    return FORWARD_TOKENS.get(device.type, FORWARD_TOKENS["cuda"])


def finite(values: Tensor, what: str) -> Tensor:
    """Return per-token ``values`` ``[windows, tokens]`` if all are numbers.

    Raises:
        InputError: naming the first that is not; no mean is ever taken over a NaN.
    """
    if not values.numel():
        raise InputError(f"{what}: no token was scored", "give a longer text (--text)")
    if not bool(values.isfinite().all()):
        window, token = values.isfinite().logical_not().nonzero()[0].tolist()
        raise InputError(
            f"{what} is {values[window, token].item()} at token {token + 1} of window {window}",
            "the weights are damaged, or activations overflow the model's type: try a float32 copy,"
            " `quantforge export MODEL --format plain --type F32`",
        )
    return values
