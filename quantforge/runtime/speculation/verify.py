"""Verification: a drafted token counts where the model chooses it, and counts of what came of drafted tokens.

At each place the token is chosen from the model's own logits, with the draw that the plain loop makes there. So what is
drafted changes how many tokens a pass brings, never which ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from quantforge.errors import InputError
from quantforge.runtime.sampling import Chosen, RowSampler, choose_rows
from quantforge.runtime.speculation.tree import ROOT, DraftTree


@dataclass(slots=True)
class Verified:
    """Tokens that follow a text.

    Attributes:
        tree: what was drafted.
        chosen: drafted tokens that were right, and one token more; or what is wrong with the logits of the last.
        path: nodes of the right ones.
        missed: tokens were drafted for the place of the last one, and are wrong.
    """

    tree: DraftTree
    chosen: list[Chosen | InputError] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    missed: bool = False

    @property
    def node(self) -> int:
        """Return the node after which the next token is chosen."""
        return self.path[-1] if self.path else ROOT

    def take(self, chosen: Chosen | InputError, stop: frozenset[int]) -> bool:
        """Take the next token; return whether it was drafted, so that another one follows."""
        self.chosen.append(chosen)
        if isinstance(chosen, InputError) or chosen.token in stop:
            return False
        child = self.tree.child(self.node, chosen.token)
        if child is None:
            self.missed = bool(self.tree.children(self.node))
            return False
        self.path.append(child)
        return True


def verify(
    logits: Tensor,
    samplers: Sequence[RowSampler],
    trees: Sequence[DraftTree],
    stops: Sequence[frozenset[int]],
) -> list[Verified]:
    """Choose the next tokens of each text, along its tree as long as drafted tokens are right.

    Args:
        logits: ``[rows, vocabulary]`` float32: for each text after its last token, and after each node of its tree.
        samplers: of the texts.
        trees: likewise.
        stops: tokens after which nothing more is chosen, likewise.
    """
    starts = [0, *accumulate(1 + len(tree.tokens) for tree in trees)]
    every: list[Chosen] = []
    if not any(tree.probes for tree in trees) and not any(one.has_state for one in samplers):
        owners = [one for one, tree in zip(samplers, trees, strict=True) for _ in (0, *tree.tokens)]
        with suppress(InputError):  # perhaps of a row that no text gets to
            every = choose_rows(owners, logits)
    found = [Verified(tree) for tree in trees]
    active = [*range(len(trees))]
    while active:
        rows = [starts[text] + found[text].node + 1 for text in active]
        if every:
            chosen: list[Chosen | InputError] = [every[row] for row in rows]
        else:
            some = logits if len(rows) == len(logits) else logits[rows]
            chosen = _choose(some, [samplers[text] for text in active])
        active = [
            text
            for text, one in zip(active, chosen, strict=True)
            if found[text].take(one, stops[text])
        ]
    return found


def _choose(logits: Tensor, samplers: Sequence[RowSampler]) -> list[Chosen | InputError]:
    """Return the next token for each row of logits, or what is wrong with the row."""
    try:
        return [*choose_rows(samplers, logits)]
    except InputError as error:  # of one of them; nothing was drawn yet
        if len(samplers) == 1:
            return [error]
        return [_choose(logits[row : row + 1], [one])[0] for row, one in enumerate(samplers)]


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of a run with speculation.

    Attributes:
        passes: times that the model was computed after the prompt, with drafted tokens or without.
        checked: those of them with drafted tokens.
        guessed: tokens that were drafted.
        depths: sum over passes of the most drafted tokens in a row: where each place has one, all of them.
        accepted: drafted tokens that were right.
        tokens: tokens that came of all passes.
        came: tokens that came of the passes with drafted tokens.
        parted: passes in which all tokens drafted for a place were wrong.
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
        """Return the chance that a drafted token is right, given that the text got to its place.

        Those after the first wrong one are not counted: nobody knows what they would have been.
        """
        judged = self.accepted + self.parted
        return self.accepted / judged if judged else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Return the tokens that came of a pass with drafted tokens."""
        return self.came / self.checked if self.checked else None

    @property
    def expected(self) -> float | None:
        """Return `expected_tokens` of the acceptance at the mean depth, to compare with `tokens_per_pass`."""
        chance = self.acceptance
        return None if chance is None else expected_tokens(chance, self.depths / self.checked)

    def count(self, verified: Verified) -> None:
        """Count a pass."""
        tree, accepted = verified.tree, len(verified.path)
        self.passes += 1
        self.tokens += accepted + 1
        if tree.drafted:
            self.checked += 1
            self.guessed += tree.drafted
            self.depths += tree.depth
            self.accepted += accepted
            self.came += accepted + 1
            self.parted += verified.missed

    def document(self) -> dict[str, float | None]:
        """Return the counts and what follows from them as plain data."""
        return {
            "passes": self.passes,
            "guessed": self.guessed,
            "accepted": self.accepted,
            "acceptance": self.acceptance,
            "tokens_per_pass": self.tokens_per_pass,
            "expected": self.expected,
        }


def expected_tokens(chance: float, drafted: float) -> float:
    """Return the mean number of tokens of a pass with so many drafted ones, each right with ``chance``.

    ``(1 - a^(k+1)) / (1 - a)``, and k+1 at a = 1 (Leviathan et al., arXiv 2211.17192): those up to the first wrong
    one, and one token of the model's own.
    """
    if chance >= 1:
        return drafted + 1
    return float((1 - chance ** (drafted + 1)) / (1 - chance))
