"""Interface of whoever guesses the next tokens, and what has come of the guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.guess_trees import GuessTree


class Guesser(Protocol):
    """Something that guesses how a text goes on; it may keep state of its own about one text."""

    def guess(self, history: Sequence[int], most: int, sampler: RowSampler) -> GuessTree:
        """Return how ``history`` may go on: at most ``most`` tokens in a row, and `MOST_NODES` in all, or none.

        Args:
            history: prompt and answer so far; of what was guessed before, what was right stands there now.
            most: at least 1.
            sampler: what will choose the tokens; it must be forked, not advanced.
        """


@dataclass(frozen=True, slots=True)
class Computed:
    """Prompt, or a pass, as the model has computed it.

    Attributes:
        tree: guesses of the pass; none of the prompt.
        logits: ``[nodes + 1, vocabulary]``, behind the last token of the text and behind each node; of the prompt those
            behind its last token alone.
        hidden: ``[tokens, hidden]`` of what stays in the text (the last token before, and the guesses that were right),
            after the last norm.
        features: likewise what went into some blocks, in the order in which `WatchingGuesser.blocks` has them.
        following: the token of the text that stands behind each of these.
    """

    tree: GuessTree
    logits: Tensor
    hidden: Tensor
    features: tuple[Tensor, ...]
    following: tuple[int, ...]


@runtime_checkable
class WatchingGuesser(Guesser, Protocol):
    """Guesser that needs what the model has computed.

    Attributes:
        blocks: of those what goes into them.
    """

    blocks: tuple[int, ...]

    def watch(self, computed: Computed) -> None:
        """Note the prompt, or a pass; the pass with guesses or without."""


@dataclass(slots=True)
class Speculated:
    """Counts of a run with speculation.

    Attributes:
        passes: times that the model was computed after the prompt, with guesses or without.
        checked: those of them with guesses.
        guessed: tokens that were guessed.
        depths: of them, those of the longest guess of each pass: where each place has one guess, all.
        accepted: those of them that were right.
        tokens: tokens that came of all passes.
        came: tokens that came of the passes with guesses.
        parted: passes in which all guesses of a place were wrong.
    """

    passes: int = 0
    checked: int = 0
    guessed: int = 0
    depths: int = 0
    accepted: int = 0
    tokens: int = 0
    came: int = 0
    parted: int = 0

    @property
    def acceptance(self) -> float | None:
        """Return the chance that a guess of a place is right, given that the text got there in its pass.

        Guesses behind the first wrong one are not counted: nobody knows what they would have been.
        """
        judged = self.accepted + self.parted
        return self.accepted / judged if judged else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Return the tokens that came of a pass with guesses."""
        return self.came / self.checked if self.checked else None

    @property
    def expected(self) -> float | None:
        """Return `expected_tokens` of the acceptance at the mean length of the guesses, beside `tokens_per_pass`."""
        chance = self.acceptance
        return None if chance is None else expected_tokens(chance, self.depths / self.checked)

    def count(self, tree: GuessTree, accepted: int, *, parted: bool) -> None:
        """Count a pass: its guesses, how many were right, and whether the text parted from all of them."""
        self.passes += 1
        self.tokens += accepted + 1
        if tree.guesses:
            self.checked += 1
            self.guessed += tree.guesses
            self.depths += tree.depth
            self.accepted += accepted
            self.came += accepted + 1
            self.parted += parted

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
