"""Beam search: several continuations of one prompt are extended in parallel, keeping the most likely at every step.

It follows the definition of transformers. Each step adds the log-probabilities of all tokens to the sums of their beams
and takes enough of the best candidates that ``beams`` remain if some end. Of the best ``beams`` candidates, those that
end are finished, with the score sum / length^length_penalty (the length counts new tokens, including the end token);
the best others continue. Only the best ``beams`` finished ones are kept. The search ends after ``new_tokens`` steps, or
earlier, depending on ``early_stopping``:

* ``False``: when the best running beam, scored at its length, is no better than the worst of ``beams`` finished ones;
* ``True``: when ``beams`` are finished, or as above;
* ``"never"``: as ``False``, scored at the greatest length where a positive penalty favours length.

With one beam the result is the greedy continuation. After each step, the cache row of a beam is replaced by a copy of
the row of the beam that it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.runtime.decoding import DecodingEngine
from quantforge.runtime.generation_options import BeamOptions
from quantforge.runtime.sampling import check_finite


@dataclass(frozen=True, slots=True)
class Beam:
    """One candidate continuation of the prompt.

    Attributes:
        tokens: its new tokens, including the end token.
        score: sum of their log-probabilities; divided by length^length_penalty once it is finished.
        ended: whether its last token is a stop token.
    """

    tokens: tuple[int, ...]
    score: float
    ended: bool = False


@torch.inference_mode()
def beam_search(
    engine: DecodingEngine,
    ids: Sequence[int],
    new_tokens: int,
    options: BeamOptions,
    stop: frozenset[int] = frozenset(),
    on_step: Callable[[int], object] = lambda _: None,
) -> list[Beam]:
    """Run a beam search; return up to ``options.beams`` finished continuations, the best one first.

    Args:
        engine: computes logits.
        ids: token ids of the prompt.
        new_tokens: most new tokens of a continuation.
        options: number of beams, length penalty and early stopping.
        stop: ids of tokens that end a continuation.
        on_step: called with the number of beams at every step.

    Raises:
        InputError: a logit is NaN or infinite, or the vocabulary is too small for so many beams.
    """
    search = _Search(options, new_tokens, stop)
    prompts = torch.tensor([list(ids)] * options.beams, device=engine.device)
    logits = engine.start(prompts, new_tokens).float()[:1]  # the beams are still the same
    while (parents := search.advance(logits)) is not None:
        on_step(options.beams)
        engine.reorder(parents, len(ids))
        last = [beam.tokens[-1] for beam in search.running]
        logits = engine.step(torch.tensor(last, device=engine.device)).float()
    on_step(options.beams)
    return search.finished


@dataclass(slots=True)
class _Search:
    """State of a beam search: running and finished beams."""

    options: BeamOptions
    new_tokens: int
    stop: frozenset[int]
    length: int = 0
    running: list[Beam] = field(default_factory=lambda: [Beam((), 0.0)])
    finished: list[Beam] = field(default_factory=list)

    def advance(self, logits: Tensor) -> list[int] | None:
        """Extend the beams by one token, given logits ``[running, vocabulary]``.

        Returns:
            For each new running beam the index of the beam that it continues; None when the search is done.

        Raises:
            InputError: as for `beam_search`.
        """
        candidates = self._candidates(logits)
        self.length += 1
        last = self.length == self.new_tokens
        is_full = self.options.early_stopping is True and self._has_all_finished
        newly_finished, continuing = [], []
        for rank, (score, parent, token) in enumerate(candidates):
            beam = Beam((*self.running[parent].tokens, token), score, token in self.stop)
            if not beam.ended and not last:
                continuing.append((parent, beam))
            elif rank < self.options.beams and not is_full:
                newly_finished.append(
                    Beam(beam.tokens, self._normalized_score(score, self.length), beam.ended)
                )
        best = sorted([*self.finished, *newly_finished], key=lambda beam: -beam.score)
        self.finished = best[: self.options.beams]
        continuing = continuing[: self.options.beams]
        self.running = [beam for _, beam in continuing]
        return None if last or self._is_done() else [parent for parent, _ in continuing]

    def _candidates(self, logits: Tensor) -> list[tuple[float, int, int]]:
        """Return the best extensions as (sum of log-probabilities, beam index, token), the best one first."""
        check_finite(logits)
        count = max(2, 1 + len(self.stop)) * self.options.beams
        vocabulary = logits.shape[1]
        if count > vocabulary:
            raise InputError(
                f"{self.options.beams} beams need {count} tokens, the model has {vocabulary}",
                "take fewer beams",
            )
        beam_sums = torch.tensor([beam.score for beam in self.running], device=logits.device)
        sums = logits.log_softmax(-1) + beam_sums[:, None]
        best = sums.flatten().topk(count)
        candidates = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [(score, *divmod(flat_index, vocabulary)) for score, flat_index in candidates]

    @property
    def _has_all_finished(self) -> bool:
        return len(self.finished) == self.options.beams

    def _normalized_score(self, total: float, length: int) -> float:
        return total / float(length**self.options.length_penalty)

    def _is_done(self) -> bool:
        """Return whether no running beam is expected to be better than the finished ones."""
        if not self._has_all_finished:
            return False
        use_max_length = self.options.early_stopping == "never" and self.options.length_penalty > 0
        best = self._normalized_score(
            self.running[0].score, self.new_tokens if use_max_length else self.length
        )
        return self.options.early_stopping is True or best <= self.finished[-1].score
