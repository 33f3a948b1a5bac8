"""Adapter that lets lm-evaluation-harness run its tasks on a model in QuantForge's runtime.

Tokens are counted as in other evaluations, so that results are comparable. The tokens of a continuation are those that
``context + continuation`` has in addition to the context. Trailing spaces of a context belong to the continuation. An
empty context is replaced by the BOS token, or else the end-of-text token. Every text starts with BOS if the tokenizer
adds one. Sequences that are too long are truncated at their beginning.

Logits are computed from the final hidden states of the continuation's tokens only, never for the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lm_eval.api.model import LM
from torch import Tensor

from quantforge.errors import InputError, UsageError
from quantforge.evaluation.divergence import max_forward_tokens
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
class GenerationArguments:
    """How to continue a text.

    Attributes:
        stop: stop strings; the result ends before the first one that occurs.
        new_tokens: maximum number of new tokens.
        sampling: how tokens are sampled.
    """

    stop: tuple[str, ...] = ()
    new_tokens: int = NEW_TOKENS
    sampling: Sampling = field(default_factory=Sampling)

    @classmethod
    def from_request(cls, arguments: Mapping[str, Any]) -> GenerationArguments:
        """Parse the generation arguments of an lm-eval request.

        Raises:
            UsageError: an argument is not supported and would be ignored.
        """
        remaining = dict(arguments)
        stop = remaining.pop("until", [])
        max_tokens = (
            remaining.pop("max_gen_toks", None)
            or remaining.pop("max_new_tokens", None)
            or NEW_TOKENS
        )
        sampled = remaining.pop("do_sample", remaining.get("temperature", 0) > 0)
        temperature = remaining.pop("temperature", 1.0)
        sampling = Sampling(
            temperature=float(temperature) if sampled else 0.0,
            top_k=int(remaining.pop("top_k", 0)),
            top_p=float(remaining.pop("top_p", 1.0)),
            repetition_penalty=float(remaining.pop("repetition_penalty", 1.0)),
            seed=int(remaining.pop("seed", 0)),
        )
        if remaining:
            raise UsageError(
                f"generation arguments {', '.join(sorted(remaining))}", "leave them out of the task"
            )
        return cls((stop,) if isinstance(stop, str) else tuple(stop), int(max_tokens), sampling)


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """Token ids of a sequence, of which the last ``count`` are scored."""

    ids: tuple[int, ...]
    count: int


class TaskModel(LM):  # type: ignore[misc]
    """A model behind the interface that lm-evaluation-harness calls.

    Args:
        model: the loaded model, in the dtype to measure.
        tokenizer: tokenizer of the model.
        positions: context length in tokens.
        scales: scales of the KV cache, if the checkpoint has any.

    Raises:
        InputError: the tokenizer has neither a BOS nor an end-of-text token.
        RefusedError: the output head is not supported (see `checked_head`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: TextTokenizer,
        positions: int,
        scales: LayerScales | None = None,
    ) -> None:
        super().__init__()
        start_token = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if start_token is None:
            raise InputError(
                "the tokenizer has neither a token that begins a text nor one that ends it",
                "set bos_token or eos_token in tokenizer_config.json",
            )
        self._start_token: int = start_token
        self._prefix = [] if tokenizer.bos_id is None else [start_token]
        self._model = model
        self._tokenizer = tokenizer
        self._positions = positions
        self._scales = scales
        self._head = checked_head(
            model, torch.full((1, min(CHECKED_TOKENS, positions)), start_token)
        )
        self._engine: DecodingEngine | None = None

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Score lm-eval requests with `score_continuations`."""
        return _mark_model_errors(self.score_continuations, [request.args for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Score lm-eval requests with `score_texts`."""
        return _mark_model_errors(self.score_texts, [request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answer lm-eval requests with `generate`."""
        parsed = [
            (request.args[0], GenerationArguments.from_request(request.args[1]))
            for request in requests
        ]
        return [_mark_model_errors(self.generate, *request) for request in parsed]

    def score_continuations(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return ``(log-likelihood in nats, whether it is the greedy one)`` for each ``(context, continuation)``."""
        return self._score([self.encode_pair(*pair) for pair in pairs])

    def score_texts(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each whole text in nats; long texts are cut by `disjoint_windows`."""
        log_likelihoods = []
        for text in texts:
            windows = disjoint_windows(
                self._tokenizer.encode(text), self._start_token, self._positions
            )
            log_likelihoods.append(sum(value for value, _ in self._score(windows)))
        return log_likelihoods

    def generate(self, context: str, arguments: GenerationArguments) -> str:
        """Generate the continuation of a text.

        Raises:
            InputError: more new tokens than the context length allows, or logits that are NaN or infinite.
        """
        max_prompt_tokens = self._positions - arguments.new_tokens
        if max_prompt_tokens < 1:
            raise InputError(
                f"{arguments.new_tokens} new tokens, the model has {self._positions} positions",
                "ask for fewer (max_gen_toks)",
            )
        ids = (self._prefix + self._tokenizer.encode(context))[-max_prompt_tokens:] or [
            self._start_token
        ]
        if self._engine is None:
            self._engine = create_engine(self._model, scales=self._scales)[0]
        new_ids: list[int] = []
        text = ""
        for token in generate_tokens(self._engine, ids, arguments.new_tokens, arguments.sampling):
            if token == self._tokenizer.eos_id:
                break
            new_ids.append(token)
            text = self._tokenizer.decode(new_ids)
            if stop_positions := [
                text.find(stop) for stop in arguments.stop if stop and stop in text
            ]:
                return text[: min(stop_positions)]
        return text

    def encode_pair(self, context: str, continuation: str) -> ScoredSequence:
        """Tokenize a context with its continuation, whose tokens (at least one) are scored."""
        stripped = context.rstrip()
        context, continuation = stripped, context[len(stripped) :] + continuation
        if context:
            context_ids = self._prefix + self._tokenizer.encode(context)
            ids = self._prefix + self._tokenizer.encode(context + continuation)
            count = max(len(ids) - len(context_ids), 1)
        else:
            ids = [self._start_token, *self._tokenizer.encode(continuation)]
            count = len(ids) - 1
        ids = ids[-(self._positions + 1) :]  # context length plus the first, unscored token
        return ScoredSequence(tuple(ids), min(count, len(ids) - 1))

    def _score(self, sequences: Sequence[ScoredSequence]) -> list[tuple[float, bool]]:
        """Return log-likelihood and greediness of each sequence, computed in batches of similar lengths."""
        results = [(0.0, True)] * len(sequences)  # an empty continuation has probability 1
        max_tokens = max_forward_tokens(self._model.device)
        nonempty = [index for index, sequence in enumerate(sequences) if sequence.count]
        for batch in batch_by_length(
            [len(sequences[index].ids) - 1 for index in nonempty], max_tokens
        ):
            indices = [nonempty[position] for position in batch]
            scores = self._score_batch([sequences[index] for index in indices])
            for index, values in zip(indices, scores, strict=True):
                results[index] = values
        return results

    @torch.inference_mode()
    def _score_batch(self, sequences: Sequence[ScoredSequence]) -> Iterator[tuple[float, bool]]:
        """Score a batch of sequences, padded at the end, where causal attention ignores the padding."""
        longest = max(len(sequence.ids) for sequence in sequences) - 1
        ids = torch.full((len(sequences), longest), self._start_token)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence.ids) - 1] = torch.tensor(sequence.ids[:-1])
        output = base_model(self._model)(ids.to(self._model.device), use_cache=False)
        for hidden, sequence in zip(output.last_hidden_state, sequences, strict=True):
            end = len(sequence.ids) - 1
            targets = torch.tensor(sequence.ids[-sequence.count :], device=hidden.device)
            yield self._log_likelihood(hidden[end - sequence.count : end], targets)

    def _log_likelihood(self, hidden: Tensor, targets: Tensor) -> tuple[float, bool]:
        """Return the summed log-likelihood of the targets, and whether each of them is the most likely token."""
        total, greedy = 0.0, True
        for chunk in self._head.token_slices(len(targets)):
            sums = self._head.sum_logits(hidden[chunk], targets[chunk], find_best=True)
            nll = sums.nll
            if not bool(nll.isfinite().all()):
                raise InputError(
                    "a log-likelihood is NaN or infinite",
                    "the weights are damaged, or activations overflow this type",
                )
            total -= nll.sum().item()
            greedy &= bool((sums.best == targets[chunk]).all())
        return total, greedy


def disjoint_windows(ids: Sequence[int], start_token: int, positions: int) -> list[ScoredSequence]:
    """Cut a text into windows of ``positions`` tokens so that each token is scored exactly once.

    The first window is preceded by ``start_token``, every other by the token before it. The last window, which scores
    fewer tokens, is extended to the left to the full context length.
    """
    windows = []
    for first in range(0, len(ids), positions):
        end = min(first + positions, len(ids))
        window = ids[max(0, end - positions - 1) : end] if first else (start_token, *ids[:end])
        windows.append(ScoredSequence(tuple(window), end - first))
    return windows


def batch_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices of sequences with similar lengths, at most ``max_tokens`` tokens with padding.

    A longer sequence gets a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _mark_model_errors(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function, and wrap its exceptions in `ModelError` to distinguish them from errors of the library."""
    try:
        return function(*arguments)
    except Exception as error:  # any error: `tasks.run` re-raises it outside of the library
        raise ModelError(error) from error
