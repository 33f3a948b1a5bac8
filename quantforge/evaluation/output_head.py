"""Compute logits from final hidden states one slice of the vocabulary at a time, to bound memory.

The logits of a window are the largest tensor of an evaluation (512 tokens with a vocabulary of 128 k are 260 MB in
float32, and their softmax as much again). Only sums over the vocabulary are needed, which can be accumulated slice by
slice. With ``m`` the largest logit so far,

    S = sum_v exp(l_v - m),    log-sum-exp = m + log S,    nll = log-sum-exp - l_target

and a slice with a larger logit ``m'`` multiplies the earlier sums by ``exp(m - m')``. The KL divergence of two models
needs one more such sum (`DivergenceSums`). The vocabulary is split rather than the hidden states, so that each weight
of the head is read once for many tokens. Sums within a slice are float32, sums over slices float64. If a kernel stores
the rows of the head in another order, the hidden states are split instead.

The head of most families is one matrix, a scale and a soft cap. If these do not reproduce the model's own logits
(`checked_head`), the model's own code computes them: see `NativeHead`.
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

MAX_CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 26}  # 8 MiB of float32 on a CPU
MAX_CHUNK_TOKENS = 2048
MIN_CHUNK_TOKENS = 64  # with fewer tokens, reading the weight dominates the matrix product
CHECKED_TOKENS = 8


@torch.inference_mode()
def checked_head(model: PreTrainedModel, ids: Tensor) -> OutputHead:
    """Build the output head of a model and check it against the model's own logits for a few tokens.

    A configuration may declare a scale or a cap that the model class (e.g. of a multimodal model) does not apply, so
    all combinations are tried. If none matches, there are other operations between the hidden states and the output
    layer, and the model's own code is used.

    Args:
        model: the model.
        ids: token ids ``[windows, length]``, of which the first `CHECKED_TOKENS` are compared.

    Raises:
        RefusedError: no variant reproduces the logits up to rounding errors.
    """
    ids = ids[:1, :CHECKED_TOKENS].to(model.device)
    model_logits = model(ids, use_cache=False).logits[0].float()
    hidden = base_model(model)(ids, use_cache=False).last_hidden_state[0]
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.05

    def matches_model(head: OutputHead) -> bool:
        """Return whether a head reproduces the model's own logits."""
        logits = head.logits(hidden)
        same_shape = model_logits.shape == logits.shape
        return same_shape and torch.allclose(model_logits, logits, tolerance, tolerance, True)

    for scaled, capped in ((True, True), (True, False), (False, True), (False, False)):
        head = OutputHead(model, scaled=scaled, capped=capped)
        if matches_model(head):
            return head
    # Raised by classes that use more of the decoder's output than hidden states.
    with suppress(AttributeError, TypeError, ValueError):
        head = OutputHead(model, native_head=NativeHead(model))
        if matches_model(head):
            return head
    raise RefusedError(
        f"model_type {model.config.model_type!r}: its logits are not its output layer applied "
        "to its final hidden states",
        "this family cannot be evaluated yet",
    )


