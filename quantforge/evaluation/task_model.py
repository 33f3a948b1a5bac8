"""A model that answers the requests of lm-evaluation-harness through our runtime.

Tokens are counted as other evaluations count them, so that figures compare. A continuation is what
the tokens of ``context + continuation`` have beyond those of the context. Spaces at the end of a
context belong to what follows. An empty context is the token that begins a text (BOS, or else the
end-of-text token). Every text begins with BOS where the tokenizer puts one. What is too long loses its beginning.

Logits of a continuation are computed from final hidden states, for its own tokens only: the head
never sees the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lm_eval.api.model import LM
from torch import Tensor

from quantforge.errors import InputError, UsageError
from quantforge.evaluation.divergence import forward_tokens
from quantforge.evaluation.output_head import CHECKED_TOKENS, checked_head
from quantforge.evaluation.tasks import ModelError
from quantforge.model.model_parts import base_model
from quantforge.runtime.cache import LayerScales
from quantforge.runtime.decoding import DecodingEngine, create_engine, generate_tokens
from quantforge.runtime.generation_options import Sampling
from quantforge_calibration.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEW_TOKENS = 256
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Generation:
    """How a text is continued.

    Attributes:
        stop: strings that end it; the result ends before the first of them.
        new_tokens: at most this many.
        sampling: how tokens are chosen.
    """

    stop: tuple[str, ...] = ()
    new_tokens: int = NEW_TOKENS
    sampling: Sampling = field(default_factory=Sampling)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Generation:
        """Read the arguments of a request, in the library's names.

        Raises:
            UsageError: one of them is not supported here, so that it would change nothing.
        """
        given = dict(arguments)
        stop = given.pop("until", [])
        most = given.pop("max_gen_toks", None) or given.pop("max_new_tokens", None) or NEW_TOKENS
        drawn = given.pop("do_sample", given.get("temperature", 0) > 0)
        temperature = given.pop("temperature", 1.0)
        sampling = Sampling(
            temperature=float(temperature) if drawn else 0.0,
            top_k=int(given.pop("top_k", 0)),
            top_p=float(given.pop("top_p", 1.0)),
            repetition_penalty=float(given.pop("repetition_penalty", 1.0)),
            seed=int(given.pop("seed", 0)),
        )
        if given:
            raise UsageError(
                f"generation arguments {', '.join(sorted(given))}", "leave them out of the task"
            )
        return cls((stop,) if isinstance(stop, str) else tuple(stop), int(most), sampling)


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens ``ids``, of which the last ``count`` are scored."""

    ids: tuple[int, ...]
    count: int


