"""The last step of a language model, a part of the vocabulary at a time: the logits never exist as a whole.

The logits of a window are the largest tensor of an evaluation (512 tokens of a vocabulary of 128 k
are 260 MB in float32, and their softmax as much again). What is wanted of them are sums over the
vocabulary, which can be taken part by part. With ``m`` the largest logit so far,

    S = sum_v exp(l_v - m),    log-sum-exp = m + log S,    nll = log-sum-exp - l_target

and a part with a larger logit multiplies what was summed by ``exp(m - m')``. The divergence of two
models (`divergence`) needs one more such sum. To cut the vocabulary rather than the hidden states reads
each weight of the head once for many rows of them. What is summed within a part is float32, what is
summed over parts float64.

Where a kernel keeps the rows of the head in another order, the hidden states are cut after all.

The head of most families is one matrix, a scale and a cap. Where that does not give the model's own logits
(`check_head`), the model's own code makes them: see `ModelEnding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantforge.architectures.configuration import FINAL_CAPS
from quantforge.errors import RefusedError
from quantforge.model.inner import head_of, inner
from quantforge.runtime.linear import PackedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 26}  # 8 MiB of float32 on a CPU
MOST_ROWS = 2048
LEAST_ROWS = 64  # fewer and the product with the head is bound by reading it


class Head:
    """Maker of logits from final hidden states.

    Args:
        model: whose head it is; only the output layer is kept.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config.get_text_config()
        output = head_of(model)
        if output is None:
            raise RefusedError(
                f"model_type {model.config.model_type!r}: its class does not say which layer makes logits",
                "this family cannot be evaluated yet",
            )
        self._output: nn.Module = output
        caps = (getattr(config, key, None) for key in FINAL_CAPS)
        self._cap: float | None = next(filter(None, caps), None)
        self._scale: float = getattr(config, "logit_scale", None) or 1.0
        self._scale *= getattr(config, "output_multiplier", None) or 1.0
        self._scale /= getattr(config, "logits_scaling", None) or 1.0
        self._dtype: torch.dtype = model.dtype
        self._most = CHUNK_LOGITS.get(model.device.type, CHUNK_LOGITS["cuda"])
        self.vocabulary = int(config.vocab_size)
        self.cuttable = self._weight(slice(0, 1)) is not None
        self._ending: ModelEnding | None = None

    def logits(self, hidden: Tensor, part: slice | None = None) -> Tensor:
        """Return logits ``[rows, part]`` in float32 for hidden states ``[rows, hidden]``.

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
            return self._output.rows(part)
        weight = getattr(self._output, "weight", None)
        return weight[part] if isinstance(weight, Tensor) else None

    def ended_by(self, model: PreTrainedModel) -> None:
        """Let the model's own code make the logits from now on, of the whole vocabulary at a time."""
        self._ending, self.cuttable = ModelEnding(model), False

    def plainer(self) -> Iterator[None]:
        """Yield while this head computes without the cap, then without the scale, then without both."""
        scale, cap = self._scale, self._cap
        for self._scale, self._cap in ((scale, None), (1.0, cap), (1.0, None)):
            yield

    def chunks(self, rows: int) -> Iterator[slice]:
        """Cut rows of hidden states, so that the logits of a chunk and a part stay small."""
        step = MOST_ROWS
        if not self.cuttable:
            step = min(MOST_ROWS, max(LEAST_ROWS, self._most // self.vocabulary))
        return (slice(first, min(first + step, rows)) for first in range(0, rows, step))

    def parts(self, rows: int) -> Iterator[slice]:
        """Cut the vocabulary for a chunk of rows."""
        step = max(1, self._most // max(rows, 1)) if self.cuttable else self.vocabulary
        ends = range(0, self.vocabulary, step)
        return (slice(first, min(first + step, self.vocabulary)) for first in ends)


@dataclass(slots=True)
class Sums:
    """Sums over the vocabulary of one model, for some rows; `add` the parts in turn."""

    targets: Tensor  # [rows]
    peak: Tensor
    total: Tensor  # float64
    wanted: Tensor  # the logit of the target
    best: Tensor | None  # the place of the peak, if it is asked for

    @classmethod
    def of(cls, targets: Tensor, places: bool = False) -> Sums:
        """Begin sums for ``targets`` ``[rows]``; with ``places``, which costs more, find the most likely tokens too."""
        floats = torch.full(targets.shape, -math.inf, device=targets.device)
        best = targets.clone() if places else None
        return cls(targets, floats, floats.double().zero_(), floats.clone(), best)

    def add(self, logits: Tensor, part: slice) -> Tensor:
        """Add a part; return what the totals before it are multiplied by.

        ``logits`` ``[rows, part]`` are overwritten by ``exp(logits - peak)``.
        """
        if self.best is None:
            high = logits.amax(-1)
        else:
            high, place = logits.max(-1)
            self.best = torch.where(high > self.peak, place + part.start, self.best)
        peak = torch.maximum(self.peak, high)  # NaN stays: a row with one has no figure
        inside = (self.targets >= part.start) & (self.targets < part.stop)
        at = (self.targets - part.start).clamp(0, logits.shape[1] - 1)
        self.wanted = torch.where(inside, logits.gather(1, at[:, None])[:, 0], self.wanted)
        shrink = (self.peak - peak).double().exp()
        self.total = self.total * shrink + logits.sub_(peak[:, None]).exp_().sum(-1).double()
        self.peak = peak
        return shrink

    @property
    def log_sum(self) -> Tensor:
        """Return the log-sum-exp, float64 ``[rows]``."""
        return self.peak.double() + self.total.log()

    @property
    def nll(self) -> Tensor:
        """Return ``-log p(target)``, float64 ``[rows]``."""
        return self.log_sum - self.wanted.double()


def summed(head: Head, hidden: Tensor, targets: Tensor, places: bool = False) -> Sums:
    """Take the sums of one model for hidden states ``[rows, hidden]``, rows of one chunk."""
    sums = Sums.of(targets, places)
    for part in head.parts(len(hidden)):
        sums.add(head.logits(hidden, part), part)
    return sums


def check_head(model: PreTrainedModel, head: Head, ids: Tensor) -> None:
    """Compare the head with the model's own logits on a few tokens ``[1, n]``.

    A family may state a scale or a cap that its class for several modalities does not apply: what fits counts. Where
    nothing does, there is more between the states and the output layer, and the model's own code computes it.

    Raises:
        RefusedError: they differ by more than rounding, with and without these.
    """
    own = model(ids, use_cache=False).logits[0].float()
    hidden = inner(model)(ids, use_cache=False).last_hidden_state[0]
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.05

    def fits() -> bool:
        ours = head.logits(hidden)
        return own.shape == ours.shape and torch.allclose(own, ours, tolerance, tolerance, True)

    if fits() or any(fits() for _ in head.plainer()):
        return
    with suppress(
        AttributeError, TypeError, ValueError
    ):  # of a class that asks its decoder for more than states
        head.ended_by(model)
        if fits():
            return
    raise RefusedError(
        f"model_type {model.config.model_type!r}: its logits are not its output layer applied "
        "to its final hidden states",
        "this family cannot be evaluated yet",
    )


class ModelEnding:
    """Compute logits from final hidden states by the model's own code.

    The model is copied without its decoder, in whose place a module returns the states that it is given: what remains
    is what follows the decoder, e.g. a layer before the output layer, or a factor that no configuration names.

    Raises:
        ValueError: the decoder lies within another part of the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = inner(model)
        name = next((name for name, module in model.named_children() if module is decoder), None)
        if name is None:
            raise ValueError("its decoder lies within another part")
        self._place = _Given()
        self._model = copy(model)
        vars(self._model).pop("forward", None)  # one that was put there is that of the model itself
        self._model._modules = {**model._modules, name: self._place}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[rows, vocab]`` in float32 for final hidden states ``[rows, hidden]``."""
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