class OutputHead:
    """Output head that computes logits from final hidden states; see `checked_head`.

    Args:
        model: the model; only its output layer is kept.
        scaled: apply the logit scale of the configuration.
        capped: apply the logit soft cap of the configuration.
        native_head: computes the logits instead of the output layer, for the whole vocabulary at once.

    Attributes:
        vocabulary: size of the vocabulary.
        splits_vocabulary: whether logits can be computed for a slice of the vocabulary.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        scaled: bool = True,
        capped: bool = True,
        native_head: NativeHead | None = None,
    ) -> None:
        config: Any = model.config.get_text_config()
        output_layer_module = output_layer(model)
        if output_layer_module is None:
            raise RefusedError(
                f"model_type {model.config.model_type!r}: its class does not say which layer makes logits",
                "this family cannot be evaluated yet",
            )
        self._output: nn.Module = output_layer_module
        self._native_head = native_head
        self._scale = 1.0
        if scaled:
            self._scale *= getattr(config, "logit_scale", None) or 1.0
            self._scale *= getattr(config, "output_multiplier", None) or 1.0
            self._scale /= getattr(config, "logits_scaling", None) or 1.0
        caps = (getattr(config, key, None) for key in FINAL_SOFTCAP_KEYS if capped)
        self._cap: float | None = next(filter(None, caps), None)
        self._dtype: torch.dtype = model.dtype
        self._max_logits = MAX_CHUNK_LOGITS.get(model.device.type, MAX_CHUNK_LOGITS["cuda"])
        self.vocabulary = int(config.vocab_size)
        self.splits_vocabulary = native_head is None and self._weight_rows(slice(0, 1)) is not None

    def logits(self, hidden: Tensor, vocabulary_slice: slice | None = None) -> Tensor:
        """Return logits in float32 for hidden states ``[tokens, hidden]``.

        Args:
            hidden: final hidden states.
            vocabulary_slice: one of `vocabulary_slices`; None for the whole vocabulary.

        Returns:
            Logits ``[tokens, slice]``.
        """
        hidden = hidden.to(self._dtype)
        if self._native_head is not None:
            return self._native_head.logits(hidden)
        if vocabulary_slice is None or vocabulary_slice == slice(0, self.vocabulary):
            logits: Tensor = self._output(hidden)
        else:
            weight, bias = self._weight_rows(vocabulary_slice), getattr(self._output, "bias", None)
            assert weight is not None
            logits = nn.functional.linear(
                hidden, weight, None if bias is None else bias[vocabulary_slice]
            )
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits.float()

    def _weight_rows(self, vocabulary_slice: slice) -> Tensor | None:
        """Return the rows of the weight for a slice of the vocabulary, or None if they cannot be read separately."""
        if isinstance(self._output, PackedLinear):
            return self._output.decoded_rows(vocabulary_slice)
        weight = getattr(self._output, "weight", None)
        return weight[vocabulary_slice] if isinstance(weight, Tensor) else None

    def token_slices(self, tokens: int) -> Iterator[slice]:
        """Split ``tokens`` tokens into slices whose logits for one vocabulary slice fit into the memory limit."""
        step = MAX_CHUNK_TOKENS
        if not self.splits_vocabulary:
            step = min(MAX_CHUNK_TOKENS, max(MIN_CHUNK_TOKENS, self._max_logits // self.vocabulary))
        return (slice(first, min(first + step, tokens)) for first in range(0, tokens, step))

    def vocabulary_slices(self, tokens: int) -> Iterator[slice]:
        """Split the vocabulary so that the logits of a slice for ``tokens`` tokens fit into the memory limit."""
        step = (
            max(1, self._max_logits // max(tokens, 1))
            if self.splits_vocabulary
            else self.vocabulary
        )
        starts = range(0, self.vocabulary, step)
        return (slice(first, min(first + step, self.vocabulary)) for first in starts)

    def sum_logits(self, hidden: Tensor, targets: Tensor, *, find_best: bool = False) -> LogitSums:
        """Return sums over the vocabulary for hidden states ``[tokens, hidden]`` of one of the `token_slices`."""
        sums = LogitSums(targets, find_best=find_best)
        for vocabulary_slice in self.vocabulary_slices(len(hidden)):
            sums.add(self.logits(hidden, vocabulary_slice), vocabulary_slice)
        return sums

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the negative log-likelihood of the target tokens, float32 ``[tokens]``.

        Args:
            hidden: final hidden states ``[tokens, hidden]``, any number of tokens.
            targets: ids of the tokens that follow, ``[tokens]``, on any device.
        """
        nll = torch.empty(len(hidden))
        for chunk in self.token_slices(len(hidden)):
            nll[chunk] = self.sum_logits(
                hidden[chunk], targets[chunk].to(hidden.device)
            ).nll.float()
        return nll


class LogitSums:
    """Sums over the vocabulary of one model's logits, accumulated slice by slice with `add`.

    Args:
        targets: ids of the tokens that follow, ``[tokens]``.
        find_best: also find the most likely tokens, which costs more.

    Attributes:
        best: ids of the most likely tokens ``[tokens]``; valid with ``find_best`` only.
        total: sum of ``exp(logit - peak)``, float64 ``[tokens]``; ``peak`` is the largest logit so far.
    """

    def __init__(self, targets: Tensor, *, find_best: bool = False) -> None:
        self._targets = targets
        self._find_best = find_best
        self._peak = torch.full(targets.shape, -math.inf, device=targets.device)
        self._target_logits = self._peak.clone()
        self.total = self._peak.double().zero_()
        self.best = targets.clone()

    def add(self, logits: Tensor, vocabulary_slice: slice) -> tuple[Tensor, Tensor]:
        """Add the logits ``[tokens, slice]`` of a vocabulary slice; their memory is overwritten.

        Returns:
            ``exp(logit - peak)`` of the slice, and the factor by which sums of earlier slices must be multiplied,
            because the peak may have risen: float64 ``[tokens]``.
        """
        if self._find_best:
            slice_max, index = logits.max(-1)
            self.best = torch.where(
                slice_max > self._peak, index + vocabulary_slice.start, self.best
            )
        else:
            slice_max = logits.amax(-1)
        peak = torch.maximum(self._peak, slice_max)  # propagates NaN, which the caller reports
        in_slice = (self._targets >= vocabulary_slice.start) & (
            self._targets < vocabulary_slice.stop
        )
        target_index = (self._targets - vocabulary_slice.start).clamp(0, logits.shape[1] - 1)
        target_logits = logits.gather(1, target_index[:, None])[:, 0]
        self._target_logits = torch.where(in_slice, target_logits, self._target_logits)
        rescale = (self._peak - peak).double().exp()
        exponentials = logits.sub_(peak[:, None]).exp_()
        self.total = self.total * rescale + exponentials.sum(-1).double()
        self._peak = peak
        return exponentials, rescale

    @property
    def log_sum(self) -> Tensor:
        """Return the log-sum-exp, float64 ``[tokens]``."""
        return self._peak.double() + self.total.log()

    @property
    def nll(self) -> Tensor:
        """Return ``-log p(target)``, float64 ``[tokens]``."""
        return self.log_sum - self._target_logits.double()