class TaskModel(LM):  # type: ignore[misc]
    """A model as the library asks it.

    Args:
        model: loaded, in the type in which it is to be measured.
        tokenizer: its tokenizer.
        positions: tokens that it can see.
        scales: of its KV cache, where they were measured.

    Raises:
        InputError: the tokenizer has no token to begin with.
        RefusedError: the model's head is not understood (see `checked_head`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: TextTokenizer,
        positions: int,
        scales: LayerScales | None = None,
    ) -> None:
        super().__init__()
        begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if begin is None:
            raise InputError(
                "the tokenizer has neither a token that begins a text nor one that ends it",
                "set bos_token or eos_token in tokenizer_config.json",
            )
        self._begin: int = begin
        self._prefix = [] if tokenizer.bos_id is None else [begin]
        self._model = model
        self._tokenizer = tokenizer
        self._positions = positions
        self._scales = scales
        self._head = checked_head(model, torch.full((1, min(CHECKED_TOKENS, positions)), begin))
        self._engine: DecodingEngine | None = None

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return what `continuations` does for requests of the library."""
        return _own(self.continuations, [request.args for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return what `texts` does for requests of the library."""
        return _own(self.texts, [request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return what `generate` does for each request of the library."""
        asked = [(request.args[0], Generation.of(request.args[1])) for request in requests]
        return [_own(self.generate, *request) for request in asked]

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return ``(log-likelihood in nats, is it the greedy one)`` of each ``(context, continuation)``."""
        return self._score([self.split(*pair) for pair in pairs])

    def texts(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each whole text in nats; long ones are cut by `disjoint`."""
        found = []
        for text in texts:
            parts = disjoint(self._tokenizer.encode(text), self._begin, self._positions)
            found.append(sum(value for value, _ in self._score(parts)))
        return found

    def generate(self, context: str, wanted: Generation) -> str:
        """Return the continuation of a text.

        Raises:
            InputError: more new tokens than the model has positions, or logits that are NaN or infinite.
        """
        room = self._positions - wanted.new_tokens
        if room < 1:
            raise InputError(
                f"{wanted.new_tokens} new tokens, the model has {self._positions} positions",
                "ask for fewer (max_gen_toks)",
            )
        ids = (self._prefix + self._tokenizer.encode(context))[-room:] or [self._begin]
        if self._engine is None:
            self._engine = create_engine(self._model, scales=self._scales)[0]
        found: list[int] = []
        text = ""
        for token in generate_tokens(self._engine, ids, wanted.new_tokens, wanted.sampling):
            if token == self._tokenizer.eos_id:
                break
            found.append(token)
            text = self._tokenizer.decode(found)
            if ends := [text.find(stop) for stop in wanted.stop if stop and stop in text]:
                return text[: min(ends)]
        return text

    def split(self, context: str, continuation: str) -> Scored:
        """Return the tokens of a context and its continuation; those of the continuation are scored, at least one."""
        stripped = context.rstrip()
        context, continuation = stripped, context[len(stripped) :] + continuation
        if context:
            before = self._prefix + self._tokenizer.encode(context)
            ids = self._prefix + self._tokenizer.encode(context + continuation)
            count = max(len(ids) - len(before), 1)
        else:
            ids = [self._begin, *self._tokenizer.encode(continuation)]
            count = len(ids) - 1
        ids = ids[-(self._positions + 1) :]  # as many as the model sees, and one to begin with
        return Scored(tuple(ids), min(count, len(ids) - 1))

    def _score(self, items: Sequence[Scored]) -> list[tuple[float, bool]]:
        found = [(0.0, True)] * len(items)  # what has no token to score is certain
        most = forward_tokens(self._model.device)
        asked = [place for place, item in enumerate(items) if item.count]
        for batch in batches([len(items[place].ids) - 1 for place in asked], most):
            places = [asked[index] for index in batch]
            scores = self._batch([items[place] for place in places])
            for place, values in zip(places, scores, strict=True):
                found[place] = values
        return found

    @torch.inference_mode()
    def _batch(self, items: Sequence[Scored]) -> Iterator[tuple[float, bool]]:
        """Score some texts together; shorter ones are padded after their end, which causal attention ignores."""
        longest = max(len(item.ids) for item in items) - 1
        ids = torch.full((len(items), longest), self._begin)
        for row, item in zip(ids, items, strict=True):
            row[: len(item.ids) - 1] = torch.tensor(item.ids[:-1])
        output = base_model(self._model)(ids.to(self._model.device), use_cache=False)
        for hidden, item in zip(output.last_hidden_state, items, strict=True):
            last = len(item.ids) - 1
            targets = torch.tensor(item.ids[-item.count :], device=hidden.device)
            yield self._likelihood(hidden[last - item.count : last], targets)

    def _likelihood(self, hidden: Tensor, targets: Tensor) -> tuple[float, bool]:
        total, greedy = 0.0, True
        for chunk in self._head.chunks(len(targets)):
            sums = self._head.sums(hidden[chunk], targets[chunk], find_best=True)
            nll = sums.nll
            if not bool(nll.isfinite().all()):
                raise InputError(
                    "a log-likelihood is NaN or infinite",
                    "the weights are damaged, or activations overflow this type",
                )
            total -= nll.sum().item()
            greedy &= bool((sums.best == targets[chunk]).all())
        return total, greedy


def disjoint(ids: Sequence[int], begin: int, positions: int) -> list[Scored]:
    """Cut a text so that each token is scored once, in windows of ``positions`` tokens; the first follows ``begin``.

    Every other window also has the token before it; the last one, which scores fewer, has as many
    tokens before it as the model has positions left for.
    """
    found = []
    for first in range(0, len(ids), positions):
        last = min(first + positions, len(ids))
        window = ids[max(0, last - positions - 1) : last] if first else (begin, *ids[:last])
        found.append(Scored(tuple(window), last - first))
    return found


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield indices of texts that are computed together: of similar lengths, at most ``most`` tokens with padding.

    A text that is longer by itself is computed alone.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    batch: list[int] = []
    for place in order:
        if batch and (len(batch) + 1) * lengths[batch[0]] > most:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _own(call: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function of ours from the library, and mark its exceptions as ours."""
    try:
        return call(*arguments)
    except Exception as error:  # any: `tasks.run` raises it again, after the library
        raise ModelError(error) from error
