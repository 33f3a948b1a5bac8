"""Perplexity of a model, and its exact KL divergence from a reference, token by token.

Perplexity is ``exp`` of the mean negative log-likelihood per token. The divergence

    KL(p || q) = sum_v p_v (log p_v - log q_v) = sum_v p_v (a_v - b_v) - log-sum-exp(a) + log-sum-exp(b)

over the whole vocabulary, ``p`` the reference with logits ``a``, ``q`` the model with logits ``b``,
ranks quantized models far better, since differences of perplexity change sign from noise on small models and texts.

The model runs up to its final norm; its head is applied part by part (`head`), through the model's
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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.evaluation.head import Head, Sums, check_head, summed
from quantforge.evaluation.windows import Windows
from quantforge.execution.progress import tell
from quantforge.model.hidden_states import HiddenStates, InMemory, OnDisk
from quantforge.model.inner import inner
from quantforge.runtime.decoder import decoder_family
from quantforge.runtime.linear import decoded_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKED_TOKENS = 8
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


@torch.inference_mode()
def score_reference(
    model: PreTrainedModel,
    windows: Windows,
    directory: Path | None = None,
) -> Reference:
    """Score the reference, and keep its final hidden states.

    Args:
        model: the reference.
        windows: what is scored.
        directory: where the hidden states wait; in memory when left out.

    Raises:
        InputError: an NLL is NaN or infinite.
        RefusedError: its head is not understood (see `check_head`).
    """
    head = Head(model)
    check_head(model, head, windows.ids[:1, :CHECKED_TOKENS].to(model.device))
    targets = windows.targets
    nll = torch.empty(targets.shape)
    count, length = targets.shape
    width: int = model.config.get_text_config().hidden_size
    states: HiddenStates = (
        OnDisk(count, length, width, directory)
        if directory is not None
        else InMemory(count, length, width)
    )
    for first, hidden in final_hidden(model, windows.ids):
        states.write(first, hidden.float())
        rows, wanted = hidden.flatten(0, 1), targets[first : first + len(hidden)].flatten()
        batch_nll = nll[first : first + len(hidden)].view(-1)
        for chunk in head.chunks(len(rows)):
            batch_nll[chunk] = summed(head, rows[chunk], wanted[chunk].to(rows.device)).nll.float()
        tell("windows of the text", first + len(hidden), len(nll))
    return Reference(states, head, ModelScores(finite(nll, "the reference's NLL")))


@torch.inference_mode()
def score(
    model: PreTrainedModel,
    windows: Windows,
    reference: Reference,
) -> ModelScores:
    """Score a model on the windows of its reference.

    Raises:
        InputError: its vocabulary is another, or an NLL or a KL divergence is NaN or infinite.
        RefusedError: its head is not understood (see `check_head`).
    """
    head = Head(model)
    if head.vocabulary != reference.head.vocabulary:
        raise InputError(
            f"a vocabulary of {head.vocabulary}, the reference has {reference.head.vocabulary}",
            "compare a model with the one that it was made from",
        )
    check_head(model, head, windows.ids[:1, :CHECKED_TOKENS].to(model.device))
    targets = windows.targets
    nll, kl = torch.empty(targets.shape), torch.empty(targets.shape)
    agrees = torch.empty(targets.shape, dtype=torch.bool)
    for first, hidden in final_hidden(model, windows.ids):
        last = first + len(hidden)
        rows, wanted = hidden.flatten(0, 1), targets[first:last].flatten()
        theirs = reference.states.read(first, last).flatten(0, 1)
        scores = compared_rows((head, rows), (reference.head, theirs), wanted)
        for values, new in zip((nll, kl, agrees), scores, strict=True):
            values[first:last].view(-1).copy_(new)
        tell("windows of the text", last, len(nll))
    return ModelScores(finite(nll, "NLL"), Divergence(finite(kl, "KL divergence"), agrees))


def compared_rows(
    model: tuple[Head, Tensor], reference: tuple[Head, Tensor], targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return NLL and KL divergence, float32, and whether the most likely tokens agree, each ``[rows]``.

    Args:
        model: its head, and its hidden states ``[rows, hidden]``, as many as there are.
        reference: likewise; on any device.
        targets: ``[rows]``, likewise.
    """
    (head, rows), (other, theirs) = model, reference
    nll, kl = torch.empty(len(rows)), torch.empty(len(rows))
    agrees = torch.empty(len(rows), dtype=torch.bool)
    for chunk in _cutter(head, other).chunks(len(rows)):
        ours, its, divergence = compared(
            (head, rows[chunk]),
            (other, theirs[chunk].to(rows.device)),
            targets[chunk].to(rows.device),
        )
        nll[chunk], kl[chunk] = ours.nll.float().cpu(), divergence.float().cpu()
        assert ours.best is not None
        assert its.best is not None
        agrees[chunk] = (ours.best == its.best).cpu()
    return nll, kl, agrees


def compared(
    model: tuple[Head, Tensor], reference: tuple[Head, Tensor], targets: Tensor
) -> tuple[Sums, Sums, Tensor]:
    """Take the sums of both, and the KL divergence, float64 ``[rows]``.

    Args:
        model: its head, and its hidden states ``[rows, hidden]``, rows of one chunk.
        reference: likewise.
        targets: ``[rows]``.
    """
    sums = Sums.of(targets, True), Sums.of(targets, True)
    apart = sums[0].total.clone()  # sum of exp(a - peak) (a - b)
    for part in _cutter(model[0], reference[0]).parts(len(targets)):
        ours, theirs = (head.logits(states, part) for head, states in (model, reference))
        difference = theirs - ours
        sums[0].add(ours, part)
        shrink = sums[1].add(theirs, part)
        apart = apart * shrink + difference.mul_(theirs).sum(-1).double()
    mean = apart / sums[1].total
    return sums[0], sums[1], mean - sums[1].log_sum + sums[0].log_sum


def _cutter(head: Head, other: Head) -> Head:
    """Return the head whose cuts of the vocabulary both heads can compute: that of one that is not cut, if any."""
    return other if head.cuttable else head


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
