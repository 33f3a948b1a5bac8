"""Perplexity from final hidden states: ``exp`` of the mean negative log-likelihood per token.

The logits of a whole window are the largest tensor of an evaluation (512 tokens of a vocabulary of
128 k are 260 MB in float32), and never exist here. The model runs up to its final norm; a `Head`
then turns a few rows at a time into logits, through the model's own output layer, scaling and
soft-capping. That this equals the model's own logits is checked on its first tokens, so that a
family whose head does something else is refused rather than mismeasured.

The standard error is taken over windows, whose tokens are not independent: ``sd / sqrt(windows)``
for the mean NLL, times the perplexity for the perplexity (the delta method). Two models that were
scored on the same windows are compared pair by pair: the differences have a standard error ten
times smaller than either perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quantforge.errors import InputError, RefusedError

FORWARD_TOKENS = 4096
CHUNK_LOGITS = 1 << 21  # 8 MiB of float32
LEAST_ROWS = 64  # fewer and the product with the head is bound by reading it


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


class Head:
    """The last step of a language model, applied to rows of final hidden states.

    Args:
        model: whose head it is; only the output layer is kept.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config.get_text_config()
        self._output: nn.Module = model.get_output_embeddings()
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale: float = getattr(config, "logit_scale", None) or 1.0
        self._scale /= getattr(config, "logits_scaling", None) or 1.0
        self._dtype: torch.dtype = model.dtype
        self.vocabulary = int(config.vocab_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[rows, vocabulary]`` in float32 for hidden states ``[rows, hidden]``."""
        logits: Tensor = self._output(hidden.to(self._dtype))
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits.float()

    def log_softmax(self, hidden: Tensor) -> Tensor:
        """Return log-probabilities ``[rows, vocabulary]`` in float32."""
        return self.logits(hidden).log_softmax(-1)

    def chunks(self, rows: int) -> Iterator[slice]:
        """Cut ``rows`` so that the logits of a chunk stay small."""
        step = min(256, max(LEAST_ROWS, CHUNK_LOGITS // self.vocabulary))
        return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def check_head(model: PreTrainedModel, head: Head, ids: Tensor) -> None:
    """Compare the head with the model's own logits on a few tokens ``[1, n]``.

    Raises:
        RefusedError: they differ by more than rounding.
    """
    own = model(ids, use_cache=False).logits[0].float()
    ours = head.logits(model.base_model(ids, use_cache=False).last_hidden_state[0])
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.05
    if own.shape != ours.shape or not torch.allclose(own, ours, tolerance, tolerance, True):
        raise RefusedError(
            f"model_type {model.config.model_type!r}: its logits are not its output layer applied "
            "to its final hidden states",
            "this family cannot be evaluated yet",
        )


def final_hidden(model: PreTrainedModel, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(first window, hidden states [windows, length - 1, hidden])`` per micro-batch.

    The last token of a window predicts nothing that is scored, and is left out.
    """
    step = max(1, FORWARD_TOKENS // ids.shape[1])
    for first in range(0, len(ids), step):
        batch = ids[first : first + step].to(model.device)
        output = model.base_model(batch, use_cache=False)
        yield first, output.last_hidden_state[:, :-1]


def token_nll(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Return ``-log p(target)`` ``[rows]`` of log-probabilities ``[rows, vocabulary]``."""
    return -log_probabilities.gather(1, targets[:, None])[:, 0]


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
            "the weights are damaged, or activations overflow this type: try --dtype float32",
        )
    return values
