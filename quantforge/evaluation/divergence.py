"""Perplexity of a model, and its exact KL divergence from a reference, token by token.

Perplexity is ``exp`` of the mean negative log-likelihood per token. The divergence

    KL(p || q) = sum_v p_v (log p_v - log q_v) = sum_v p_v (a_v - b_v) - log-sum-exp(a) + log-sum-exp(b)

over the whole vocabulary, ``p`` the reference with logits ``a``, ``q`` the model with logits ``b``,
ranks quantized models far better, since differences of perplexity change sign from noise on small models and texts.

The model is transformers' own, with `runtime.linear.PackedLinear` in place of its quantized layers; everything is
computed in float32. It runs up to its final norm; its head is applied part by part (`head`), through the model's
own output layer, scaling and soft-capping. That this equals the model's own logits is checked on its
first tokens, so that a family whose head does something else is refused rather than mismeasured.

Stored logits of the reference would take ``4 * vocabulary`` bytes per token. What is kept instead
are its final hidden states (``4 * hidden`` bytes, 30 times less for a vocabulary of 128 k and a
width of 4096) and its head; its logits are computed again, part by part, next to those of the model.
That is exact, costs one more product with the head, and lets the reference itself
leave memory before the model comes in.

The standard error is taken over windows, whose tokens are not independent: ``sd / sqrt(windows)``
for the mean NLL, times the perplexity for the perplexity (the delta method). Two models that were
scored on the same windows are compared pair by pair: the differences have a standard error ten
times smaller than either perplexity.
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
from quantforge.evaluation.output_head import Head, checked_head, compare_predictions
from quantforge.evaluation.text_windows import Windows
from quantforge.model.hidden_states import HiddenStates, InMemory, OnDisk
from quantforge.model.model_parts import base_model, block_list_name
from quantforge.progress import report_step
from quantforge.runtime.linear import cache_decoded_weights

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


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per-token figures of a model against its reference, each ``[windows, length - 1]``: KL in nats, and agreement."""

    kl: Tensor
    agrees: Tensor

    @property
    def mean(self) -> Estimate:
        """Return the mean KL divergence in nats per token."""
        return Estimate.of(self.kl.double().mean(1))

    @property
    def agreement(self) -> Estimate:
        """Return the share of tokens for which both give the same most likely next token."""
        return Estimate.of(self.agrees.double().mean(1))

    def quantile(self, share: float) -> float:
        """Return the KL divergence that ``share`` of the tokens do not exceed."""
        ordered = self.kl.flatten().sort().values
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))].item()


@dataclass(frozen=True, slots=True)
class ModelScores:
    """Measurements of one model: NLL ``[windows, length - 1]`` in nats, divergence if there is one."""

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
    """What is kept of the reference once it has been scored: final hidden states, head, scores."""

    states: HiddenStates
    head: Head
    scores: ModelScores

    def close(self) -> None:
        """Release the hidden states."""
        self.states.close()


def score_reference(
    model: PreTrainedModel, windows: Windows, directory: Path | None = None
) -> Reference:
    """Score the reference, and keep its final hidden states.

    Args:
        model: the reference.
        windows: what is scored.
        directory: where the hidden states wait; in memory when left out.

    Raises:
        InputError: an NLL is NaN or infinite.
        RefusedError: its head is not understood (see `checked_head`).
    """
    head = checked_head(model, windows.ids)
    count, length = windows.targets.shape
    size = count, length, int(model.config.get_text_config().hidden_size)
    states = InMemory(*size) if directory is None else OnDisk(*size, directory)
    return Reference(states, head, _score(model, head, windows, keep=states))


def score(model: PreTrainedModel, windows: Windows, reference: Reference) -> ModelScores:
    """Score a model on the windows of its reference.

    Raises:
        InputError: its vocabulary is another, or an NLL or a KL divergence is NaN or infinite.
        RefusedError: its head is not understood (see `checked_head`).
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
    head: Head,
    windows: Windows,
    reference: Reference | None = None,
    keep: HiddenStates | None = None,
) -> ModelScores:
    """Score a model: against a ``reference``, or as the reference, whose final hidden states go to ``keep``."""
    targets = windows.targets
    nll, kl = torch.empty(targets.shape), torch.empty(targets.shape)
    agrees = torch.empty(targets.shape, dtype=torch.bool)
    for first, hidden in final_hidden(model, windows.ids):
        last = first + len(hidden)
        tokens, following = hidden.flatten(0, 1), targets[first:last].flatten()
        if keep is not None:
            keep.write(first, hidden.float())
        if reference is None:
            nll[first:last] = head.nll(tokens, following).view(len(hidden), -1)
        else:
            kept = reference.states.read(first, last).flatten(0, 1)
            figures = compare_predictions(head, tokens, reference.head, kept, following)
            nll[first:last], kl[first:last], agrees[first:last] = (
                values.view(len(hidden), -1) for values in figures
            )
        report_step("windows of the text", last, len(nll))
    if reference is None:
        return ModelScores(finite(nll, "the reference's NLL"))
    return ModelScores(finite(nll, "NLL"), Divergence(finite(kl, "KL divergence"), agrees))


def final_hidden(model: PreTrainedModel, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(first window, hidden states [windows, length - 1, hidden])`` per micro-batch.

    The last token of a window predicts nothing that is scored, and is left out.
    """
    most, length = forward_tokens(model.device), ids.shape[1]
    step = max(1, most // length)
    with cache_decoded_weights(model), _split_mlps(model, most) if length > most else nullcontext():
        for first in range(0, len(ids), step):
            batch = ids[first : first + step].to(model.device)
            output = base_model(model)(batch, use_cache=False)
            yield first, output.last_hidden_state[:, :-1]


@contextmanager
def _split_mlps(model: PreTrainedModel, most: int) -> Iterator[None]:
    """Run the MLPs, the widest part of a block, over at most ``most`` tokens of a window at a time.

    Those of families that our own decoder computes, whose blocks have one ``mlp``; others run as a whole.
    """
    known = decoder_family(model.config.model_type) is not None
    blocks: Any = model.get_submodule(block_list_name(model)) if known else ()

    def in_parts(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.cat([forward(part) for part in torch.split(x, most, dim=1)], dim=1)

    for block in blocks:
        block.mlp.forward = partial(in_parts, block.mlp.forward)
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