class DivergenceSums:
    """Sums over the vocabulary that yield the KL divergence of a model from its reference, accumulated with `add`.

    Args:
        targets: ids of the tokens that follow, ``[tokens]``.

    Attributes:
        model: sums of the model's logits.
        reference: sums of the reference's logits.
    """

    def __init__(self, targets: Tensor) -> None:
        self.model = LogitSums(targets, find_best=True)
        self.reference = LogitSums(targets, find_best=True)
        self._weighted_difference = self.model.total.clone()  # sum of exp(a - peak) (a - b)

    def add(self, logits: Tensor, reference_logits: Tensor, vocabulary_slice: slice) -> None:
        """Add the logits ``[tokens, slice]`` of both models for a vocabulary slice; their memory is overwritten."""
        difference = reference_logits - logits
        self.model.add(logits, vocabulary_slice)
        exponentials, rescale = self.reference.add(reference_logits, vocabulary_slice)
        slice_sum = difference.mul_(exponentials).sum(-1).double()
        self._weighted_difference = self._weighted_difference * rescale + slice_sum

    @property
    def kl(self) -> Tensor:
        """Return the KL divergence, float64 ``[tokens]``."""
        mean = self._weighted_difference / self.reference.total
        return mean - self.reference.log_sum + self.model.log_sum


def compare_predictions(
    head: OutputHead,
    hidden: Tensor,
    reference_head: OutputHead,
    reference_hidden: Tensor,
    targets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare the next-token distributions of a model and its reference token by token.

    Args:
        head: output head of the model.
        hidden: final hidden states of the model ``[tokens, hidden]``, any number of tokens.
        reference_head: output head of the reference.
        reference_hidden: final hidden states of the reference, on any device.
        targets: ids of the tokens that follow, ``[tokens]``, on any device.

    Returns:
        NLL of the model and KL divergence, float32, and whether the most likely tokens agree, each ``[tokens]``.
    """
    nll, kl = torch.empty(len(hidden)), torch.empty(len(hidden))
    agrees = torch.empty(len(hidden), dtype=torch.bool)
    slicing_head = reference_head if head.splits_vocabulary else head  # both heads use its slices
    for chunk in slicing_head.token_slices(len(hidden)):
        states = hidden[chunk]
        reference_states = reference_hidden[chunk].to(states.device)
        sums = DivergenceSums(targets[chunk].to(states.device))
        for vocabulary_slice in slicing_head.vocabulary_slices(len(states)):
            sums.add(
                head.logits(states, vocabulary_slice),
                reference_head.logits(reference_states, vocabulary_slice),
                vocabulary_slice,
            )
        nll[chunk], kl[chunk] = sums.model.nll.float().cpu(), sums.kl.float().cpu()
        agrees[chunk] = (sums.model.best == sums.reference.best).cpu()
    return nll, kl, agrees


class NativeHead:
    """Compute logits from final hidden states with the model's own code.

    The model is copied with its decoder replaced by a stub that returns given hidden states. What remains is everything
    after the decoder, e.g. a layer before the output layer, or a factor that no configuration key declares.

    Raises:
        ValueError: the decoder is not a direct child of the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = base_model(model)
        name = next((name for name, module in model.named_children() if module is decoder), None)
        if name is None:
            raise ValueError("its decoder lies within another part")
        self._stub = _DecoderStub()
        self._model = copy(model)
        vars(self._model).pop("forward", None)  # an instance's forward would run the original model
        self._model._modules = {**model._modules, name: self._stub}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[tokens, vocab]`` in float32 for final hidden states ``[tokens, hidden]``."""
        self._stub.output = _StubOutput(hidden[None])
        try:
            ids = hidden.new_zeros((1, len(hidden))).long()
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._stub.output = None
        return logits.float()


class _StubOutput:
    """Decoder output with final hidden states; every other attribute is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _DecoderStub(nn.Module):
    """Module that replaces a decoder and returns the hidden states assigned to it."""

    def __init__(self) -> None:
        super().__init__()
        self.output: _StubOutput | None = None

    def forward(self, *_: Any, **__: Any) -> _StubOutput | None:
        """Return the assigned hidden states and ignore all arguments."""
        return self.output
