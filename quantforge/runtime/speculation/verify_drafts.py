"""Verification of drafted tokens: one is accepted if the model chooses the same token; with acceptance statistics.

At each position the token is chosen from the model's own logits with the same random number as in plain decoding. So
drafting changes how many tokens a pass yields, never which ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from quantforge.errors import InputError
from quantforge.runtime.sampling import ChosenToken, RowSampler, choose_tokens
from quantforge.runtime.speculation.tree import ROOT, DraftTree


@dataclass(slots=True)
class VerifiedDraft:
    """Result of verifying the draft tree of one text.

    Attributes:
        tree: the draft tree.
        chosen: the accepted tokens and one further token, or an error if the logits of the last one are not finite.
        path: tree nodes of the accepted tokens.
        missed: whether tokens were drafted for the last position and all were rejected.
    """

    tree: DraftTree
    chosen: list[ChosenToken | InputError] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    missed: bool = False

    @property
    def node(self) -> int:
        """Return the last accepted node, after which the next token is chosen."""
        return self.path[-1] if self.path else ROOT

    def append_token(self, chosen_token: ChosenToken | InputError, stop: frozenset[int]) -> bool:
        """Append the next chosen token; return whether it was drafted, so that verification continues."""
        self.chosen.append(chosen_token)
        if isinstance(chosen_token, InputError) or chosen_token.token in stop:
            return False
        child = self.tree.child(self.node, chosen_token.token)
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
) -> list[VerifiedDraft]:
    """Choose the next tokens of each text, following its draft tree as long as drafted tokens are accepted.

    Args:
        logits: ``[rows, vocabulary]`` float32; for each text in turn, the row after its last token and the rows after
            each node of its tree.
        samplers: one for each text.
        trees: one for each text.
        stops: for each text, the tokens that end it.
    """
    starts = [0, *accumulate(1 + len(tree.tokens) for tree in trees)]
    batch_chosen: list[ChosenToken] = []
    if not any(tree.probes for tree in trees) and not any(
        sampler.has_state for sampler in samplers
    ):
        row_samplers = [
            sampler
            for sampler, tree in zip(samplers, trees, strict=True)
            for _ in (0, *tree.tokens)
        ]
        with suppress(InputError):  # the bad row may be one that is never reached
            batch_chosen = choose_tokens(row_samplers, logits)
    results = [VerifiedDraft(tree) for tree in trees]
    active = [*range(len(trees))]
    while active:
        rows = [starts[text] + results[text].node + 1 for text in active]
        if batch_chosen:
            chosen_tokens: list[ChosenToken | InputError] = [batch_chosen[row] for row in rows]
        else:
            active_logits = logits if len(rows) == len(logits) else logits[rows]
            chosen_tokens = _choose_or_error(active_logits, [samplers[text] for text in active])
        active = [
            text
            for text, token in zip(active, chosen_tokens, strict=True)
            if results[text].append_token(token, stops[text])
        ]
    return results


def _choose_or_error(
    logits: Tensor, samplers: Sequence[RowSampler]
) -> list[ChosenToken | InputError]:
    """Choose the next token for each row of logits; a row that is not finite gives an `InputError` instead."""
    try:
        return [*choose_tokens(samplers, logits)]
    except InputError as error:  # one row is not finite; no random number was used yet
        if len(samplers) == 1:
            return [error]
        return [
            _choose_or_error(logits[row : row + 1], [sampler])[0]
            for row, sampler in enumerate(samplers)
        ]


@dataclass(slots=True)
class SpeculationCounts:
    """Statistics of speculative decoding.

    Attributes:
        passes: forward passes of the model after the prompt, with or without drafted tokens.
        draft_passes: passes with drafted tokens.
        drafted: number of drafted tokens.
        depths: sum over passes of the depth of the draft tree (its most tokens in a row).
        accepted: accepted drafted tokens.
        tokens: tokens that all passes yielded.
        draft_pass_tokens: tokens that the passes with drafted tokens yielded.
        rejected_passes: passes in which all tokens drafted for a position were rejected.
    """

    passes: int = 0
    draft_passes: int = 0
    drafted: int = 0
    depths: int = 0
    accepted: int = 0
    tokens: int = 0
    draft_pass_tokens: int = 0
    rejected_passes: int = 0

    @property
    def acceptance(self) -> float | None:
        """Return the acceptance rate of drafted tokens whose predecessors were all accepted; None without any.

        Tokens after the first rejected one are not counted, because they were never judged.
        """
        judged = self.accepted + self.rejected_passes
        return self.accepted / judged if judged else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Return the mean number of tokens that a pass with drafted tokens yields; None without such passes."""
        return self.draft_pass_tokens / self.draft_passes if self.draft_passes else None

    @property
    def expected(self) -> float | None:
        """Return `expected_tokens` for the acceptance rate and the mean depth, to compare with `tokens_per_pass`."""
        probability = self.acceptance
        return (
            None
            if probability is None
            else expected_tokens(probability, self.depths / self.draft_passes)
        )

    def count(self, verified: VerifiedDraft) -> None:
        """Add the result of a pass to the statistics."""
        tree, accepted = verified.tree, len(verified.path)
        self.passes += 1
        self.tokens += accepted + 1
        if tree.drafted:
            self.draft_passes += 1
            self.drafted += tree.drafted
            self.depths += tree.depth
            self.accepted += accepted
            self.draft_pass_tokens += accepted + 1
            self.rejected_passes += verified.missed

    def document(self) -> dict[str, float | None]:
        """Return the statistics as JSON-serializable data."""
        return {
            "passes": self.passes,
            "guessed": self.drafted,
            "accepted": self.accepted,
            "acceptance": self.acceptance,
            "tokens_per_pass": self.tokens_per_pass,
            "expected": self.expected,
        }


def expected_tokens(probability: float, drafted: float) -> float:
    """Return the expected number of tokens of a pass with ``drafted`` tokens, each accepted with ``probability``.

    ``(1 - a^(k+1)) / (1 - a)``, and k+1 at a = 1 (Leviathan et al., arXiv 2211.17192): the accepted tokens, and one
    token that the model chooses itself.
    """
    if probability >= 1:
        return drafted + 1
    return float((1 - probability ** (drafted + 1)) / (1 - probability))
