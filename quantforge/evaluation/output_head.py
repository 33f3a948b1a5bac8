"""The last step of a language model, a part of the vocabulary at a time: the logits never exist as a whole.

The logits of a window are the largest tensor of an evaluation (512 tokens of a vocabulary of 128 k
are 260 MB in float32, and their softmax as much again). All that is needed of them are sums over the
vocabulary, which can be added up part by part. With ``m`` the largest logit so far,

    S = sum_v exp(l_v - m),    log-sum-exp = m + log S,    nll = log-sum-exp - l_target

and a part with a larger logit multiplies what was summed by ``exp(m - m')``. The divergence of two
models needs one more such sum (`DivergenceSums`). The vocabulary is split rather than the hidden states,
so that each weight of the head is read once for many tokens. Sums within a part are float32, sums
over parts float64. Where a kernel keeps the rows of the head in another order, the hidden states are split.

The head of most families is one matrix, a scale and a cap. Where that does not give the model's own logits
(`checked_head`), the model's own code makes them: see `ModelEnding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantforge.architectures.configuration import FINAL_SOFTCAP_KEYS
from quantforge.errors import RefusedError
from quantforge.model.model_parts import base_model, output_layer
from quantforge.runtime.linear import PackedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 26}  # 8 MiB of float32 on a CPU
MOST_TOKENS = 2048
LEAST_TOKENS = 64  # fewer and the product with the head is bound by reading it
CHECKED_TOKENS = 8


@torch.inference_mode()
def checked_head(model: PreTrainedModel, ids: Tensor) -> Head:
    """Return the head of a model, whose logits equal the model's own on a few tokens.

    A family may state a scale or a cap that its class for several modalities does not apply: what fits counts. Where
    nothing does, there is more between the states and the output layer, and the model's own code computes it.

    Args:
        model: whose head it is.
        ids: token ids ``[windows, length]``, of which the first `CHECKED_TOKENS` are compared.

    Raises:
        RefusedError: the logits differ by more than rounding in any case.
    """
    ids = ids[:1, :CHECKED_TOKENS].to(model.device)
    own = model(ids, use_cache=False).logits[0].float()
    hidden = base_model(model)(ids, use_cache=False).last_hidden_state[0]
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.05

    def fits(head: Head) -> bool:
        logits = head.logits(hidden)
        same_shape = own.shape == logits.shape
        return same_shape and torch.allclose(own, logits, tolerance, tolerance, True)

    for scaled, capped in ((True, True), (True, False), (False, True), (False, False)):
        head = Head(model, scaled=scaled, capped=capped)
        if fits(head):
            return head
    # Errors of a class that asks its decoder for more than states.
    with suppress(AttributeError, TypeError, ValueError):
        head = Head(model, ending=ModelEnding(model))
        if fits(head):
            return head
    raise RefusedError(
        f"model_type {model.config.model_type!r}: its logits are not its output layer applied "
        "to its final hidden states",
        "this family cannot be evaluated yet",
    )


class Head:
    """Maker of logits from final hidden states; see `checked_head`.

    Args:
        model: whose head it is; only the output layer is kept.
        scaled: multiply the logits as the configuration says.
        capped: cap them as the configuration says.
        ending: makes the logits in place of the output layer, of the whole vocabulary at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        scaled: bool = True,
        capped: bool = True,
        ending: ModelEnding | None = None,
    ) -> None:
        config: Any = model.config.get_text_config()
        output = output_layer(model)
        if output is None:
            raise RefusedError(
                f"model_type {model.config.model_type!r}: its class does not say which layer makes logits",
                "this family cannot be evaluated yet",
            )
        self._output: nn.Module = output
        self._ending = ending
        self._scale = 1.0
        if scaled:
            self._scale *= getattr(config, "logit_scale", None) or 1.0
            self._scale *= getattr(config, "output_multiplier", None) or 1.0
            self._scale /= getattr(config, "logits_scaling", None) or 1.0
        caps = (getattr(config, key, None) for key in FINAL_SOFTCAP_KEYS if capped)
        self._cap: float | None = next(filter(None, caps), None)
        self._dtype: torch.dtype = model.dtype
        self._most = CHUNK_LOGITS.get(model.device.type, CHUNK_LOGITS["cuda"])
        self.vocabulary = int(config.vocab_size)
        self.splits_vocabulary = ending is None and self._weight(slice(0, 1)) is not None

    def logits(self, hidden: Tensor, part: slice | None = None) -> Tensor:
        """Return logits ``[tokens, part]`` in float32 for hidden states ``[tokens, hidden]``.

        Args:
            hidden: final hidden states.
            part: of the vocabulary, one of `parts`; all of it when left out.
        """
        hidden = hidden.to(self._dtype)
        if self._ending is not None:
            return self._ending.logits(hidden)
        if part is None or part == slice(0, self.vocabulary):
            logits: Tensor = self._output(hidden)
        else:
            weight, bias = self._weight(part), getattr(self._output, "bias", None)
            assert weight is not None
            logits = nn.functional.linear(hidden, weight, None if bias is None else bias[part])
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits.float()

    def _weight(self, part: slice) -> Tensor | None:
        """Return some rows of the weight, or None where they cannot be had."""
        if isinstance(self._output, PackedLinear):
            return self._output.decoded_rows(part)
        weight = getattr(self._output, "weight", None)
        return weight[part] if isinstance(weight, Tensor) else None

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Split hidden states, so that the logits of a chunk and a part stay small."""
        step = MOST_TOKENS
        if not self.splits_vocabulary:
            step = min(MOST_TOKENS, max(LEAST_TOKENS, self._most // self.vocabulary))
        return (slice(first, min(first + step, tokens)) for first in range(0, tokens, step))

    def parts(self, tokens: int) -> Iterator[slice]:
        """Split the vocabulary, for a chunk of so many tokens."""
        step = max(1, self._most // max(tokens, 1)) if self.splits_vocabulary else self.vocabulary
        ends = range(0, self.vocabulary, step)
        return (slice(first, min(first + step, self.vocabulary)) for first in ends)

    def sums(self, hidden: Tensor, targets: Tensor, *, find_best: bool = False) -> LogitSums:
        """Return the sums over the vocabulary for hidden states ``[tokens, hidden]``, those of one of `chunks`."""
        sums = LogitSums(targets, find_best=find_best)
        for part in self.parts(len(hidden)):
            sums.add(self.logits(hidden, part), part)
        return sums

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the NLL of the tokens that follow, float32 ``[tokens]``.

        Args:
            hidden: final hidden states ``[tokens, hidden]``, as many as there are.
            targets: the tokens that follow, ``[tokens]``; on any device.
        """
        nll = torch.empty(len(hidden))
        for chunk in self.chunks(len(hidden)):
            nll[chunk] = self.sums(hidden[chunk], targets[chunk].to(hidden.device)).nll.float()
        return nll


