"""Perplexity of a model, and its exact KL divergence from a reference, token by token.

Perplexity is ``exp`` of the mean negative log-likelihood per token. The divergence

    KL(p || q) = sum_v p_v (log p_v - log q_v) = sum_v p_v (a_v - b_v) - log-sum-exp(a) + log-sum-exp(b)

over the whole vocabulary (``p``: the reference with logits ``a``, ``q``: the model with logits ``b``) ranks quantized
models far better, because the sign of a perplexity difference can be noise for small models and short texts.

The model is transformers' own, with `runtime.linear.PackedLinear` in place of its quantized layers; everything is
computed in float32. It runs up to its final norm; then its head is applied to slices of the vocabulary (`output_head`),
through the model's own output layer, scaling and soft-capping. The result is checked against the model's own logits for
the first tokens, so that an unsupported family is refused rather than measured incorrectly.

Storing the logits of the reference would take ``4 * vocabulary`` bytes per token. Instead its head and its final hidden
states (``4 * hidden`` bytes, 30 times less for a vocabulary of 128 k and a width of 4096) are kept, and its logits are
recomputed slice by slice next to those of the model. This is exact, costs one more matrix product with the head, and
allows the reference to be unloaded before the model is loaded.

The standard error is computed over windows, because tokens within a window are not independent: ``sd / sqrt(windows)``
for the mean NLL, times the perplexity for the perplexity (the delta method). Two models scored on the same windows are
compared pairwise: the standard error of the differences is ten times smaller than that of either perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantforge.architectures import decoder_family
from quantforge.errors import InputError
from quantforge.evaluation.output_head import OutputHead, checked_head, compare_predictions
from quantforge.evaluation.text_windows import Windows
from quantforge.model.hidden_states import HiddenStates, InMemory, OnDisk
from quantforge.model.model_parts import base_model, block_list_name
from quantforge.progress import report_step
from quantforge.runtime.linear import cache_decoded_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_FORWARD_TOKENS = {"cpu": 512, "cuda": 4096}  # enough to keep the arithmetic busy


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over windows with its standard error.

    Attributes:
        mean: the mean.
        error: its standard error; NaN for a single window.
    """

    mean: float
    error: float

    @classmethod
    def of(cls, windows: Tensor) -> Estimate:
        """Estimate from one float64 value per window, ``[windows]``."""
        count = len(windows)
        error = windows.std().item() / math.sqrt(count) if count > 1 else math.nan
        return cls(windows.mean().item(), error)

    def exp(self) -> Estimate:
        """Return the estimate of ``exp`` of the quantity, by the delta method."""
        value = math.exp(self.mean)
        return Estimate(value, value * self.error)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per-token comparison of a model with its reference, each ``[windows, length - 1]``.

    Attributes:
        kl: KL divergence in nats.
        agrees: whether both have the same most likely token.
    """

    kl: Tensor
    agrees: Tensor

    @property
    def mean(self) -> Estimate:
        """Return the mean KL divergence in nats per token."""
        return Estimate.of(self.kl.double().mean(1))

    @property
    def agreement(self) -> Estimate:
        """Return the fraction of tokens for which both models predict the same most likely token."""
        return Estimate.of(self.agrees.double().mean(1))

    def quantile(self, fraction: float) -> float:
        """Return the KL divergence that ``fraction`` of the tokens do not exceed."""
        ordered = self.kl.flatten().sort().values
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))].item()


@dataclass(frozen=True, slots=True)
class ModelScores:
    """Scores of one model.

    Attributes:
        nll: negative log-likelihood in nats, ``[windows, length - 1]``.
        divergence: comparison with the reference; None for the reference itself.
    """

    nll: Tensor
    divergence: Divergence | None = None

    @property
    def mean_nll(self) -> Estimate:
        """Return the mean negative log-likelihood in nats per token."""
        return Estimate.of(self.nll.double().mean(1))

    @property
    def perplexity(self) -> Estimate:
        """Return ``exp`` of the mean NLL."""
        return self.mean_nll.exp()

    def increase(self, reference: ModelScores) -> Estimate:
        """Return the relative increase of perplexity, from NLL differences paired by window."""
        ratio = Estimate.of((self.nll.double() - reference.nll.double()).mean(1)).exp()
        return Estimate(ratio.mean - 1, ratio.error)


@dataclass(slots=True)
class Reference:
    """Data of the scored reference that is needed to compare other models: final hidden states, head and scores."""

    states: HiddenStates
    head: OutputHead
    scores: ModelScores

    def close(self) -> None:
        """Release the storage of the hidden states."""
        self.states.close()


def score_reference(
    model: PreTrainedModel, windows: Windows, directory: Path | None = None
) -> Reference:
    """Score the reference and store its final hidden states.

    Args:
        model: the reference.
        windows: windows of token ids to score.
        directory: directory to store the hidden states in; None stores them in memory.

    Raises:
        InputError: an NLL is NaN or infinite.
        RefusedError: the output head is not supported (see `checked_head`).
    """
    head = checked_head(model, windows.ids)
    count, length = windows.targets.shape
    shape = count, length, int(model.config.get_text_config().hidden_size)
    stored_states = InMemory(*shape) if directory is None else OnDisk(*shape, directory)
    return Reference(stored_states, head, _score(model, head, windows, store=stored_states))


def score(model: PreTrainedModel, windows: Windows, reference: Reference) -> ModelScores:
    """Score a model on the windows of its reference.

    Raises:
        InputError: its vocabulary size differs, or an NLL or a KL divergence is NaN or infinite.
        RefusedError: the output head is not supported (see `checked_head`).
    """
    head = checked_head(model, windows.ids)
    if head.vocabulary != reference.head.vocabulary:
        raise InputError(
            f"a vocabulary of {head.vocabulary}, the reference has {reference.head.vocabulary}",
            "compare a model with the one that it was made from",
        )
    return _score(model, head, windows, reference)


@torch.inference_mode()
def _score(
    model: PreTrainedModel,
    head: OutputHead,
    windows: Windows,
    reference: Reference | None = None,
    store: HiddenStates | None = None,
) -> ModelScores:
    """Score a model against ``reference``, or score the reference and write its final hidden states to ``store``."""
    targets = windows.targets
    nll, kl = torch.empty(targets.shape), torch.empty(targets.shape)
    agrees = torch.empty(targets.shape, dtype=torch.bool)
    for first, hidden in final_hidden(model, windows.ids):
        end = first + len(hidden)
        tokens, next_tokens = hidden.flatten(0, 1), targets[first:end].flatten()
        if store is not None:
            store.write(first, hidden.float())
        if reference is None:
            nll[first:end] = head.nll(tokens, next_tokens).view(len(hidden), -1)
        else:
            reference_hidden = reference.states.read(first, end).flatten(0, 1)
            token_metrics = compare_predictions(
                head, tokens, reference.head, reference_hidden, next_tokens
            )
            nll[first:end], kl[first:end], agrees[first:end] = (
                values.view(len(hidden), -1) for values in token_metrics
            )
        report_step("windows of the text", end, len(nll))
    if reference is None:
        return ModelScores(check_finite(nll, "the reference's NLL"))
    return ModelScores(
        check_finite(nll, "NLL"), Divergence(check_finite(kl, "KL divergence"), agrees)
    )


def final_hidden(model: PreTrainedModel, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(first window, hidden states [windows, length - 1, hidden])`` per micro-batch.

    The last token of each window is left out, because its prediction is not scored.
    """
    max_tokens, length = max_forward_tokens(model.device), ids.shape[1]
    windows_per_batch = max(1, max_tokens // length)
    with (
        cache_decoded_weights(model),
        _split_mlps(model, max_tokens) if length > max_tokens else nullcontext(),
    ):
        for first in range(0, len(ids), windows_per_batch):
            batch = ids[first : first + windows_per_batch].to(model.device)
            output = base_model(model)(batch, use_cache=False)
            yield first, output.last_hidden_state[:, :-1]


@contextmanager
def _split_mlps(model: PreTrainedModel, max_tokens: int) -> Iterator[None]:
    """Run the MLPs, the widest part of a block, on at most ``max_tokens`` tokens of a window at a time.

    This applies to families that QuantForge's decoder supports, whose blocks have a single ``mlp``; other families are
    not split.
    """
    is_supported = decoder_family(model.config.model_type) is not None
    blocks: Any = model.get_submodule(block_list_name(model)) if is_supported else ()

    def in_slices(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        return torch.cat(
            [forward(hidden_slice) for hidden_slice in torch.split(hidden, max_tokens, dim=1)],
            dim=1,
        )

    for block in blocks:
        block.mlp.forward = partial(in_slices, block.mlp.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.mlp.forward


def max_forward_tokens(device: torch.device) -> int:
    """Return the number of tokens per forward pass, which bounds the memory of activations."""
    return MAX_FORWARD_TOKENS.get(device.type, MAX_FORWARD_TOKENS["cuda"])


def check_finite(values: Tensor, name: str) -> Tensor:
    """Return per-token ``values`` ``[windows, tokens]`` if all of them are finite.

    Raises:
        InputError: a value is NaN or infinite, or there are no values; the message gives the position of the first one.
    """
    if not values.numel():
        raise InputError(f"{name}: no token was scored", "give a longer text (--text)")
    if not bool(values.isfinite().all()):
        window, token = values.isfinite().logical_not().nonzero()[0].tolist()
        raise InputError(
            f"{name} is {values[window, token].item()} at token {token + 1} of window {window}",
            "the weights are damaged, or activations overflow the model's type: try a float32 copy,"
            " `quantforge export MODEL --format plain --type F32`",
        )
    return values
