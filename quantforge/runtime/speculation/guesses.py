"""Interface of whoever guesses the next tokens, and what has come of the guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quantforge.runtime.sampling import RowSampler


class Guesser(Protocol):
    """Something that guesses how a text goes on; it may keep state of its own about one text."""

    def guess(self, history: Sequence[int], most: int, sampler: RowSampler) -> list[int]:
        """Return up to ``most`` tokens that may follow ``history``, or none.

        Args:
            history: prompt and answer so far; of what was guessed before, what was right stands there now.
            most: at least 1.
            sampler: what will choose the tokens; it must be forked, not advanced.
        """


@dataclass(slots=True)
class Speculated:
    """Counts of a run with speculation.

    Attributes:
        passes: times that the model was computed after the prompt, with guesses or without.
        checked: those of them with guesses.
        guessed: tokens that were guessed.
        accepted: those of them that were right.
        tokens: tokens that came of all passes.
        came: tokens that came of the passes with guesses.
        parted: passes in which a guess was wrong.
    """

    passes: int = 0
    checked: int = 0
    guessed: int = 0
    accepted: int = 0
    tokens: int = 0
    came: int = 0
    parted: int = 0

    @property
    def acceptance(self) -> float | None:
        """Return the chance that a guess is right, given that all before it in its pass were.

        Guesses behind the first wrong one of a pass are not counted: nobody knows what they would have been.
        """
        judged = self.accepted + self.parted
        return self.accepted / judged if judged else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Return the tokens that came of a pass with guesses."""
        return self.came / self.checked if self.checked else None

    @property
    def expected(self) -> float | None:
        """Return `expected_tokens` of the acceptance at the mean number of guesses, beside `tokens_per_pass`."""
        chance = self.acceptance
        return None if chance is None else expected_tokens(chance, self.guessed / self.checked)

    def document(self) -> dict[str, float | None]:
        """Return the counts and what follows from them as plain data."""
        return {
            "passes": self.passes, "guessed": self.guessed, "accepted": self.accepted, "acceptance": self.acceptance,
            "tokens_per_pass": self.tokens_per_pass, "expected": self.expected,
        }  # fmt: skip


def expected_tokens(chance: float, guesses: float) -> float:
    """Return the tokens that a pass with ``guesses`` brings on average, each right with ``chance``.

    ``(1 - a^(k+1)) / (1 - a)``, and k+1 at a = 1 (Leviathan et al., arXiv 2211.17192): the guesses up to the first
    wrong one, and one token of the model's own.
    """
    if chance >= 1:
        return guesses + 1
    return float((1 - chance ** (guesses + 1)) / (1 - chance))
