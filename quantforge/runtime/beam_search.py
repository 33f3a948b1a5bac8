"""Beam search: several continuations of one prompt side by side, of which the most likely are kept at every step.

As transformers defines it. In each step the log-probabilities of all tokens are added to the sums of their beams, and
the best candidates are looked at, so many that enough are left when some end. Of the best ``beams``, those that end are
finished, with the score sum / length^length_penalty (a length counts new tokens, the ending one included); the best
others continue. A finished one gives way to a better one. The search is over after ``new_tokens`` steps, or before, by
``early_stopping``:

* ``False``: when the best running beam, scored at its length, is no better than the worst of ``beams`` finished ones;
* ``True``: when ``beams`` are finished, or as above;
* ``"never"``: as ``False``, scored at the greatest length where a positive penalty favours length.

With one beam the greedy continuation is found. The cache follows: after the prompt, the row of a beam becomes a copy of
the one that it continues.
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
    """A continuation.

    Attributes:
        tokens: its new tokens, one that ended it included.
        score: sum of their log-probabilities; of a finished one divided by length^length_penalty.
        ended: a token of ``stop`` is the last.
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
    """Return the finished continuations of a prompt, the best one first, at most ``options.beams``.

    Args:
        engine: computes logits.
        ids: the prompt.
        new_tokens: at most so many.
        options: the rule.
        stop: tokens that end a continuation.
        on_step: is called at every step with the number of beams.

    Raises:
        InputError: logits that are no numbers; a vocabulary with too few tokens for so many beams.
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
    """State of a search: running and finished beams."""

    options: BeamOptions
    new_tokens: int
    stop: frozenset[int]
    length: int = 0
    running: list[Beam] = field(default_factory=lambda: [Beam((), 0.0)])
    finished: list[Beam] = field(default_factory=list)

    def advance(self, logits: Tensor) -> list[int] | None:
        """Take a step with logits ``[running, vocabulary]``; return which row each beam continues, None at the end.

        Raises:
            InputError: as `beam_search`.
        """
        candidates = self._candidates(logits)
        self.length += 1
        last = self.length == self.new_tokens
        closed = self.options.early_stopping is True and self._full
        new, going = [], []
        for rank, (score, parent, token) in enumerate(candidates):
            beam = Beam((*self.running[parent].tokens, token), score, token in self.stop)
            if not beam.ended and not last:
                going.append((parent, beam))
            elif rank < self.options.beams and not closed:
                new.append(Beam(beam.tokens, self._scored(score, self.length), beam.ended))
        best = sorted([*self.finished, *new], key=lambda beam: -beam.score)
        self.finished = best[: self.options.beams]
        going = going[: self.options.beams]
        self.running = [beam for _, beam in going]
        return None if last or self._over() else [parent for parent, _ in going]

    def _candidates(self, logits: Tensor) -> list[tuple[float, int, int]]:
        """Return the best continuations as (sum, beam, token), the best one first."""
        check_finite(logits)
        wanted = max(2, 1 + len(self.stop)) * self.options.beams
        vocabulary = logits.shape[1]
        if wanted > vocabulary:
            raise InputError(
                f"{self.options.beams} beams need {wanted} tokens, the model has {vocabulary}",
                "take fewer beams",
            )
        before = torch.tensor([beam.score for beam in self.running], device=logits.device)
        sums = logits.log_softmax(-1) + before[:, None]
        best = sums.flatten().topk(wanted)
        places = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [(score, *divmod(place, vocabulary)) for score, place in places]

    @property
    def _full(self) -> bool:
        return len(self.finished) == self.options.beams

    def _scored(self, total: float, length: int) -> float:
        return total / float(length**self.options.length_penalty)

    def _over(self) -> bool:
        """Return whether no running beam is expected to be better than the finished ones."""
        if not self._full:
            return False
        late = self.options.early_stopping == "never" and self.options.length_penalty > 0
        best = self._scored(self.running[0].score, self.new_tokens if late else self.length)
        return self.options.early_stopping is True or best <= self.finished[-1].score
