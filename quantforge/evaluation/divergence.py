"""Divergence of a model from its reference: the exact KL divergence, token by token.

    KL(p || q) = sum_v p_v (log p_v - log q_v) = sum_v p_v (a_v - b_v) - log-sum-exp(a) + log-sum-exp(b)

over the whole vocabulary, ``p`` the reference with logits ``a``, ``q`` the model with logits ``b``. It
ranks quantized models far better than perplexity, whose differences change sign from noise on small
models and texts.

Stored logits of the reference would take ``4 * vocabulary`` bytes per token. What is kept instead
are its final hidden states (``4 * hidden`` bytes, 30 times less for a vocabulary of 128 k and a
width of 4096) and its head; its logits are computed again, part by part, next to those of the model
(see `head`). That is exact, costs one more product with the head, and lets the reference itself
leave memory before the model comes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.evaluation.head import Head, Sums, check_head, summed
from quantforge.evaluation.perplexity import Estimate, final_hidden, finite
from quantforge.evaluation.windows import Windows
from quantforge.execution.progress import tell
from quantforge.model.hidden_states import HiddenStates, InMemory, OnDisk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKED_TOKENS = 8


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


class Reference:
    """Remains of the reference once it has been scored: hidden states, head, scores."""

    def __init__(self, states: HiddenStates, head: Head, scores: ModelScores) -> None:
        self.states = states
        self.head = head
        self.scores = scores

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
        found = nll[first : first + len(hidden)].view(-1)
        for chunk in head.chunks(len(rows)):
            found[chunk] = summed(head, rows[chunk], wanted[chunk].to(rows.device)).nll.float()
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
        found = compared_rows((head, rows), (reference.head, theirs), wanted)
        for values, new in zip((nll, kl, agrees), found, strict=True):
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