class LogitSums:
    """Sums over the vocabulary of one model's logits for some tokens; `add` the parts in turn.

    Args:
        targets: the tokens that follow, ``[tokens]``.
        find_best: also find the most likely tokens, which costs more.

    Attributes:
        best: the most likely tokens ``[tokens]``, if they are asked for.
        total: sum of ``exp(logit - peak)``, float64 ``[tokens]``; ``peak`` is the largest logit so far.
    """

    def __init__(self, targets: Tensor, *, find_best: bool = False) -> None:
        self._targets = targets
        self._find_best = find_best
        self._peak = torch.full(targets.shape, -math.inf, device=targets.device)
        self._target_logits = self._peak.clone()
        self.total = self._peak.double().zero_()
        self.best = targets.clone()

    def add(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Add the logits ``[tokens, part]`` of a part, whose memory is used for the weights.

        Returns:
            The weights ``exp(logit - peak)`` of the part, and by what sums of earlier parts are multiplied, since
            the peak may have risen: float64 ``[tokens]``.
        """
        if self._find_best:
            high, place = logits.max(-1)
            self.best = torch.where(high > self._peak, place + part.start, self.best)
        else:
            high = logits.amax(-1)
        peak = torch.maximum(self._peak, high)  # NaN stays: a token with one has no figure
        inside = (self._targets >= part.start) & (self._targets < part.stop)
        at = (self._targets - part.start).clamp(0, logits.shape[1] - 1)
        own = logits.gather(1, at[:, None])[:, 0]
        self._target_logits = torch.where(inside, own, self._target_logits)
        shrink = (self._peak - peak).double().exp()
        weights = logits.sub_(peak[:, None]).exp_()
        self.total = self.total * shrink + weights.sum(-1).double()
        self._peak = peak
        return weights, shrink

    @property
    def log_sum(self) -> Tensor:
        """Return the log-sum-exp, float64 ``[tokens]``."""
        return self._peak.double() + self.total.log()

    @property
    def nll(self) -> Tensor:
        """Return ``-log p(target)``, float64 ``[tokens]``."""
        return self.log_sum - self._target_logits.double()


class DivergenceSums:
    """Sums over the vocabulary that give the KL divergence of a model from its reference; `add` the parts in turn.

    Args:
        targets: the tokens that follow, ``[tokens]``.

    Attributes:
        model: sums of the model.
        reference: sums of the reference.
    """

    def __init__(self, targets: Tensor) -> None:
        self.model = LogitSums(targets, find_best=True)
        self.reference = LogitSums(targets, find_best=True)
        self._difference = self.model.total.clone()  # sum of exp(a - peak) (a - b)

    def add(self, logits: Tensor, reference_logits: Tensor, part: slice) -> None:
        """Add the logits ``[tokens, part]`` of both for a part, whose memory is used for what is summed."""
        difference = reference_logits - logits
        self.model.add(logits, part)
        weights, shrink = self.reference.add(reference_logits, part)
        summed = difference.mul_(weights).sum(-1).double()
        self._difference = self._difference * shrink + summed

    @property
    def kl(self) -> Tensor:
        """Return the KL divergence, float64 ``[tokens]``."""
        mean = self._difference / self.reference.total
        return mean - self.reference.log_sum + self.model.log_sum


def compare_predictions(
    head: Head, hidden: Tensor, reference_head: Head, reference_hidden: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare what a model predicts with what its reference predicts, token by token.

    Args:
        head: the model's.
        hidden: its final hidden states ``[tokens, hidden]``, as many as there are.
        reference_head: the reference's.
        reference_hidden: likewise; on any device.
        targets: the tokens that follow, ``[tokens]``; on any device.

    Returns:
        NLL of the model and KL divergence, float32, and whether the most likely tokens agree, each ``[tokens]``.
    """
    nll, kl = torch.empty(len(hidden)), torch.empty(len(hidden))
    agrees = torch.empty(len(hidden), dtype=torch.bool)
    narrower = reference_head if head.splits_vocabulary else head  # both are split as it can be
    for chunk in narrower.chunks(len(hidden)):
        own = hidden[chunk]
        others = reference_hidden[chunk].to(own.device)
        sums = DivergenceSums(targets[chunk].to(own.device))
        for part in narrower.parts(len(own)):
            sums.add(head.logits(own, part), reference_head.logits(others, part), part)
        nll[chunk], kl[chunk] = sums.model.nll.float().cpu(), sums.kl.float().cpu()
        agrees[chunk] = (sums.model.best == sums.reference.best).cpu()
    return nll, kl, agrees


class ModelEnding:
    """Compute logits from final hidden states by the model's own code.

    The model is copied without its decoder, in whose place a module returns the states that it is given: what remains
    is what follows the decoder, e.g. a layer before the output layer, or a factor that no configuration names.

    Raises:
        ValueError: the decoder lies within another part of the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = base_model(model)
        name = next((name for name, module in model.named_children() if module is decoder), None)
        if name is None:
            raise ValueError("its decoder lies within another part")
        self._place = _Given()
        self._model = copy(model)
        vars(self._model).pop("forward", None)  # one that was put there is that of the model itself
        self._model._modules = {**model._modules, name: self._place}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[tokens, vocab]`` in float32 for final hidden states ``[tokens, hidden]``."""
        self._place.given = _States(hidden[None])
        try:
            ids = hidden.new_zeros((1, len(hidden))).long()
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._place.given = None
        return logits.float()


class _States:
    """Output of a decoder: final hidden states, and nothing else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _Given(nn.Module):
    """Module in the place of a decoder: returns the states that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: _States | None = None

    def forward(self, *_: Any, **__: Any) -> _States | None:
        """Return the states; arguments are not looked at."""
        return self.given
